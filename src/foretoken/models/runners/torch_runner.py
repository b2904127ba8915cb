"""The runner made of torch operators: oneDNN-packed products, attention as batched products, a KV cache in slots.

A pass takes a ragged batch: all rows of all sequences go through each product together, and only attention
distinguishes sequences. No row's logits depend on what shares the pass (see ``attention.py`` and ``linear.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.models.families.architecture import Architecture
from foretoken.models.formats.quantize import floats, stacked
from foretoken.models.formats.weights import Ends, Entry, LayerWeights
from foretoken.models.runners.attention import Geometry, attend
from foretoken.models.runners.base import DecoderOnly, Pass
from foretoken.models.runners.linear import Product, can_pack, product
from foretoken.models.runners.pass_plan import PassPlan
from foretoken.models.state.kv import KVCache


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one decoder layer on the device, with packed matrices."""

    norm: Tensor | None
    qkv: Product
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Product
    post_attention_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Product
    down: Product
    post_mlp_norm: Tensor | None

    @staticmethod
    def of(device: torch.device, weights: LayerWeights) -> Layer:
        """Packs a layer's weights for ``device``."""

        def to(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device)

        return Layer(
            norm=to(weights.norm),
            qkv=product(stacked(weights.qkv).to(device), to(weights.qkv_bias)),
            q_norm=to(weights.q_norm),
            k_norm=to(weights.k_norm),
            out=product(weights.out.to(device), to(weights.out_bias)),
            post_attention_norm=to(weights.post_attention_norm),
            mlp_norm=weights.mlp_norm.to(device),
            gate_up=product(stacked(weights.gate_up).to(device)),
            down=product(weights.down.to(device)),
            post_mlp_norm=to(weights.post_mlp_norm),
        )


class TorchRunner(DecoderOnly):
    """A runner for every device and dtype that torch supports.

    Args:
        architecture: sizes and operations of the decoder.
        layers: weights of each layer.
        ends: embedding, last norm and vocabulary head.
        dtype: dtype of the computation.
        device: device of weights and KV cache.
        entry: input side of a model that takes features (``weights.Entry``); None for an ordinary decoder.
    """

    joint_rows = 32
    chunk_invariant = False  # a chunk of one prompt is computed by other kernels than rows that share a pass

    def __init__(
        self,
        architecture: Architecture,
        layers: Iterable[LayerWeights],
        ends: Ends,
        dtype: torch.dtype,
        device: torch.device,
        entry: Entry | None = None,
    ) -> None:
        a = self._architecture = architecture
        self._entry = entry or Entry()
        self._feature_norm = None if self._entry.norm is None else self._entry.norm.to(device)
        self._dtype, self._device = dtype, device
        self.batch_invariant = can_pack(dtype, device)
        self._embedding = floats(ends.embedding, dtype).to(device)
        self._layers = list(map(partial(Layer.of, device), layers))  # no variable holds a layer while the next is read
        self._norm = None if ends.norm is None else ends.norm.to(device)
        self._head = product(ends.head.to(device))
        self._tables: list[tuple[Tensor, Tensor]] = []
        self.cache = self._new_cache(a)

    def first(self, architecture: Architecture, norm: Tensor | None) -> Self:
        view = copy(self)
        view._architecture = architecture
        view._layers = self._layers[: architecture.layers]
        view._norm = self._norm if norm is None else norm.to(self._device)
        view.cache = view._new_cache(architecture)
        return view

    def _new_cache(self, a: Architecture) -> KVCache:
        dtype = torch.float64 if self._dtype == torch.float32 and self.batch_invariant else self._dtype  # attention.py
        return KVCache(a.layers, a.kv_heads, a.head_dim, dtype, self._device)

    @property
    def kv_bytes_per_token(self) -> int:
        return self.cache.kv_bytes_per_token

    def acquire(self, tokens: Sequence[int] = (), cache_salt: str | None = None) -> tuple[int, int]:
        return self.cache.acquire(), 0

    def release(self, slot: int) -> None:
        self.cache.release(slot)

    def publish(self, slot: int, tokens: Sequence[int], rows: int) -> None:
        """Does nothing: slots share no rows."""

    def enable_prefix_cache(self, max_bytes: int) -> bool:
        return False

    def check(self) -> None:
        """Does nothing: slots share no rows."""

    @torch.inference_mode()
    def move(self, slot: int, destination: int, sources: Sequence[int]) -> None:
        self.cache.move(slot, destination, sources)

    def nbytes(self) -> int:
        return self.cache.nbytes()

    @torch.inference_mode()
    def run(self, plan: PassPlan, taps: Sequence[int], logits: bool) -> Pass:
        self._reserve(plan.reach + 1)
        geometry = Geometry.of(plan, self._architecture.windows, self._device)
        outputs = torch.tensor(plan.outputs, device=self._device)
        alone = not logits and len(plan.parts) == 1  # a chunk of one prompt
        states = self._states(geometry, taps, alone, plan.features)
        return Pass(
            self._logits(states, outputs) if logits else None, self._tapped(states, taps, slice(len(plan.tokens)))
        )

    def _reserve(self, rows: int) -> None:
        """Grows every slot to at least ``rows`` rows, and the rotary tables to as many positions."""
        self.cache.reserve(rows)
        if not self._tables or self._tables[0][0].shape[0] < self.cache.rows:
            self._tables = [self._table(frequencies) for frequencies in self._architecture.frequencies]

    def _states(
        self, geometry: Geometry, taps: Sequence[int], alone: bool = False, features: Tensor | None = None
    ) -> dict[int, Tensor]:
        """Computes all layers. Returns hidden states [R, H] by layer: those of ``taps``, and the last, not normed."""
        a = self._architecture
        hidden = self._embed(geometry.tokens) if features is None else self._begin(features, len(geometry.tokens))
        turns = [(cos[geometry.positions], sin[geometry.positions]) for cos, sin in self._tables]
        states: dict[int, Tensor] = {}
        for number in range(a.layers):
            if number in taps:
                states[number] = hidden
            hidden = self._layer(number, hidden, turns, geometry, alone)
        states[a.layers] = states[a.layers + 1] = hidden
        return states

    def _embed(self, tokens: Tensor) -> Tensor:
        hidden, scale = F.embedding(tokens, self._embedding), self._architecture.embedding_scale
        return hidden if scale == 1.0 else hidden * torch.tensor(scale, dtype=self._dtype)

    def _begin(self, features: Tensor, rows: int) -> Tensor:
        """Returns the start of a residual stream of features. A single row is doubled, as its token is."""
        hidden = features.to(self._device, self._dtype).expand(rows, -1)
        return self._normalize(hidden, self._feature_norm) if self._entry.norm_first else hidden

    def _attention_input(self, number: int, hidden: Tensor, g: Geometry) -> Tensor:
        """Returns the input of a layer's attention; see ``weights.Entry``."""
        norm = self._layers[number].norm
        if number or not self._entry.joined:
            return self._normalize(hidden, norm)
        features = hidden if self._entry.norm_first else self._normalize(hidden, self._feature_norm)
        return torch.cat([self._normalize(self._embed(g.tokens), norm), features], dim=-1)

    def _tapped(self, states: dict[int, Tensor], taps: Sequence[int], rows: Tensor | slice) -> dict[int, Tensor]:
        """Returns hidden states of ``rows``, the last layer's normed. They are copies if ``rows`` are indices."""
        tapped = {number: states[number][rows] for number in taps}
        last = self._architecture.layers
        if last in tapped:
            tapped[last] = self._normalize(tapped[last], self._norm)
        return tapped

    def _layer(
        self, number: int, hidden: Tensor, turns: Sequence[tuple[Tensor, Tensor]], g: Geometry, alone: bool
    ) -> Tensor:
        a, layer = self._architecture, self._layers[number]
        heads = layer.qkv(self._attention_input(number, hidden, g), alone).view(hidden.shape[0], -1, a.head_dim)
        queries_keys, values = heads.split((a.heads + a.kv_heads, a.kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            queries, keys = queries_keys.split((a.heads, a.kv_heads), dim=1)
            parts = self._normalize(queries, layer.q_norm), self._normalize(keys, layer.k_norm)
            queries_keys = torch.cat(parts, dim=1)
        if a.rope[number] >= 0:
            queries_keys = rotate(queries_keys, *turns[a.rope[number]])
        mixed = layer.out(attend(self.cache, number, queries_keys, values, g, a, g.masks[a.windows[number]]), alone)
        if layer.post_attention_norm is not None:
            mixed = self._normalize(mixed, layer.post_attention_norm)
        hidden = hidden + mixed
        gate, up = layer.gate_up(self._normalize(hidden, layer.mlp_norm), alone).chunk(2, dim=-1)
        active = F.silu(gate) if a.activation == "silu" else F.gelu(gate, approximate="tanh")
        mixed = layer.down(active * up, alone)
        if layer.post_mlp_norm is not None:
            mixed = self._normalize(mixed, layer.post_mlp_norm)
        return hidden + mixed

    def _normalize(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Returns the RMS norm over the last dimension, computed in float32 and rounded once; x without a weight."""
        if weight is None:
            return x
        return F.rms_norm(x.float(), weight.shape, weight, self._architecture.eps).to(x.dtype)

    def _logits(self, states: dict[int, Tensor], outputs: Tensor) -> Tensor:
        """Returns the logits of the rows ``outputs``, float32 [outputs, V]."""
        return self.unembed(self._normalize(states[self._architecture.layers].index_select(0, outputs), self._norm))

    @torch.inference_mode()
    def unembed(self, hidden: Tensor) -> Tensor:
        count, cap = hidden.shape[0], self._architecture.final_softcap
        hidden = hidden.to(self._device, self._dtype)
        logits = self._head(hidden if count > 1 else hidden.repeat(2, 1))[:count].float()
        return logits.div(cap).tanh_().mul_(cap) if cap else logits

    def _table(self, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cos and sin for every row of the cache, [rows, 1, head_dim]; sin has the signs of rotate_half."""
        angles = torch.outer(torch.arange(self.cache.rows).float(), frequencies)
        cos, sin = angles.cos(), angles.sin()
        tables = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return tables[0].to(self._device, self._dtype)[:, None], tables[1].to(self._device, self._dtype)[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies the rotary embedding to x [rows, heads, head_dim]; ``sin`` includes the sign of its first half."""
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin
