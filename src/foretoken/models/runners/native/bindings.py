"""The structures that the kernels take, with the fields that their headers declare, and the kernels' signatures."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator
from ctypes import POINTER, Structure, byref, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from foretoken.core.native.build import KernelsUnavailable
from foretoken.core.native.status import Headers, check_layout, declare

LANES = 16
UNIT = 32  # outputs of one unit of work; every width is padded to it
TILE_STEPS = 16
LORA_PARTS = 3  # matrices of the second half of a low-rank product
MAX_HEAD, MAX_LATENT = 512, 1024  # as in csrc/specs.hpp
_HEADERS = Headers(
    Path(__file__).parent / "csrc",
    ("product.hpp", "packed.hpp", "router.hpp", "specs.hpp", "trees.hpp", "chains.hpp"),
    typed=("layers", "ropes", "absorb", "expand", "expert_up", "expert_down", "replay", "model"),
    counts={"16": 16, "LORA_PARTS": LORA_PARTS},
)
mirrored = _HEADERS.mirrored


@mirrored
class Matrix(Structure):
    """A packed matrix: blocks of sixteen outputs with ``steps`` vectors each, or records (csrc/grouped.hpp)."""


@mirrored
class UpperBytes(Structure):
    """The tables of a matrix stored in 12 bits (csrc/packed.hpp)."""


@mirrored
class NormSpec(Structure):
    """The weights of a norm; null for no norm."""


@mirrored
class AttentionSpec(Structure):
    """The weights of a layer's attention."""


@mirrored
class CrossSpec(Structure):
    """The weights of attention over an encoder's states."""


@mirrored
class RecurrentSpec(Structure):
    """The weights of a recurrent mixer."""


@mirrored
class MlpSpec(Structure):
    """The weights of a dense MLP."""


@mirrored
class LayerInputSpec(Structure):
    """The weights for one layer's input (csrc/layer_inputs.hpp); without matrices for none."""


@mirrored
class RouterSpec(Structure):
    """The router of a layer of experts (csrc/router.hpp)."""


@mirrored
class ExpertsSpec(Structure):
    """The weights of a layer of experts."""


@mirrored
class LayerSpec(Structure):
    """One decoder layer: token mixers and an MLP, the norms around them, and their kinds."""


@mirrored
class RopeSpec(Structure):
    """A rotary table, which grows with the sequences."""


@mirrored
class StateSpec(Structure):
    """Sizes of recurrent layers."""


@mirrored
class LatentSpec(Structure):
    """Sizes of latent attention."""


@mirrored
class LayerInputsSpec(Structure):
    """The weights that produce the inputs of single layers; width 0 for none."""


@mirrored
class ModelSpec(Structure):
    """The weights and options of a model, for ``foretoken_run``."""


def matrix_kinds(spec: ModelSpec) -> set[int]:
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


@mirrored
class LoraPart(Structure):
    """A matrix of a low-rank product, and the positions of its input and result in their rows."""


@mirrored
class LoraSpec(Structure):
    """A low-rank product; without matrices for none."""


@mirrored
class LoraLayer(Structure):
    """An adapter's low-rank products for one layer, by the names of the layer's matrices."""


@mirrored
class LoraWidths(Structure):
    """Floats of the longest rows of low-rank products: inputs, products with the first half, and results."""


@mirrored
class LoraAdapter(Structure):
    """An adapter: its layers, and the widths of its products."""


@mirrored
class ReplaySpec(Structure):
    """The steps of recurrent layers in a pass; the fields are those of ``state.replay.ReplayPlan``."""


@mirrored
class BatchSpec(Structure):
    """The plan of one pass. Arrays of integers are int32."""

    held: list[object]  # owners of the memory that it points to

    def hold(self, **arrays: array[int]) -> None:
        for name, values in arrays.items():
            setattr(self, name, values.buffer_info()[0])
            self.held.append(values)


@mirrored
class SamplerSpec(Structure):
    """Sampling of a chain's tokens; null ``kept`` for the likeliest ones."""


@mirrored
class TreeSpec(Structure):
    """The shape of a tree of fixed candidates; width 0 for a chain."""


@mirrored
class DeeperSpec(Structure):
    """A layer that drafts one level on the states of the layer before it; see csrc/chains.hpp."""


@mirrored
class ChainSpec(Structure):
    """Chains and trees after the sequences of a pass, for ``foretoken_chains``."""


_DECODED = (  # the structures of a decoder, as csrc/library.cpp lists them
    *(Matrix, NormSpec, AttentionSpec, CrossSpec, RecurrentSpec, MlpSpec, LayerInputSpec, RouterSpec, ExpertsSpec),
    *(LayerSpec, RopeSpec, StateSpec, LatentSpec, LayerInputsSpec, ModelSpec),
    *(LoraPart, LoraSpec, LoraLayer, LoraWidths, LoraAdapter, ReplaySpec, BatchSpec, SamplerSpec, TreeSpec, DeeperSpec),
    ChainSpec,
)


class DecoderFunctions:
    """The functions of csrc/decoder.cpp for one kind of KV cache. They raise as ``status.raise_for`` does.

    Args:
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

    functions: functions of the library that allocated it.
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
