"""Heads that draft all positions in one pass: Medusa, blockwise and early exit from one state, and block drafters.

Block drafters are DFlash (2602.06036), JetSpec (2606.18394), and DSpark (2607.05147) with its further heads. A block is
the newest token and mask tokens behind it. Its rows see each other, and the target's hidden states before it as keys
and values.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.models.heads.layers import HeadAttention, HeadLayer, RmsNorm, rotated, rotations
from foretoken.train.config import (
    BlockwiseTrainConfig,
    DFlashTrainConfig,
    DSparkTrainConfig,
    EarlyExitTrainConfig,
    MedusaTrainConfig,
)
from foretoken.train.frozen_target import FrozenTarget, TrainBatch
from foretoken.train.head import (
    EVALUATED,
    Drafted,
    Head,
    decoder_config,
    mask_token_of,
    shuffled_rows,
    start_near_target,
)


class MedusaHead(Head):
    """Medusa (2401.10774): x + SiLU(W x + b) of the normed hidden state x, before the target's vocabulary head."""

    def __init__(self, config: MedusaTrainConfig, target: FrozenTarget, counts: Tensor) -> None:
        super().__init__()
        self.depths, self.layers = config.heads, config.layers
        self.blocks = nn.ModuleList(_Block(config.layers, target.hidden) for _ in range(config.heads))

    def forward(self, batch: TrainBatch) -> Drafted:
        x = batch.last()[:, : -self.depths].float()
        return Drafted([batch.logits(block(x)) for block in self.blocks])

    def describe(self, target: FrozenTarget) -> dict[str, Any]:
        return {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "hidden_size": target.hidden,
            "vocab_size": target.vocab,
            "truncated_vocab_size": target.vocab,
            "num_heads": self.depths,
            "num_hidden_layers": self.layers,
            "original_lm_head": True,
        }


class _Block(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        made = [nn.Linear(width, width) for _ in range(layers)]
        for layer in made:  # the initial output is the target's own, for the token before
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        self.layers = nn.ModuleList(made)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class BlockwiseHead(Head):
    """Blockwise parallel decoding (1811.03115): x + down(relu(up x)), before the target's vocabulary head."""

    def __init__(self, config: BlockwiseTrainConfig, target: FrozenTarget, counts: Tensor) -> None:
        super().__init__()
        self.depths, self.intermediate = config.heads, config.intermediate
        self.heads = nn.ModuleList(_Residual(target.hidden, config.intermediate) for _ in range(config.heads))

    def forward(self, batch: TrainBatch) -> Drafted:
        x = batch.last()[:, : -self.depths].float()
        return Drafted([batch.logits(head(x)) for head in self.heads])

    def describe(self, target: FrozenTarget) -> dict[str, Any]:
        return {
            "model_type": "foretoken_blockwise",
            "hidden_size": target.hidden,
            "vocab_size": target.vocab,
            "intermediate_size": self.intermediate,
            "num_heads": self.depths,
        }


class _Residual(nn.Module):
    def __init__(self, width: int, intermediate: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, intermediate)
        self.down = nn.Linear(intermediate, width)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.relu(self.up(x)))
        return out


class EarlyExitHead(Head):
    """Early exit (LayerSkip, 2404.16710): n + A n of n = norm(hidden state), before the target's vocabulary head.

    It replaces the target's later layers, so depths differ only in their rows.
    """

    samples = True

    def __init__(self, config: EarlyExitTrainConfig, target: FrozenTarget, counts: Tensor) -> None:
        super().__init__()
        self.depths, self.taps = 4, (config.tapped(target.layers),)
        self.norm = RmsNorm(target.hidden, target.config.rms_norm_eps)
        self.adapter = nn.Linear(target.hidden, target.hidden, bias=False)
        nn.init.zeros_(self.adapter.weight)
        if (norm := target.final_norm()) is not None:
            with torch.no_grad():
                self.norm.weight.copy_(norm)

    def forward(self, batch: TrainBatch) -> Drafted:
        n = self.norm(batch.tapped(self.taps).float())
        logits = batch.logits(n + self.adapter(n))
        roots = batch.ids.shape[1] - self.depths
        # Row i + 1 is for token i + 2. In training one depth suffices: the others are the same rows, shifted.
        depths = 1 if self.training else self.depths
        return Drafted([logits[:, 1 + depth : 1 + depth + roots] for depth in range(depths)])

    def describe(self, target: FrozenTarget) -> dict[str, Any]:
        return {"model_type": "foretoken_early_exit", "hidden_size": target.hidden, "exit_layer": self.taps[0]}


class DFlashHead(Head):
    """A DFlash head. Its state_dict is the checkpoint, under z-lab's names.

    Row i of the target's text begins a block whose newest token is token i + 1: the block sees the target's states up
    to row i. Its row k predicts token i + 1 + k, so the first row predicts nothing.
    """

    samples = True
    shift = 1  # the row of a block that predicts the first token
    causal = False  # whether rows of a block see no later rows
    architecture = "DFlashDraftModel"

    def __init__(self, config: DFlashTrainConfig, target: FrozenTarget, counts: Tensor) -> None:
        super().__init__()
        self.settings, self.taps = config, config.tapped(target.layers)
        self.depths, self.mask_token = config.block - self.shift, mask_token_of(config.mask_token, target, counts)
        width, shape = target.hidden, target.config
        self.fc = nn.Linear(len(self.taps) * width, width, bias=False)
        self.hidden_norm = RmsNorm(width, shape.rms_norm_eps)
        intermediate = config.intermediate or shape.intermediate_size
        self._layers = [
            HeadLayer(BlockAttention(config, shape, self.causal), shape, intermediate) for _ in range(config.layers)
        ]
        self.layers = nn.ModuleList(self._layers)
        self.norm = RmsNorm(width, shape.rms_norm_eps)
        self._roots: Tensor | None = None
        self._start_from(target)

    @torch.no_grad()
    def _start_from(self, target: FrozenTarget) -> None:
        """Initializes with the highest tap, and the target's last layers where shapes fit."""
        start_near_target(self.fc, self.norm.weight, target)
        for back, layer in enumerate(reversed(self._layers)):
            layer.start_from(target.layer(-1 - back))

    def begin(self, progress: float, step: int, length: int) -> None:
        """Chooses the rows whose blocks the next step trains; they depend on ``step`` alone."""
        rows = shuffled_rows(length - self.depths - 1, step)
        self._roots = rows[: self.settings.anchors].sort().values.to(self.fc.weight.device)

    def roots(self, batch: TrainBatch) -> Tensor:
        """Returns the rows whose blocks are computed, ascending."""
        if self.training and self._roots is not None:
            return self._roots
        return torch.arange(0, batch.ids.shape[1] - self.depths - 1, EVALUATED, device=batch.ids.device)

    def forward(self, batch: TrainBatch) -> Drafted:
        roots = self.roots(batch)
        return Drafted(list(batch.logits(self.blocks(batch, roots)).unbind(2)), roots=[roots] * self.depths)

    def blocks(self, batch: TrainBatch, roots: Tensor) -> Tensor:
        """Returns the normed states of the rows that predict, [B, R, depths, H]."""
        context = self.hidden_norm(self.fc(batch.tapped(self.taps)))
        ids = torch.full((*batch.ids[:, roots].shape, self.settings.block), self.mask_token, device=roots.device)
        ids[..., 0] = batch.ids[:, roots + 1]
        hidden = F.embedding(ids, batch.embeddings)
        for layer in self._layers:
            hidden = layer(None, hidden, context, roots)
        out: Tensor = self.norm(hidden[:, :, self.shift :])
        return out

    def describe(self, target: FrozenTarget) -> dict[str, Any]:
        layer = self._layers[0]
        return {
            "architectures": [self.architecture],
            "model_type": "qwen3",
            **decoder_config(target, len(self.layers), layer.self_attn, layer.mlp.gate_proj.out_features),
            "layer_types": ["full_attention"] * len(self.layers),
            "num_target_layers": target.layers,
            "block_size": self.settings.block,
            **self._format_keys(),
        }

    def _format_keys(self) -> dict[str, Any]:
        return {"dflash_config": {"mask_token_id": self.mask_token, "target_layer_ids": [t - 1 for t in self.taps]}}


class JetSpecHead(DFlashHead):
    """A JetSpec head: a DFlash head whose rows see no later rows of their block."""

    causal = True

    def _format_keys(self) -> dict[str, Any]:
        section = super()._format_keys()["dflash_config"]
        return {"is_causal": True, "dflash_config": {**section, "causal_head": True}}  # the first is read by vLLM


class DSparkHead(DFlashHead):
    """A DSpark head, under DeepSeek's names. Row k of a block predicts token i + 2 + k.

    The Markov head adds w2(w1[token before]) to a row's logits, or w2(sigmoid(gate(state, w1[...])) * w1[...]). The
    confidence head estimates the probability that the row's token will be accepted, from the row's state and w1[token
    before].
    """

    shift = 0
    architecture = "Qwen3DSparkModel"

    def __init__(self, config: DSparkTrainConfig, target: FrozenTarget, counts: Tensor) -> None:
        super().__init__(config, target, counts)
        self.markov_head = _Markov(target.vocab, config.markov_rank, target.hidden if config.gated else 0)
        self.confidence_head = _Confidence(target.hidden + config.markov_rank)

    def forward(self, batch: TrainBatch) -> Drafted:
        roots = self.roots(batch)
        states = self.blocks(batch, roots)
        before = batch.ids[:, roots[:, None] + 1 + torch.arange(self.depths, device=roots.device)]
        embedded = self.markov_head.markov_w1(before)
        logits = batch.logits(states) + self.markov_head(states, embedded)
        confidence = self.confidence_head(torch.cat([states, embedded], dim=-1))
        return Drafted(list(logits.unbind(2)), list(confidence.unbind(2)), [roots] * self.depths)

    def _format_keys(self) -> dict[str, Any]:
        return {
            "mask_token_id": self.mask_token,
            "target_layer_ids": [tap - 1 for tap in self.taps],
            "num_anchors": self.settings.anchors,
            "markov_rank": self.markov_head.markov_w2.in_features,
            "markov_head_type": "gated" if self.markov_head.gate_proj is not None else "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }


class _Markov(nn.Module):
    """A bias of the logits by the token before, gated by states of ``width`` units unless this is 0."""

    def __init__(self, vocab: int, rank: int, width: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, vocab, bias=False)
        self.gate_proj = nn.Linear(width + rank, rank) if width else None
        nn.init.normal_(self.markov_w1.weight, std=0.1)
        nn.init.zeros_(self.markov_w2.weight)

    def forward(self, states: Tensor, before: Tensor) -> Tensor:
        """Returns the bias [..., V] for rows of ``states`` [..., width] below tokens of vectors ``before``."""
        if self.gate_proj is not None:
            before = self.gate_proj(torch.cat([states, before], dim=-1)).sigmoid() * before
        out: Tensor = self.markov_w2(before)
        return out


class _Confidence(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.proj(x)[..., 0]
        return out


class BlockAttention(HeadAttention):
    """Attention of Qwen3 whose blocks also see keys and values of the target's states."""

    def __init__(self, config: DFlashTrainConfig, shape: Any, causal: bool) -> None:
        super().__init__(shape.hidden_size, shape, config.heads, config.kv_heads, norm=RmsNorm)
        self.causal = causal

    def forward(self, x: Tensor, context: Tensor, roots: Tensor) -> Tensor:
        """Returns [B, R, K, H] from that and the context [B, T, H]; a block sees the context up to its root."""
        count, block = x.shape[1:3]
        length = context.shape[1]
        cos, sin = rotations(torch.arange(length + block, device=x.device), self.head_dim, self.theta)
        positions = roots[:, None] + 1 + torch.arange(block, device=roots.device)
        block_turn, turn = (cos[positions], sin[positions]), (cos[:length], sin[:length])

        def split(y: Tensor, heads: int) -> Tensor:
            """Returns [B, heads, ..., head_dim]."""
            return y.unflatten(-1, (heads, self.head_dim)).movedim(-2, 1)

        group = self.heads // self.kv_heads
        q = rotated(self.q_norm(split(self.q_proj(x), self.heads)), block_turn) * self.head_dim**-0.5
        k = rotated(self.k_norm(split(self.k_proj(x), self.kv_heads)), block_turn).repeat_interleave(group, 1)
        v = split(self.v_proj(x), self.kv_heads).repeat_interleave(group, 1)
        k_seen = rotated(self.k_norm(split(self.k_proj(context), self.kv_heads)), turn).repeat_interleave(group, 1)
        v_seen = split(self.v_proj(context), self.kv_heads).repeat_interleave(group, 1)
        hidden = torch.arange(length, device=roots.device) > roots[:, None]
        before = (q.flatten(2, 3) @ k_seen.transpose(-1, -2)).unflatten(2, (count, block))
        within = q @ k.transpose(-1, -2)
        if self.causal:
            within = within + torch.full((block, block), float("-inf"), device=x.device).triu(1).to(within.dtype)
        scores = torch.cat([before.masked_fill(hidden[:, None], float("-inf")), within], dim=-1)
        weights = scores.softmax(-1, dtype=torch.float32).to(v.dtype)
        mixed = (weights[..., :length].flatten(2, 3) @ v_seen).unflatten(2, (count, block))
        mixed = mixed + weights[..., length:] @ v
        out: Tensor = self.o_proj(mixed.movedim(1, -2).flatten(-2))
        return out
