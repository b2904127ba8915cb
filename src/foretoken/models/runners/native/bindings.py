"""The ctypes mirrors of csrc/specs.hpp and csrc/product.hpp, field by field, and the signatures of the kernels."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_uint8, c_uint32, c_uint64, c_void_p
from typing import Any

from foretoken.core.native.build import KernelsUnavailable
from foretoken.core.native.status import check_layout, declare

LANES = 16
UNIT = 32  # outputs of one unit of work; every width is padded to it
TILE_STEPS = 16
LORA_PARTS = 3  # matrices of the second half of a low-rank product
MAX_HEAD, MAX_LATENT = 512, 1024  # as in csrc/specs.hpp


class Matrix(Structure):
    """A packed matrix: blocks of sixteen outputs with ``steps`` vectors each, or records (csrc/grouped.hpp)."""

    _fields_ = [
        ("data", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("sums", c_void_p),
        ("units", c_int64),
        ("steps", c_int64),
        *((name, c_int32) for name in ("kind", "group", "record_bytes", "record_groups", "zero")),
        ("levels", c_uint8 * 16),
        ("upper", c_void_p),
    ]


class UpperBytes(Structure):
    """The tables of a matrix stored in 12 bits (csrc/packed.hpp)."""

    _fields_ = [(name, c_void_p) for name in ("bytes", "from_unit", "pairs", "words")]


class NormSpec(Structure):
    """The weights of a norm; null for no norm."""

    _fields_ = [("weight", c_void_p), ("bias", c_void_p)]


class AttentionSpec(Structure):
    """The weights of a layer's attention."""

    _fields_ = [
        *((name, Matrix) for name in ("qkv", "out", "query_up", "absorb", "expand")),
        ("q_norm", NormSpec),
        ("k_norm", NormSpec),
        ("v_norm", NormSpec),
        ("sinks", c_void_p),
        ("relative", c_void_p),
        *((name, c_int32) for name in ("kv_heads", "head_dim", "norm_stride", "window", "rope")),
        *((name, c_int32) for name in ("cache_at", "scales_at", "shares", "grows", "ordered")),
    ]


class CrossSpec(Structure):
    """The weights of attention over an encoder's states."""

    _fields_ = [
        ("norm", NormSpec),
        ("after", NormSpec),
        ("attention", AttentionSpec),
        ("keys_values", Matrix),
    ]


class RecurrentSpec(Structure):
    """The weights of a recurrent mixer."""

    _fields_ = [
        *((name, Matrix) for name in ("into", "gates", "out")),
        *((name, c_void_p) for name in ("conv", "conv_bias", "decay", "step_bias", "norm", "skip")),
        ("state_layer", c_int32),
    ]


class MlpSpec(Structure):
    """The weights of a dense MLP."""

    _fields_ = [("up", Matrix), ("down", Matrix), ("inner", c_int32), ("gated", c_int32)]


class LayerInputSpec(Structure):
    """The weights for one layer's input (csrc/layer_inputs.hpp); without matrices for none."""

    _fields_ = [("gate", Matrix), ("up", Matrix), ("norm", NormSpec)]


class RouterSpec(Structure):
    """The router of a layer of experts (csrc/router.hpp)."""

    _fields_ = [
        ("weights", Matrix),
        ("correction", c_void_p),
        *((name, c_int32) for name in ("experts", "chosen", "scoring", "normalized")),
        *((name, c_int32) for name in ("groups", "chosen_groups", "group_score")),
        *((name, c_float) for name in ("scale", "divisor_eps")),
    ]


class ExpertsSpec(Structure):
    """The weights of a layer of experts."""

    _fields_ = [
        ("router", RouterSpec),
        *((name, Matrix) for name in ("up", "down", "shared_up", "shared_down")),
        ("shared_gate", c_void_p),
        ("router_norm", NormSpec),
        ("expert_scales", c_void_p),
        *((name, c_int32) for name in ("gated", "scaled_inputs", "inner", "shared_inner")),
        ("limit", c_float),
        ("slope", c_float),
    ]


class LayerSpec(Structure):
    """One decoder layer: token mixers and an MLP, the norms around them, and their kinds."""

    _fields_ = [
        *((name, NormSpec) for name in ("norm", "after_mixer", "mlp_norm", "after_mlp")),
        *((name, NormSpec) for name in ("beside_norm", "after_beside", "after_experts")),
        *((name, c_int32) for name in ("attends", "recurs", "mlp", "parallel")),
        ("attention", AttentionSpec),
        ("cross", CrossSpec),
        ("recurrent", RecurrentSpec),
        ("dense", MlpSpec),
        ("experts", ExpertsSpec),
        ("own_input", LayerInputSpec),
        ("scalar", c_float),
    ]


class RopeSpec(Structure):
    """A rotary table, which grows with the sequences."""

    _fields_ = [("table", c_void_p), ("half", c_int32), ("paired", c_int32)]


class StateSpec(Structure):
    """Sizes of recurrent layers."""

    _fields_ = [
        (name, c_int32)
        for name in (
            *("window", "channels", "out", "gates", "inputs"),
            *("key_heads", "value_heads", "key_dim", "value_dim", "norm_first"),
        )
    ] + [(name, c_float) for name in ("gate_factor", "step_factor")]


class LatentSpec(Structure):
    """Sizes of latent attention."""

    _fields_ = [
        *((name, c_int32) for name in ("rank", "rotated", "plain", "value", "query_rank")),
        ("eps", c_float),
    ]


class LayerInputsSpec(Structure):
    """The weights that produce the inputs of single layers; width 0 for none."""

    _fields_ = [
        ("table", c_void_p),
        ("projection", Matrix),
        ("norm", NormSpec),
        ("width", c_int32),
        ("table_scale", c_float),
        ("projection_scale", c_float),
    ]


class ModelSpec(Structure):
    """The weights and options of a model, for ``foretoken_run``."""

    _fields_ = [
        ("layers", POINTER(LayerSpec)),
        ("embedding", c_void_p),
        ("table", Matrix),
        ("positions", c_void_p),
        *((name, NormSpec) for name in ("embedding_norm", "norm", "feature_norm")),
        ("head", Matrix),
        ("ropes", POINTER(RopeSpec)),
        ("biases", c_void_p),
        ("query_scales", c_void_p),
        ("bias_stride", c_int64),
        *((name, c_int32) for name in ("layer_count", "hidden", "heads", "vocab")),
        *((name, c_int32) for name in ("activation", "centered", "norm_heads", "joined", "norm_first")),
        *((name, c_float) for name in ("eps", "scale", "score_cap", "logit_cap", "embedding_scale")),
        *(
            (name, c_float)
            for name in ("attention_factor", "recurrent_factor", "mlp_factor", "gate_factor", "logit_scale")
        ),
        ("gated_attention", c_int32),
        ("state", StateSpec),
        ("latent", LatentSpec),
        ("layer_inputs", LayerInputsSpec),
        ("clip", c_float),
        ("norm_sums", c_int32),
        ("farthest", c_int32),
        *((name, c_int32) for name in ("embedding_kind", "embedding_rows", "learned_positions", "table_positions")),
        ("fusion", Matrix),
        *((name, c_int32) for name in ("fused_layers", "fused_width", "fuses_embedding")),
    ]


def matrix_kinds(spec: ModelSpec) -> set[int]:
    """Returns the kinds of all matrices of a model."""
    layers = [spec.layers[number] for number in range(spec.layer_count)]
    matrices = [m for layer in layers for m in _matrices(layer)]
    ends = (spec.head, spec.table, spec.layer_inputs.projection, spec.fusion)
    return {m.kind for m in (*matrices, *ends) if m.data}


def _matrices(spec: Structure) -> Iterator[Matrix]:
    """Yields all matrices of a layer that the functions of a kind multiply, at any depth."""
    for name, kind, *_ in spec._fields_:
        if kind is RouterSpec:  # multiplied by a separate function
            continue
        if kind is Matrix:
            yield getattr(spec, name)
        elif issubclass(kind, Structure):
            yield from _matrices(getattr(spec, name))


class LoraPart(Structure):
    """A matrix of a low-rank product, and the positions of its input and result in their rows."""

    _fields_ = [("matrix", Matrix), *((name, c_int32) for name in ("first", "to", "step"))]


class LoraSpec(Structure):
    """A low-rank product; without matrices for none."""

    _fields_ = [("down", LoraPart), ("up", LoraPart * LORA_PARTS)]


class LoraLayer(Structure):
    """An adapter's low-rank products for one layer, by the names of the layer's matrices."""

    _fields_ = [
        *((name, LoraSpec) for name in ("qkv", "out", "up", "down")),
        *((name, LoraSpec) for name in ("recurrent_in", "recurrent_gates", "recurrent_out")),
        *((name, LoraSpec) for name in ("query_up", "router", "shared_up", "shared_down", "shared_gate")),
        *((name, LoraSpec) for name in ("input_gate", "input_up", "input_projection")),
        *((name, POINTER(LoraSpec)) for name in ("absorb", "expand", "expert_up", "expert_down")),
    ]


class LoraWidths(Structure):
    """Floats of the longest rows of low-rank products: inputs, products with the first half, and results."""

    _fields_ = [(name, c_int64) for name in ("input", "inner", "added")]


class LoraAdapter(Structure):
    """An adapter: its layers, and the widths of its products."""

    _fields_ = [
        ("layers", POINTER(LoraLayer)),
        *((name, LoraWidths) for name in ("rows", "heads", "pairs")),
        ("layer_count", c_int32),
    ]


class ReplaySpec(Structure):
    """The steps of recurrent layers in a pass; the fields are those of ``state.replay.ReplayPlan``."""

    _fields_ = [
        *((name, c_void_p) for name in ("first_step", "sources", "targets", "saves", "inputs", "states", "logs")),
        *((name, c_void_p) for name in ("log_rows", "snapshots", "moved", "moved_of", "moved_to", "moved_stride")),
        *((name, c_int32) for name in ("steps", "copies", "moves", "snapshot_count")),
    ]


class BatchSpec(Structure):
    """The plan of one pass. Arrays of integers are int32."""

    held: list[object]  # owners of the memory that it points to

    def hold(self, **arrays: array[int]) -> None:
        """Sets pointers to arrays, which the object keeps alive."""
        for name, values in arrays.items():
            setattr(self, name, values.buffer_info()[0])
            self.held.append(values)

    _fields_ = [
        *((name, c_void_p) for name in ("tokens", "positions", "places", "prefix", "branch_from", "branches")),
        *((name, c_void_p) for name in ("sequence_from", "pages", "page_counts", "outputs", "logits")),
        *((name, c_void_p) for name in ("likeliest", "ranked", "tap_layers", "taps")),
        ("features", c_void_p),
        ("states", c_void_p),
        ("replay", POINTER(ReplaySpec)),
        ("adapters", c_void_p),
        *((name, c_void_p) for name in ("source_pages", "source_counts", "source_lengths")),
        *((name, c_int32) for name in ("rows", "sequences", "output_count", "tap_count", "branch_count")),
        *((name, c_int32) for name in ("ranks", "reach", "source_reach")),
    ]


class SamplerSpec(Structure):
    """Sampling of a chain's tokens; null ``kept`` for the likeliest ones."""

    _fields_ = [*((name, c_void_p) for name in ("kept", "noise", "rows", "changes")), ("races", c_int32)]


class TreeSpec(Structure):
    """The shape of a tree of fixed candidates; width 0 for a chain."""

    _fields_ = [
        *((name, c_int32) for name in ("width", "steps")),
        *((name, c_float) for name in ("temperature", "floor")),
        ("kind", c_int32),
    ]


class DeeperSpec(Structure):
    """A layer that drafts one level on the states of the layer before it; see csrc/chains.hpp."""

    _fields_ = [
        ("model", POINTER(ModelSpec)),
        *((name, c_void_p) for name in ("workspace", "pages", "page_counts", "cached", "carried")),
    ]


class ChainSpec(Structure):
    """Chains and trees after the sequences of a pass, for ``foretoken_chains``."""

    _fields_ = [
        *((name, c_void_p) for name in ("limits", "floors", "bases", "slopes", "bounds")),
        *((name, c_void_p) for name in ("tokens", "probabilities", "parents", "counts", "tried")),
        *(
            (name, c_void_p)
            for name in (
                "samplers",
                "trees",
                "choose",
                "draw",
                "lead",
                "change",
                "ids",
                "successors",
                "successors_workspace",
            )
        ),
        ("deeper", c_void_p),
        *((name, c_int32) for name in ("longest", "buckets", "vocab", "width", "foreseen", "deeper_count")),
    ]


_DECODED = (  # the structures of a decoder, as csrc/library.cpp lists them
    *(Matrix, NormSpec, AttentionSpec, CrossSpec, RecurrentSpec, MlpSpec, LayerInputSpec, RouterSpec, ExpertsSpec),
    *(LayerSpec, RopeSpec, StateSpec, LatentSpec, LayerInputsSpec, ModelSpec),
    *(LoraPart, LoraSpec, LoraLayer, LoraWidths, LoraAdapter, ReplaySpec, BatchSpec, SamplerSpec, TreeSpec, DeeperSpec),
    ChainSpec,
)


class DecoderFunctions:
    """The functions of csrc/decoder.cpp for one kind of KV cache. They raise as ``status.raise_for`` does.

    Args:
        library: the library.
        kinds: the kinds of matrices that it was linked for.
        cache: the kind of KV cache.

    Raises:
        KernelsUnavailable: the kernels of a kind are not linked.
        RuntimeError: its structures differ from those of this module.
    """

    def __init__(self, library: ctypes.CDLL, kinds: Iterable[int], cache: int) -> None:
        check_layout(library, _DECODED)
        library.foretoken_kinds.restype = c_uint32
        linked = library.foretoken_kinds()
        if missing := [int(kind) for kind in kinds if not linked >> kind & 1]:
            raise KernelsUnavailable(f"{library._name} has no kernels for matrices of the kinds {missing}")
        model, batch, pointer, narrow = POINTER(ModelSpec), POINTER(BatchSpec), c_void_p, c_int32

        def of_cache(name: str, *arguments: Any) -> Callable[..., None]:
            return declare(library, f"{name}_{cache:d}", *arguments)

        self._open = of_cache("foretoken_open", model, POINTER(c_void_p))
        self.foretoken_close = library[f"foretoken_close_{cache:d}"]
        self.foretoken_close.argtypes, self.foretoken_close.restype = [pointer], None
        self.foretoken_run = of_cache("foretoken_run", model, batch, pointer, narrow)
        self.foretoken_check = of_cache("foretoken_check", model, batch, narrow)
        self.foretoken_chains = of_cache("foretoken_chains", model, batch, POINTER(ChainSpec), pointer, narrow)
        self.foretoken_remember = of_cache(
            "foretoken_remember", model, pointer, narrow, pointer, narrow, pointer, narrow
        )
        self.foretoken_move = of_cache("foretoken_move", model, pointer, narrow, narrow, pointer, narrow)
        self.foretoken_floor = of_cache("foretoken_floor", model, pointer, narrow, narrow)

    def workspace(self, spec: ModelSpec) -> Workspace:
        """Allocates the memory of a model's passes. Raises KernelArgumentError if its kernels are not linked."""
        address = c_void_p()
        self._open(spec, byref(address))
        return Workspace(self, address)


class Workspace:
    """Memory of passes, freed when the object is garbage-collected.

    Args:
        functions: functions of the library that allocated it.
        address: its address.
    """

    def __init__(self, functions: DecoderFunctions, address: c_void_p) -> None:
        self.address = self._as_parameter_ = address  # passed by ctypes
        weakref.finalize(self, functions.foretoken_close, address).atexit = False  # a thread may still run a pass


class PackingFunctions:
    """The functions of csrc/packing.cpp. They raise as ``status.raise_for`` does, except those of memory."""

    def __init__(self, library: ctypes.CDLL) -> None:
        check_layout(library, (Matrix, UpperBytes))
        pointer, wide, narrow, packed = c_void_p, c_int64, c_int32, POINTER(Matrix)
        self.foretoken_allocate = library.foretoken_allocate
        self.foretoken_allocate.argtypes, self.foretoken_allocate.restype = [wide], pointer
        self.foretoken_free = library.foretoken_free
        self.foretoken_free.argtypes, self.foretoken_free.restype = [pointer, wide], None
        self.foretoken_pack = declare(library, "foretoken_pack", pointer, wide, wide, pointer, wide, wide, wide, narrow)
        self._checksum = declare(library, "foretoken_checksum", pointer, wide, POINTER(c_uint64), narrow)
        self.foretoken_choose_bytes = declare(library, "foretoken_choose_bytes", packed, pointer, pointer, narrow)
        tables = POINTER(UpperBytes)
        self.foretoken_pack_bytes = declare(library, "foretoken_pack_bytes", packed, pointer, tables, narrow)
        groups = (pointer, pointer, pointer, wide, wide, packed, wide, wide, narrow)
        self.foretoken_pack_groups = declare(library, "foretoken_pack_groups", *groups)

    def checksum(self, address: int, size: int, threads: int) -> int:
        """Returns a checksum of ``size`` bytes, to notice damage."""
        result = c_uint64()
        self._checksum(address, size, result, threads)
        return result.value
