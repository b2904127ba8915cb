"""Our runtime for the Llama family: Llama, Mistral, Qwen2, Qwen3 from an ordinary safetensors checkpoint.

One pass takes a ragged batch: all rows of all sequences go through each product together, and only attention
sees sequences. No row's logits depend on what shares the pass (see ``attention.py`` and ``linear.py``), so text
does not depend on proposer, depth or batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.models.attention import Plan, attend
from foretoken.models.base import Handle, Model, Scores, growing
from foretoken.models.kv import KVCache
from foretoken.models.linear import Linear, can_pack
from foretoken.models.rope import KINDS, inverse_frequencies, rope_kind

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
PREFILL_ROWS = 256  # rows of one prefill pass
JOINT_ROWS = 32  # a sequence with more pending rows than this is prefilled by itself


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer's weights; queries, keys and values are one product, gate and up another."""

    norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    window: int  # 0: sees everything


class Decoder(Model):
    """See the module. ``config`` is the checkpoint's config.json as a dict."""

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        max_length: int | None = None,
    ) -> None:
        self.dtype, self.device = dtype, device
        self.vocab_size = config["vocab_size"]
        self.hidden_size = config["hidden_size"]
        self.num_layers = config["num_hidden_layers"]
        self.max_length = min(max_length or config["max_position_embeddings"], config["max_position_embeddings"])
        self.heads = config["num_attention_heads"]
        self.kv_heads = config.get("num_key_value_heads") or self.heads
        self.head_dim = config.get("head_dim") or self.hidden_size // self.heads
        self.eps = config["rms_norm_eps"]
        self.rows_independent = can_pack(dtype, device)
        self._load(config, weights)
        angles = torch.outer(torch.arange(self.max_length + 1).float(), inverse_frequencies(config, self.head_dim))
        table = torch.cat((angles, angles), dim=-1)
        self._cos, self._sin = table.cos().to(device, dtype), table.sin().to(device, dtype)
        self._sin[:, : self.head_dim // 2].neg_()  # the sign of rotate_half, folded in once
        kept = torch.float64 if dtype == torch.float32 and self.rows_independent else dtype  # see attention.py
        self.cache = KVCache(self.num_layers, self.kv_heads, self.head_dim, kept, device)

    @staticmethod
    def supports(config: Mapping[str, Any]) -> bool:
        """Whether this file computes that architecture exactly."""
        return (
            config.get("model_type") in FAMILY
            and config.get("hidden_act", "silu") == "silu"
            and rope_kind(config) in KINDS
            and not config.get("quantization_config")
        )

    @classmethod
    def load(cls, path: Path, dtype: torch.dtype, device: torch.device, max_length: int | None = None) -> Self:
        from foretoken.models.checkpoint import load_config, open_weights

        return cls(load_config(path), open_weights(path), dtype, device, max_length)

    # the contract

    def open(self, prompt: Sequence[int]) -> Handle:
        if not prompt:
            raise InvalidRequest("the prompt is empty; at least one token is needed to continue from")
        return Handle(self.cache.acquire(), list(prompt))

    def close(self, handle: Handle) -> None:
        if handle.slot >= 0:
            self.cache.release(handle.slot)
            handle.slot = -1

    @torch.inference_mode()
    def commit(self, handles: Sequence[Handle], tokens: Sequence[Sequence[int]]) -> None:
        for handle, new in zip(handles, tokens, strict=True):
            self.cache.move(handle.slot, *handle.advance(new))

    @torch.inference_mode()
    def score(self, handles: Sequence[Handle], drafts: Sequence[Draft], taps: Sequence[int] = ()) -> list[Scores]:
        for handle in handles:
            self._prefill(handle)
        plan = Plan.of(handles, drafts, [growing(h, d) for h, d in zip(handles, drafts, strict=True)])
        hidden, tapped = self._run(plan, taps)
        index = torch.tensor(plan.outputs, device=self.device)
        logits = self._head(hidden.index_select(0, index))
        rows = plan.output_counts
        for handle, draft in zip(handles, drafts, strict=True):
            handle.cached = len(handle.tokens)
            handle.nodes[:], handle.parents[:] = draft.ids, draft.parents
        parts = {i: t.index_select(0, index).split(rows) for i, t in tapped.items()}
        return [
            Scores(chunk, {i: parts[i][at] for i in parts}) for at, chunk in enumerate(logits.split(rows))
        ]  # fmt: skip

    # one pass

    def _prefill(self, handle: Handle) -> None:
        """Bring a long pending stretch into the cache, all but its last token, in passes of fixed size.

        What is cut where depends on this sequence alone, never on its neighbours.
        """
        if len(handle.pending) <= JOINT_ROWS:
            return
        while len(handle.pending) > 1:
            rows = min(PREFILL_ROWS, len(handle.pending) - 1)
            part = Handle(handle.slot, handle.tokens[: handle.cached + rows], handle.cached)
            self._run(Plan.of([part], [Draft.empty()], [0]), ())
            handle.cached += rows

    def _run(self, plan: Plan, taps: Sequence[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """All rows through all layers. -> normed hidden [rows, H] and the taps asked for"""
        if plan.reach > self.max_length:
            raise InvalidRequest(
                f"a sequence reaches {plan.reach} tokens, beyond the {self.max_length} this model was opened with; "
                "shorten the prompt, lower max_tokens, or raise max_model_len"
            )
        self.cache.reserve(plan.reach + 1)
        geometry = plan.geometry(self)
        hidden = F.embedding(geometry.tokens, self._embedding)
        cos, sin = self._cos[geometry.positions].unsqueeze(1), self._sin[geometry.positions].unsqueeze(1)
        tapped: dict[int, Tensor] = {}
        for number, layer in enumerate(self._layers):
            if number in taps:
                tapped[number] = hidden
            x = F.rms_norm(hidden, (self.hidden_size,), layer.norm, self.eps)
            heads = layer.qkv(x).view(x.shape[0], -1, self.head_dim)
            queries_keys, values = heads.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
            if layer.q_norm is not None and layer.k_norm is not None:
                queries_keys = self._normalise_heads(queries_keys, layer.q_norm, layer.k_norm)
            queries_keys = rotate(queries_keys, cos, sin)
            mixed = attend(self.cache, number, queries_keys, values, geometry, layer.window)
            hidden = hidden + layer.out(mixed)
            x = F.rms_norm(hidden, (self.hidden_size,), layer.mlp_norm, self.eps)
            gate, up = layer.gate_up(x).chunk(2, dim=-1)
            hidden = hidden + layer.down(F.silu(gate) * up)
        hidden = F.rms_norm(hidden, (self.hidden_size,), self._norm, self.eps)
        if self.num_layers in taps:
            tapped[self.num_layers] = hidden
        return hidden, tapped

    def _normalise_heads(self, queries_keys: Tensor, q_norm: Tensor, k_norm: Tensor) -> Tensor:
        queries, keys = queries_keys.split((self.heads, self.kv_heads), dim=1)
        shape = (self.head_dim,)
        return torch.cat((F.rms_norm(queries, shape, q_norm, self.eps), F.rms_norm(keys, shape, k_norm, self.eps)), 1)

    # weights

    def _load(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        def get(name: str) -> Tensor:
            try:
                tensor = weights[name]
            except KeyError:
                raise ModelLoadError(f"the checkpoint lacks the tensor {name!r}; is it complete?") from None
            return tensor.to(self.device, self.dtype)

        def linear(*names: str) -> Linear:
            parts = [get(f"{name}.weight") for name in names]
            biases = [get(f"{name}.bias") for name in names if f"{name}.bias" in weights]
            return Linear(torch.cat(parts), torch.cat(biases) if biases else None)

        def maybe(name: str) -> Tensor | None:
            return get(name) if name in weights else None

        self._embedding = get("model.embed_tokens.weight")
        self._layers: list[Layer] = []
        for i in range(self.num_layers):
            at, attention = f"model.layers.{i}", f"model.layers.{i}.self_attn"
            self._layers.append(
                Layer(
                    norm=get(f"{at}.input_layernorm.weight"),
                    qkv=linear(*(f"{attention}.{p}_proj" for p in "qkv")),
                    q_norm=maybe(f"{attention}.q_norm.weight"),
                    k_norm=maybe(f"{attention}.k_norm.weight"),
                    out=linear(f"{attention}.o_proj"),
                    mlp_norm=get(f"{at}.post_attention_layernorm.weight"),
                    gate_up=linear(f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"),
                    down=linear(f"{at}.mlp.down_proj"),
                    window=_window(config, i),
                )
            )
        self._norm = get("model.norm.weight")
        tied = config.get("tie_word_embeddings", False) or "lm_head.weight" not in weights
        self._head = Linear(self._embedding if tied else get("lm_head.weight"))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding; ``sin`` carries the sign of its first half. x [rows, heads, head_dim]"""
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin


def _window(config: Mapping[str, Any], layer: int) -> int:
    """The sliding window of one layer, 0 for none."""
    window = config.get("sliding_window") or 0
    if not window or config.get("use_sliding_window") is False:
        return 0
    types = config.get("layer_types")
    if types:
        return window if types[layer] == "sliding_attention" else 0
    if config.get("model_type") in ("qwen2", "qwen3"):
        return window if layer >= config.get("max_window_layers", 0) else 0
    return int(window)
