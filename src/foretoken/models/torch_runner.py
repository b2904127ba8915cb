"""The runner made of torch operators: oneDNN-packed products, attention as batched products, slots of rows.

One pass takes a ragged batch: all rows of all sequences go through each product together, and only attention
sees sequences. No row's logits depend on what shares the pass (see ``attention.py`` and ``linear.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.models.architecture import Architecture
from foretoken.models.attention import Geometry, attend
from foretoken.models.kv import KVCache
from foretoken.models.linear import Linear, can_pack
from foretoken.models.plan import Plan
from foretoken.models.runner import Pass
from foretoken.models.weights import Ends, LayerWeights


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer on the device, its matrices packed."""

    norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    post_attention_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    post_mlp_norm: Tensor | None

    @staticmethod
    def of(weights: LayerWeights, device: torch.device) -> Layer:
        def to(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device)

        return Layer(
            norm=weights.norm.to(device),
            qkv=Linear(weights.qkv.to(device), to(weights.qkv_bias)),
            q_norm=to(weights.q_norm),
            k_norm=to(weights.k_norm),
            out=Linear(weights.out.to(device), to(weights.out_bias)),
            post_attention_norm=to(weights.post_attention_norm),
            mlp_norm=weights.mlp_norm.to(device),
            gate_up=Linear(weights.gate_up.to(device)),
            down=Linear(weights.down.to(device)),
            post_mlp_norm=to(weights.post_mlp_norm),
        )


class TorchRunner:
    """See ``runner.Runner``; works on every device and dtype that torch has."""

    def __init__(
        self,
        architecture: Architecture,
        layers: Iterable[LayerWeights],
        ends: Ends,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        a = self._architecture = architecture
        self._dtype, self._device = dtype, device
        self.rows_independent = can_pack(dtype, device)
        self._embedding = ends.embedding.to(device)
        self._layers = [Layer.of(weights, device) for weights in layers]
        self._norm, self._head = ends.norm.to(device), Linear(ends.head.to(device))
        self._tables = [self._table(frequencies) for frequencies in a.frequencies]
        kept = torch.float64 if dtype == torch.float32 and self.rows_independent else dtype  # see attention.py
        self._cache = KVCache(a.layers, a.kv_heads, a.head_dim, kept, device)

    def acquire(self) -> int:
        return self._cache.acquire()

    def release(self, slot: int) -> None:
        self._cache.release(slot)

    @torch.inference_mode()
    def move(self, slot: int, destination: int, sources: Sequence[int]) -> None:
        self._cache.move(slot, destination, sources)

    def nbytes(self) -> int:
        return self._cache.nbytes()

    @torch.inference_mode()
    def run(self, plan: Plan, taps: Sequence[int], logits: bool) -> Pass:
        a = self._architecture
        self._cache.reserve(plan.reach + 1)
        geometry = Geometry.of(plan, a, self._device)
        hidden = F.embedding(geometry.tokens, self._embedding)
        if a.embedding_scale != 1.0:
            hidden = hidden * torch.tensor(a.embedding_scale, dtype=self._dtype)
        turns = [(cos[geometry.positions], sin[geometry.positions]) for cos, sin in self._tables]
        outputs = torch.tensor(plan.outputs, device=self._device)
        tapped: dict[int, Tensor] = {}
        for number in range(a.layers):
            if number in taps:
                tapped[number] = hidden.index_select(0, outputs)
            hidden = self._layer(number, hidden, turns, geometry)
        if not logits and a.layers not in taps:
            return Pass(None, tapped)
        hidden = self._normalise(hidden.index_select(0, outputs), self._norm)
        if a.layers in taps:
            tapped[a.layers] = hidden
        return Pass(self._logits(hidden) if logits else None, tapped)

    def _layer(self, number: int, hidden: Tensor, turns: Sequence[tuple[Tensor, Tensor]], g: Geometry) -> Tensor:
        a, layer = self._architecture, self._layers[number]
        heads = layer.qkv(self._normalise(hidden, layer.norm)).view(hidden.shape[0], -1, a.head_dim)
        queries_keys, values = heads.split((a.heads + a.kv_heads, a.kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            queries, keys = queries_keys.split((a.heads, a.kv_heads), dim=1)
            parts = self._normalise(queries, layer.q_norm), self._normalise(keys, layer.k_norm)
            queries_keys = torch.cat(parts, dim=1)
        if a.rope[number] >= 0:
            queries_keys = rotate(queries_keys, *turns[a.rope[number]])
        mixed = layer.out(attend(self._cache, number, queries_keys, values, g, a))
        if layer.post_attention_norm is not None:
            mixed = self._normalise(mixed, layer.post_attention_norm)
        hidden = hidden + mixed
        gate, up = layer.gate_up(self._normalise(hidden, layer.mlp_norm)).chunk(2, dim=-1)
        active = F.silu(gate) if a.activation == "silu" else F.gelu(gate, approximate="tanh")
        mixed = layer.down(active * up)
        if layer.post_mlp_norm is not None:
            mixed = self._normalise(mixed, layer.post_mlp_norm)
        return hidden + mixed

    def _normalise(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm over the last dimension in float32, rounded once."""
        return F.rms_norm(x.float(), weight.shape, weight, self._architecture.eps).to(x.dtype)

    def _logits(self, hidden: Tensor) -> Tensor:
        """[outputs, H] -> [outputs, V]; a lone row is doubled (see ``linear.py``)."""
        count, cap = hidden.shape[0], self._architecture.final_softcap
        logits = self._head(hidden if count > 1 else hidden.repeat(2, 1))[:count]
        return logits.div(cap).tanh_().mul_(cap) if cap else logits

    def _table(self, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin for every position, [max_length + 1, 1, head_dim]; sin with rotate_half's sign."""
        angles = torch.outer(torch.arange(self._architecture.max_length + 1).float(), frequencies)
        cos, sin = angles.cos(), angles.sin()
        tables = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return tables[0].to(self._device, self._dtype)[:, None], tables[1].to(self._device, self._dtype)[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding; ``sin`` carries the sign of its first half. x [rows, heads, head_dim]"""
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin
