"""EAGLE-3 heads (2503.01840), and P-EAGLE heads (2602.01469), which predict all positions in one pass.

Both fuse three hidden states of the target and have a vocabulary of their own. Row i takes the embedding of token i + 1
and the target's feature at row i, and proposes token i + 2.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.models.heads.files import MASK_KEYS
from foretoken.models.heads.layers import FusedLayer, FusedTaps, HeadLayer, RmsNorm, UnrolledAttention
from foretoken.train.config import Eagle3Config, FusedConfig, PEagleConfig
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


class FusedHead(Head):
    """A head of layers on fused hidden states, which proposes the target's most frequent tokens.

    stack: The layers; the checkpoint has them under the names that a subclass gives them.
    """

    samples = True
    vocabulary: Tensor
    stack: Sequence[HeadLayer]

    def __init__(self, config: FusedConfig, depths: int, target: FrozenTarget, counts: Tensor) -> None:
        super().__init__()
        self.depths, self.taps, self.intermediate = depths, config.tapped(target.layers), config.intermediate
        width = target.hidden
        self.vocabulary = counts.topk(min(config.vocabulary, target.vocab)).indices.sort().values
        self.fc = nn.Linear(3 * width, width, bias=False)
        self.norm = RmsNorm(width, target.config.rms_norm_eps)
        self.lm_head = nn.Linear(width, len(self.vocabulary), bias=False)

    @torch.no_grad()
    def _start_from(self, target: FrozenTarget) -> None:
        """Initializes with the highest tap, the target's last layers where shapes fit, and its vocabulary rows."""
        start_near_target(self.fc, self.norm.weight, target)
        self.lm_head.weight.copy_(target.head[self.vocabulary.to(target.head.device)])
        for back, layer in enumerate(reversed(self.stack)):
            layer.start_from(target.layer(-1 - back))

    def describe(self, target: FrozenTarget) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "target_hidden_size": target.hidden,
            **decoder_config(target, len(self.stack), self.stack[0].self_attn, self.intermediate),
            "draft_vocab_size": len(self.vocabulary),
            "mlp_bias": False,
            "foretoken_taps": list(self.taps),  # unambiguously the inputs of these layers, see models/heads/taps
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(self.taps), "use_aux_hidden_state": True},
        }

    def start(self, tensors: Mapping[str, Tensor]) -> None:
        """Loads an earlier head. Tokens that are not in its vocabulary keep their present rows."""
        offsets = tensors.get("d2t", torch.zeros(len(tensors["lm_head.weight"]), dtype=torch.int64))
        earlier = {int(i + offset): i for i, offset in enumerate(offsets)}
        rows = self.lm_head.weight.detach().clone()
        for row, token in enumerate(self.vocabulary.tolist()):
            if token in earlier:
                rows[row] = tensors["lm_head.weight"][earlier[token]]
        others = {name: value for name, value in tensors.items() if name not in ("d2t", "t2d")}
        super().start({**others, "lm_head.weight": rows})

    def tensors(self, target: FrozenTarget) -> dict[str, Tensor]:
        """Returns the checkpoint with both maps of the vocabulary: target id = i + d2t[i], t2d marks the head's ids.

        A head with the target's vocabulary has no maps, since other engines refuse them there.
        """
        ids = self.vocabulary.cpu()
        if len(ids) == target.vocab:
            return self.weights()
        marked = torch.zeros(target.vocab, dtype=torch.bool)
        marked[ids] = True
        return self.weights() | {"d2t": ids - torch.arange(len(ids)), "t2d": marked}


class Eagle3Head(FusedHead, FusedTaps):
    """An EAGLE-3 head: one layer, unrolled in training. Its state_dict is the checkpoint, under SafeAILab's names.

    At depth 0 the feature is the target's. At depth j it is the head's own output at row i - 1 of depth j - 1. In
    EAGLE 3.1 the target's states have norms before they are fused, and the output is the normed one.
    """

    def __init__(self, config: Eagle3Config, target: FrozenTarget, counts: Tensor) -> None:
        super().__init__(config, config.depths, target, counts)
        self.single_share, self._unrolled, self.normed = config.single_share, config.depths, config.normed
        norms = [RmsNorm(target.hidden, target.config.rms_norm_eps) for _ in self.taps] if config.normed else []
        self.fc_norm = nn.ModuleList(norms)
        self.midlayer = FusedLayer(target.config, config.intermediate, config.heads, config.kv_heads)
        self.stack = (self.midlayer,)
        self._start_from(target)

    def begin(self, progress: float, step: int, length: int) -> None:
        self._unrolled = 1 if progress < self.single_share else self.depths

    def forward(self, batch: TrainBatch) -> Drafted:
        depths = self._unrolled if self.training else self.depths
        states = batch.tapped(self.taps)[:, : -self.depths]
        outputs = self.outputs(self.midlayer, batch.embedded(), states, depths)
        return Drafted([self.logits(hidden) for hidden in outputs])

    def describe(self, target: FrozenTarget) -> dict[str, Any]:
        return super().describe(target) | ({"fc_norm": True, "norm_output": True} if self.normed else {})


class PEagleHead(FusedHead):
    """A P-EAGLE head. Its state_dict is the checkpoint, under vLLM's names.

    Row i at depth 0 is that of EAGLE-3. A mask token with a learned feature stands for each token that is not drafted
    yet: the chain of root i has a row of it at each depth j, which sees the rows of depth 0 up to i and its own chain,
    and proposes token i + 2 + j. A deeper position is trained at fewer positions of a window, which bounds the cost.
    """

    def __init__(self, config: PEagleConfig, target: FrozenTarget, counts: Tensor) -> None:
        super().__init__(config, config.depths, target, counts)
        self.retention, self.mask_token = config.retention, mask_token_of(config.mask_token, target, counts)
        shape = target.config
        self.stack = [FusedLayer(shape, config.intermediate, config.heads, config.kv_heads)]
        for _ in range(config.layers - 1):
            attention = UnrolledAttention(shape.hidden_size, shape, config.heads, config.kv_heads)
            self.stack.append(HeadLayer(attention, shape, config.intermediate))
        self.layers = nn.ModuleList(self.stack)
        self.mask_hidden = nn.Parameter(torch.randn(3 * target.hidden))
        self._roots: list[Tensor] | None = None
        self._start_from(target)

    def begin(self, progress: float, step: int, length: int) -> None:
        """Chooses the roots whose chains the next step trains, by depth; they depend on ``step`` alone."""
        rows = length - self.depths
        order = shuffled_rows(rows, step)
        counts = [max(1, round(rows * self.retention**depth)) for depth in range(1, self.depths)]
        device = self.fc.weight.device
        self._roots = [roots.to(device) for roots in (torch.arange(rows), *(order[:count] for count in counts))]

    def forward(self, batch: TrainBatch) -> Drafted:
        size, rows = batch.ids.shape[0], batch.ids.shape[1] - self.depths
        roots_by_depth = self.roots(rows)
        masked, mask_feature = batch.embeddings[self.mask_token], self.fc(self.mask_hidden)
        cached: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in self.stack]
        logits = []
        for depth, roots in enumerate(roots_by_depth):
            if depth:
                embedded, hidden = (x.expand(size, len(roots), -1) for x in (masked, mask_feature))
            else:
                embedded, hidden = batch.embedded()[:, 1 : 1 + rows], self.fc(batch.tapped(self.taps)[:, :rows])
            for layer, (keys, values) in zip(self.stack, cached, strict=True):
                hidden = layer(embedded, hidden, depth, keys, values, roots if depth else None)
            logits.append(self.lm_head(self.norm(hidden if depth else hidden[:, roots])))
        return Drafted(logits, roots=roots_by_depth)

    def roots(self, rows: int) -> list[Tensor]:
        """Returns the roots of the chains that reach each depth."""
        if self.training and self._roots is not None:
            return self._roots
        return [torch.arange(0, rows, EVALUATED, device=self.fc.weight.device)] * self.depths

    def start(self, tensors: Mapping[str, Tensor]) -> None:
        """Loads an earlier head, or an EAGLE-3 head, which has one layer and no feature of the mask token."""
        named = {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
        super().start({**self.state_dict(), **named})

    def describe(self, target: FrozenTarget) -> dict[str, Any]:
        return super().describe(target) | dict.fromkeys(MASK_KEYS, self.mask_token)
