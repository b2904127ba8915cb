"""The runner made of torch operators: oneDNN-packed products, attention as batched products, a KV cache in slots.

A pass takes a ragged batch: all rows of all sequences go through each product together, and only attention
distinguishes sequences. No row's logits depend on what shares the pass (see ``attention.py`` and ``linear.py``).
"""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.core.devices import on_host
from foretoken.models.families.architecture import Architecture
from foretoken.models.families.layers import HeadSizes
from foretoken.models.formats.quantize import floats
from foretoken.models.formats.weights import (
    DenseMlpWeights,
    Ends,
    Entry,
    LatentWeights,
    LayerWeights,
    NormWeight,
    SelfAttentionWeights,
)
from foretoken.models.runners.attention import Geometry
from foretoken.models.runners.base import Pass, Runner, injecting
from foretoken.models.runners.functional import normalize, rotary_table, rotate
from foretoken.models.runners.layout import AttentionSizes, Layout
from foretoken.models.runners.linear import can_pack, moved, product
from foretoken.models.runners.pass_plan import PassPlan
from foretoken.models.runners.torch_experts import mix_experts
from foretoken.models.runners.torch_layers import (
    TorchAttention,
    TorchLatent,
    TorchLayer,
    TorchLayerInputs,
    attend_latents,
    layer_input,
    mlp,
    moved_norm,
    on_device,
    recurrent,
)
from foretoken.models.state.kv import KVCache
from foretoken.models.state.pages import SlotCache


class TorchRunner(Runner):
    """A runner for every device and dtype that torch supports. Recurrent layers need ``CudaRunner``.

    Args:
        ends: embedding, last norm and vocabulary head.
        entry: input side of a model that takes features (``weights.Entry``); None for an ordinary decoder.
    """

    joint_rows, pass_rows = 32, 512
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
        self._feature_norm = moved_norm(self._entry.norm, device)
        self._dtype, self._device = dtype, device
        self.batch_invariant = can_pack(dtype, device)
        self._embedding = floats(ends.embedding, dtype).to(device)
        # no variable holds a layer while the next is read
        self._layers = list(map(partial(on_device, device=device), layers))
        self._norm = moved_norm(ends.norm, device)
        bias = None if ends.head_bias is None else ends.head_bias.to(device, dtype)
        self._head = product(ends.head.to(device), bias)
        self._positions = moved(ends.positions, device)
        self._embedding_norm = moved_norm(ends.embedding_norm, device)
        self._inputs = None if ends.layer_inputs is None else TorchLayerInputs(device, dtype, a, ends.layer_inputs)
        self._tables: list[tuple[Tensor, Tensor]] = []
        self._new_cache()

    def first(self, architecture: Architecture, norm: Tensor | None) -> Self:
        view = copy(self)
        view._architecture = architecture
        view._layers = self._layers[: architecture.layers]
        view._norm = self._norm if norm is None else NormWeight(norm.to(self._device))
        view._new_cache()
        return view

    def injector(self) -> Self:
        view = copy(self)
        view._architecture = injecting(self._architecture)
        view._layers = [replace(layer, norm=None, after_mixer=None, mlp_norm=None, mlp=None) for layer in self._layers]
        return view

    @property
    def _cache_dtype(self) -> torch.dtype:
        return torch.float64 if self._dtype == torch.float32 and self.batch_invariant else self._dtype

    def _new_cache(self) -> None:
        sizes = cached_sizes(self._architecture)
        shapes = [None if size is None else (size.kv_heads, size.head_dim) for size in sizes]
        self._pages: SlotCache = KVCache(shapes, self._cache_dtype, self._device)

    @property
    def _slots(self) -> KVCache:
        assert isinstance(self._pages, KVCache)
        return self._pages

    @property
    def kv_bytes_per_token(self) -> int:
        return self._slots.kv_bytes_per_token

    @torch.inference_mode()
    def move(self, slot: int, destination: int, sources: Sequence[int]) -> None:
        self._slots.move(slot, destination, sources)

    @torch.inference_mode()
    def run(self, plan: PassPlan, taps: Sequence[int], logits: bool) -> Pass:
        cache = self._slots
        cache.reserve(plan.reach + 1)
        self._reserve_positions(cache.rows)
        geometry = Geometry.of(plan, cache, self._architecture.views, self._device)
        if self._architecture.alibi is not None:
            geometry = geometry.biased(self._architecture.alibi.table(cache.rows), plan)
        if self._architecture.relative is not None:
            geometry = geometry.relative(_relative(self._layers), plan)
        outputs = torch.tensor(plan.outputs, device=self._device)
        any_kernel = not logits and len(plan.parts) == 1  # a chunk of one prompt
        states = self._states(geometry, taps, any_kernel, plan.features)
        return Pass(
            self._logits(states, outputs) if logits else None, self._tapped(states, taps, slice(len(plan.tokens)))
        )

    def _reserve_positions(self, count: int) -> None:
        """Extends rotary tables of fewer than ``count`` positions."""
        if self._architecture.frequencies and (not self._tables or self._tables[0][0].shape[0] < count):
            self._tables = [self._table(number, count) for number in range(len(self._architecture.frequencies))]

    def _states(
        self, geometry: Layout, taps: Sequence[int], any_kernel: bool = False, features: Tensor | None = None
    ) -> dict[int, Tensor]:
        """Computes all layers. Returns hidden states [R, H] by layer: those of ``taps``, and the last, not normed."""
        a = self._architecture
        hidden = self._embed(geometry) if features is None else self._begin(features, geometry)
        turns = [(cos[geometry.positions], sin[geometry.positions]) for cos, sin in self._tables]
        inputs = None if self._inputs is None else self._inputs(a, geometry.tokens, hidden, any_kernel)
        states: dict[int, Tensor] = {}
        for number in range(a.layers):
            if number in taps:
                states[number] = hidden
            hidden = self._layer(number, hidden, turns, geometry, any_kernel)
            layer = self._layers[number]
            if layer.own_input is not None and inputs is not None:
                hidden = hidden + layer_input(a, layer.own_input, hidden, inputs[:, number], any_kernel)
            hidden = _scaled(hidden, layer.scalar)
        states[a.layers] = states[a.layers + 1] = hidden
        return states

    def _embed(self, g: Layout) -> Tensor:
        hidden, a = F.embedding(g.tokens, self._embedding), self._architecture
        if a.embedding_scale != 1.0:
            hidden = hidden * torch.tensor(a.embedding_scale, dtype=self._dtype)
        if self._positions is not None:
            hidden = hidden + self._positions[g.positions].to(self._dtype)
        return normalize(a, hidden, self._embedding_norm)

    def _begin(self, features: Tensor, g: Layout) -> Tensor:
        """Returns the start of a residual stream of features. A single row is doubled."""
        hidden = features.to(self._device, self._dtype).expand(len(g.tokens), -1)
        return normalize(self._architecture, hidden, self._feature_norm) if self._entry.norm_first else hidden

    def _mixer_input(self, number: int, hidden: Tensor, g: Layout) -> Tensor:
        """Returns the input of a layer's token mixers; see ``weights.Entry``."""
        norm = self._layers[number].norm
        if number or not self._entry.joined:
            return normalize(self._architecture, hidden, norm)
        features = hidden if self._entry.norm_first else normalize(self._architecture, hidden, self._feature_norm)
        return torch.cat([normalize(self._architecture, self._embed(g), norm), features], dim=-1)

    def _tapped(self, states: dict[int, Tensor], taps: Sequence[int], rows: Tensor | slice) -> dict[int, Tensor]:
        """Returns hidden states of ``rows``, the last layer's normed. They are copies if ``rows`` are indices."""
        tapped = {number: states[number][rows] for number in taps}
        last = self._architecture.layers
        if last in tapped:
            tapped[last] = normalize(self._architecture, tapped[last], self._norm)
        return tapped

    def _layer(
        self, number: int, hidden: Tensor, turns: Sequence[tuple[Tensor, Tensor]], g: Layout, any_kernel: bool
    ) -> Tensor:
        a, layer, start = self._architecture, self._layers[number], hidden
        if layer.attention is not None or layer.recurrent is not None:
            hidden = self._mix(number, hidden, turns, g, any_kernel)
        if layer.mlp is None:
            return hidden
        inner = normalize(a, start if a.stack[number].parallel else hidden, layer.mlp_norm)
        inner = self._mlp(layer, number, inner, hidden, g.counts, any_kernel)
        return self._added(hidden, inner, layer.after_mlp, a.factors.mlp)

    def _mix(
        self, number: int, hidden: Tensor, turns: Sequence[tuple[Tensor, Tensor]], g: Layout, any_kernel: bool
    ) -> Tensor:
        """Returns the residual stream after a layer's token mixers, which read the same input."""
        a, layer, x = self._architecture, self._layers[number], self._mixer_input(number, hidden, g)
        if layer.attention is not None:
            mixed = self._attention(layer.attention, number, x, turns, g, any_kernel)
            hidden = self._added(hidden, mixed, layer.after_mixer, a.factors.attention)
        if layer.recurrent is not None:
            mixed = recurrent(a, number, layer.recurrent, x, g.steps, any_kernel)
            hidden = self._added(hidden, mixed, layer.after_mixer, a.factors.recurrent)
        return hidden

    def _added(self, hidden: Tensor, branch: Tensor, norm: NormWeight | None, factor: float = 1.0) -> Tensor:
        """Adds a branch to the residual stream. The norm is that of the branch, or of the sum (``norm_sums``)."""
        a = self._architecture
        if a.norm_sums:
            return normalize(a, hidden + branch, norm)
        return hidden + _scaled(normalize(a, branch, norm), factor)

    def _mlp(
        self, layer: TorchLayer, number: int, x: Tensor, hidden: Tensor, counts: Tensor | None, any_kernel: bool
    ) -> Tensor:
        a, weights, beside = self._architecture, layer.mlp, layer.beside
        assert weights is not None
        if isinstance(weights, DenseMlpWeights):
            return mlp(a, weights, x, a.stack[number].mlp == "gated", any_kernel)
        if beside is None:
            return mix_experts(a, weights, x, any_kernel, counts=counts)
        dense = mlp(a, beside.mlp, normalize(a, hidden, beside.norm), True, any_kernel)
        mixed = mix_experts(a, weights, x, any_kernel, hidden, counts)
        return normalize(a, dense, beside.after) + normalize(a, mixed, beside.after_experts)

    def _attention(
        self,
        mixer: TorchAttention | TorchLatent,
        number: int,
        x: Tensor,
        turns: Sequence[tuple[Tensor, Tensor]],
        g: Layout,
        any_kernel: bool,
    ) -> Tensor:
        a, layer = self._architecture, self._architecture.stack[number]
        if isinstance(mixer, LatentWeights):
            return attend_latents(a, number, mixer, x, turns, g, any_kernel)
        sizes = AttentionSizes.of(a, layer)
        new = 0 if layer.source is not None else sizes.kv_heads
        heads = mixer.qkv(x, any_kernel).view(x.shape[0], -1, sizes.head_dim)
        queries_keys, values, gates = heads.split((a.heads + new, new, a.heads * a.gated_attention), dim=1)
        if mixer.v_norm is not None:
            values = normalize(a, values, mixer.v_norm)
        if a.head_norms != "after":
            queries_keys = self._norm_heads(queries_keys, mixer)
        if a.clip:
            queries_keys, values = queries_keys.clamp(-a.clip, a.clip), values.clamp(-a.clip, a.clip)
        if layer.rope >= 0:
            queries_keys = rotate(queries_keys, *turns[layer.rope], a.paired)
        if a.head_norms == "after":
            queries_keys = self._norm_heads(queries_keys, mixer)
        if a.query_growth is not None and not (a.query_growth.unrotated and layer.rope >= 0):
            queries_keys[:, : a.heads] *= a.query_factors(g.positions)[:, None, None].to(queries_keys)
        cache_layer = number if layer.source is None else layer.source
        mixed = g.attend(cache_layer, queries_keys, values, sizes, layer.view, mixer.sinks)
        return mixer.out(mixed * gates.flatten(1).sigmoid() if a.gated_attention else mixed, any_kernel)

    def _norm_heads(self, queries_keys: Tensor, mixer: TorchAttention) -> Tensor:
        a, parts = self._architecture, []
        halves = queries_keys[:, : a.heads], queries_keys[:, a.heads :]
        for half, norm in zip(halves, (mixer.q_norm, mixer.k_norm), strict=True):
            if norm is None:
                parts.append(half)
            elif a.head_norms == "all":
                parts.append(normalize(a, half.flatten(1), norm).view(half.shape))
            else:
                parts.append(normalize(a, half, norm.by_head(half.shape[-1])))
        return torch.cat(parts, dim=1) if mixer.q_norm is not None else queries_keys

    def _logits(self, states: dict[int, Tensor], outputs: Tensor) -> Tensor:
        return self.unembed(
            normalize(self._architecture, states[self._architecture.layers].index_select(0, outputs), self._norm)
        )

    @torch.inference_mode()
    def unembed(self, hidden: Tensor) -> Tensor:
        return on_host(self._unembed(hidden))

    def _unembed(self, hidden: Tensor) -> Tensor:
        count, cap = hidden.shape[0], self._architecture.final_softcap
        hidden = hidden.to(self._device, self._dtype)
        logits = self._head(hidden if count > 1 else hidden.repeat(2, 1))[:count].float()
        logits = _scaled(logits, self._architecture.logit_scale)
        return logits.div(cap).tanh_().mul_(cap) if cap else logits

    def _table(self, number: int, count: int) -> tuple[Tensor, Tensor]:
        """Returns cos and sin for ``count`` positions, [count, 1, rotated elements]; see ``rotate``."""
        cos, sin = rotary_table(self._architecture, number, torch.arange(count))
        return cos.to(self._device, self._dtype)[:, None], sin.to(self._device, self._dtype)[:, None]


def cached_sizes(a: Architecture) -> list[HeadSizes | None]:
    """Returns the sizes of the heads that each layer caches; None for a layer that reads another layer's."""
    return [a.sizes(layer) if layer.attention and layer.source is None else None for layer in a.stack]


def _relative(layers: Sequence[TorchLayer]) -> list[Tensor]:
    """Returns T5's biases by layer; equal ones are the same object."""
    tables: list[Tensor] = []
    for layer in layers:
        assert isinstance(layer.attention, SelfAttentionWeights) and layer.attention.relative is not None
        table = layer.attention.relative.cpu()
        tables.append(next((earlier for earlier in tables if torch.equal(earlier, table)), table))
    return tables


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor
