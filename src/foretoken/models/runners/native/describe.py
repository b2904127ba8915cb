"""Describes a decoder for the kernels (csrc/specs.hpp), and packs its weights."""

from collections.abc import Iterable
from ctypes import Structure
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.models.families.architecture import Architecture
from foretoken.models.families.config import Activation
from foretoken.models.families.experts import Scoring
from foretoken.models.families.family import HeadNorms
from foretoken.models.families.latent import LatentAttention
from foretoken.models.families.layers import Layer, Mlp, RecurrentMixer
from foretoken.models.families.recurrence import Recurrence
from foretoken.models.formats.quantize import Grouped, floats
from foretoken.models.formats.weights import (
    BesideWeights,
    CrossAttentionWeights,
    DenseMlpWeights,
    Ends,
    Entry,
    ExpertWeights,
    LatentWeights,
    LayerInputEnds,
    LayerWeights,
    LinearWeights,
    MatrixStack,
    NormWeight,
    RecurrentWeights,
    SelfAttentionWeights,
)
from foretoken.models.runners.native.bindings import (
    LANES,
    UNIT,
    AttentionSpec,
    CrossSpec,
    ExpertsSpec,
    LatentSpec,
    LayerInputSpec,
    LayerInputsSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    RecurrentSpec,
    RouterSpec,
    StateSpec,
)
from foretoken.models.runners.native.packing import KINDS, Arena, WeightPacker, padded

_Spec = TypeVar("_Spec", bound=Structure)
_Mlp = DenseMlpWeights[LinearWeights]
_Experts = ExpertWeights[LinearWeights, MatrixStack]
_Attention = SelfAttentionWeights[LinearWeights]
_Latent = LatentWeights[LinearWeights, MatrixStack]

# Numbers of csrc/specs.hpp and csrc/activations.hpp.
MIXERS: dict[RecurrentMixer | None, int] = {None: 0, "delta": 1, "convolution": 2, "mamba": 3}
MLPS: dict[Mlp | None, int] = {"gated": 0, "ungated": 1, "experts": 2, None: 3}
HEAD_NORMS: dict[HeadNorms, int] = {"before": 0, "after": 1, "all": 2}
ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3, "relu2": 4}


class Description:
    """Builds the specification of a model.

    compress: whether bfloat16 matrices are stored in 12 bits, without loss (csrc/packed.hpp).
    product_bytes: bytes that the products of a pass over one row read.
    """

    def __init__(self, architecture: Architecture, dtype: torch.dtype, arena: Arena, compress: bool) -> None:
        self._architecture, self._dtype, self._compress = architecture, dtype, compress
        self._weights = WeightPacker(arena, compress)
        self.product_bytes = 0

    @property
    def held(self) -> list[object]:
        """Tensors and structures that the specification points to, which must outlive it."""
        return self._weights.held

    @property
    def weight_bytes(self) -> int:
        return self._weights.nbytes

    def model(self, layers: Iterable[LayerWeights], ends: Ends, entry: Entry) -> ModelSpec:
        """Packs all weights. Layers are read one after the other."""
        spec = self.stack(layers, ends.norm, ends.positions, ends.embedding_norm)
        spec.head = spec.table = self._weights.matrix([ends.head], ends.head_bias)
        self.product_bytes = self.weight_bytes - round(self._weights.inactive)
        if ends.head is not ends.embedding:
            if isinstance(ends.embedding, Grouped):
                spec.table = self._weights.matrix([ends.embedding])
            elif self._compress:
                spec.table = self._weights.matrix([floats(ends.embedding, self._dtype)])
            else:
                wide = _wide(floats(ends.embedding, self._dtype))
                spec.embedding = self._weights.keep(wide)
                self._weights.nbytes += wide.nbytes
        if ends.layer_inputs is not None:
            spec.layer_inputs = self._layer_inputs(ends.layer_inputs)
        spec.embedding_rows = ends.embedding.shape[0]
        spec.feature_norm = self._weights.norm(entry.norm)
        spec.joined, spec.norm_first = entry.joined, entry.norm_first
        fused = entry.fused_layers
        if entry.fusion is not None and not entry.state_norms and entry.fusion.shape[1] % (UNIT * fused) == 0:
            spec.fusion = self._weights.matrix([entry.fusion], entry.fusion_bias)
            spec.fused_layers, spec.fused_width = fused, entry.fusion.shape[1] // fused
            spec.fuses_embedding = entry.fuses_embedding
            if entry.fusion_norms is not None:
                spec.embedding_norm, spec.feature_norm = map(self._weights.norm, entry.fusion_norms)
        return spec

    def stack(
        self,
        layers: Iterable[LayerWeights],
        norm: NormWeight | None,
        positions: Tensor | None,
        embedding_norm: NormWeight | None,
    ) -> ModelSpec:
        """Packs layers, one after the other, and positions and norms of ``Ends``."""
        a = self._architecture
        specs = (LayerSpec * a.layers)()
        numbered = map(self._layer, range(a.layers), layers)  # map frees a layer before it reads the next
        for number, layer in enumerate(numbered):
            specs[number] = layer
        return ModelSpec(
            layers=specs,
            positions=self._weights.keep(positions),
            learned_positions=0 if positions is None else positions.shape[0],
            embedding_norm=self._weights.norm(embedding_norm),
            norm=self._weights.norm(norm),
            layer_count=a.layers,
            hidden=a.hidden,
            heads=a.heads,
            vocab=a.vocab,
            activation=ACTIVATIONS[a.activation],
            centered=a.centered,
            norm_heads=0 if a.head_norms is None else HEAD_NORMS[a.head_norms],
            eps=a.eps,
            scale=a.scale,
            score_cap=a.attention_softcap,
            logit_cap=a.final_softcap,
            embedding_scale=float(torch.tensor(a.embedding_scale, dtype=self._dtype)),
            attention_factor=a.factors.attention,
            recurrent_factor=a.factors.recurrent,
            mlp_factor=a.factors.mlp,
            gate_factor=a.gate_factor,
            logit_scale=a.logit_scale,
            clip=a.clip,
            norm_sums=a.norm_sums,
            farthest=0 if a.relative is None else a.relative.farthest,
            embedding_kind=KINDS[self._dtype],
            gated_attention=a.gated_attention,
            state=_sizes(a.recurrence, StateSpec),
            latent=_sizes(a.latent, LatentSpec),
        )

    def _layer(self, number: int, weights: LayerWeights) -> LayerSpec:
        layer, cross = self._architecture.stack[number], weights.cross
        attention, recurrent = weights.attention, weights.recurrent
        return LayerSpec(
            **self._weights.fields_of(weights),  # norms
            attends=layer.attention,
            recurs=MIXERS[layer.recurrent],
            mlp=MLPS[layer.mlp],
            parallel=layer.parallel,
            attention=self._attention(number, attention),
            cross=CrossSpec() if cross is None else self._cross(number, cross),
            recurrent=RecurrentSpec() if recurrent is None else self._recurrent(number, recurrent),
            own_input=LayerInputSpec(
                **({} if weights.own_input is None else self._weights.fields_of(weights.own_input))
            ),
            scalar=weights.scalar,
            **self._mlp(layer, weights.mlp),
            **({} if weights.beside is None else self._beside(layer, weights.beside)),
        )

    def _beside(self, layer: Layer, weights: BesideWeights[LinearWeights]) -> dict[str, Structure]:
        return {
            "dense": dense_mlp(self._weights, weights.mlp, True, layer.inner or self._architecture.intermediate),
            "beside_norm": self._weights.norm(weights.norm),
            "after_beside": self._weights.norm(weights.after),
            "after_experts": self._weights.norm(weights.after_experts),
        }

    def _layer_inputs(self, weights: LayerInputEnds) -> LayerInputsSpec:
        a = self._architecture
        assert a.layer_inputs is not None
        table, width = _wide(weights.table), a.layer_inputs.width
        self._weights.nbytes += table.nbytes
        before = self.weight_bytes
        projection = self._weights.linear(weights.projection)
        self.product_bytes += self.weight_bytes - before
        return LayerInputsSpec(
            table=self._weights.keep(table),
            projection=projection,
            norm=self._weights.norm(weights.norm),
            width=width,
            table_scale=float(torch.tensor(width**0.5, dtype=self._dtype)),
            projection_scale=a.hidden**-0.5,
        )

    def _mlp(self, layer: Layer, weights: _Mlp | _Experts | None) -> dict[str, Structure]:
        if weights is None:
            return {}
        if isinstance(weights, ExpertWeights):
            return {"experts": expert_mlp(self._weights, weights)}
        return {
            "dense": dense_mlp(
                self._weights, weights, layer.mlp == "gated", layer.inner or self._architecture.intermediate
            )
        }

    def _attention(self, number: int, weights: _Attention | _Latent | None) -> AttentionSpec:
        if weights is None:
            return AttentionSpec()
        if isinstance(weights, LatentWeights):
            return self._latent(number, weights)
        layer = self._architecture.stack[number]
        sizes = self._architecture.sizes(layer)
        dim = sizes.head_dim
        per_head = weights.q_norm is not None and len(weights.q_norm.weight) > dim  # a norm for each head
        return AttentionSpec(
            **self._weights.fields_of(weights),
            kv_heads=sizes.kv_heads,
            head_dim=dim,
            norm_stride=dim if per_head else 0,
            window=layer.window,
            rope=layer.rope,
            cache_at=self._architecture.cache_at(number),
            scales_at=self._architecture.scales_at(number),
            shares=layer.source is not None,
            grows=self._grows(layer),
            ordered=layer.ordered,
        )

    def _cross(self, number: int, weights: CrossAttentionWeights[LinearWeights]) -> CrossSpec:
        sizes = self._architecture.sizes(self._architecture.stack[number])
        attention = AttentionSpec(
            qkv=self._weights.linear(weights.queries),
            out=self._weights.linear(weights.out),
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            rope=-1,
            cache_at=number * sizes.numbers,
            scales_at=number * 2 * sizes.kv_heads,
        )
        before = self.weight_bytes
        keys_values = self._weights.linear(weights.keys_values)
        self._weights.inactive += self.weight_bytes - before
        return CrossSpec(self._weights.norm(weights.norm), self._weights.norm(weights.after), attention, keys_values)

    def _grows(self, layer: Layer) -> bool:
        growth = self._architecture.query_growth
        return growth is not None and not (growth.unrotated and layer.rope >= 0)

    def _latent(self, number: int, weights: _Latent) -> AttentionSpec:
        layer = self._architecture.stack[number]
        return AttentionSpec(
            qkv=self._weights.linear(weights.into),
            out=self._weights.linear(weights.out),
            query_up=self._weights.linear(weights.query_up),
            absorb=self._weights.stack(weights.absorb),
            expand=self._weights.stack(weights.expand),
            q_norm=self._weights.norm(weights.query_norm),
            k_norm=self._weights.norm(weights.latent_norm),
            kv_heads=1,
            head_dim=self._architecture.head_dim,
            window=layer.window,
            rope=layer.rope,
            cache_at=self._architecture.cache_at(number),
            grows=self._grows(layer),
        )

    def _recurrent(self, number: int, weights: RecurrentWeights[LinearWeights]) -> RecurrentSpec:
        state_layer = self._architecture.first(number).recurrent_layers
        return RecurrentSpec(**self._weights.fields_of(weights), state_layer=state_layer)


def _sizes(sizes: Recurrence | LatentAttention | None, kind: type[_Spec]) -> _Spec:
    """Returns the structure with the attributes of ``sizes`` that have its fields' names; zeros without ``sizes``."""
    return kind() if sizes is None else kind(*(getattr(sizes, field[0]) for field in kind._fields_))


def _wide(embedding: Tensor) -> Tensor:
    """Returns the embedding with rows padded for the kernels; the tensor itself if they need no padding."""
    missing = -embedding.shape[1] % UNIT
    return F.pad(embedding, (0, missing)) if missing else embedding


SCORINGS: dict[Scoring, int] = {"softmax": 0, "sigmoid": 1}  # numbers of csrc/specs.hpp


def dense_mlp(packer: WeightPacker, weights: _Mlp, gated: bool, inner: int) -> MlpSpec:
    return MlpSpec(
        up=packer.linear(weights.up, gated), down=packer.linear(weights.down), inner=padded(inner, LANES), gated=gated
    )


def expert_mlp(packer: WeightPacker, weights: _Experts) -> ExpertsSpec:
    e = weights.experts
    shared = {"shared_up": packer.linear(weights.shared_up, e.gated), "shared_down": packer.linear(weights.shared_down)}
    router = RouterSpec(
        weights=packer.router(weights.router),
        correction=packer.keep(weights.correction),
        experts=e.count,
        chosen=e.chosen,
        scoring=SCORINGS[e.scoring],
        normalized=e.normalized,
        groups=e.groups,
        chosen_groups=e.chosen_groups,
        group_score=e.best_two,
        scale=e.scale,
        divisor_eps=e.divisor_eps,
    )
    before = packer.nbytes
    stacks = {"up": packer.stack(weights.up), "down": packer.stack(weights.down)}
    packer.inactive += (packer.nbytes - before) * (1 - e.chosen / e.count)
    return ExpertsSpec(
        router=router,
        shared_gate=packer.keep(weights.shared_gate),
        router_norm=packer.norm(weights.router_norm),
        expert_scales=packer.keep(weights.expert_scales),
        gated=e.gated,
        scaled_inputs=e.scaled_inputs,
        inner=padded(e.intermediate, LANES),
        shared_inner=padded(e.shared, LANES),
        limit=e.clamp,
        slope=e.slope,
        **stacks,
        **shared,
    )
