"""The modules of a decoder that an adapter may change, as parts of the runtime's products."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from foretoken.models.families.architecture import Architecture
from foretoken.models.families.experts import Experts
from foretoken.models.families.latent import LatentAttention
from foretoken.models.families.layers import Layer, LayerInputs, RecurrentMixer
from foretoken.models.families.recurrence import Recurrence
from foretoken.models.formats.layers import in_runtime_order
from foretoken.models.formats.mixers import convolution_ranges, delta_ranges, gate_ranges, mamba_ranges, slices
from foretoken.models.formats.quantize import Matrix

Attention = Literal["qkv", "query_up", "out"]
Mlp = Literal["up", "down", "router", "shared_gate", "shared_up", "shared_down"]
Recurrent = Literal["recurrent_in", "recurrent_gates", "recurrent_out"]
Stack = Literal["absorb", "expand", "expert_up", "expert_down"]  # products with a matrix for each head or expert
LayerInput = Literal["input_gate", "input_up", "input_projection"]  # the projection for all layers is the first one's
Product = Literal[Attention, Mlp, Recurrent, LayerInput, Stack]
Ranges = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class LinearModule:
    """A linear layer of a checkpoint."""

    name: str  # its name, relative to the prefix of a decoder's names
    rows: int  # outputs
    columns: int  # inputs
    layout: str = ""  # the layout of a family's checkpoints that has this module; empty if all have it


@dataclass(frozen=True, slots=True)
class LoraProduct:
    """A product of the runtime, and the modules that are its parts."""

    kind: Product  # the product of a layer
    modules: tuple[LinearModule, ...]  # its modules, in the order of ``arrange``
    # returns matrices [out, rank] of the modules in the runtime's order of outputs
    arrange: Callable[[tuple[Matrix, ...]], tuple[Matrix, ...]] = tuple
    expert: int | None = None  # index of its expert; None for a product of all rows


def lora_products(a: Architecture, number: int) -> Iterator[LoraProduct]:
    """Yields the products of a layer that an adapter may change, in each layout of its modules."""
    layer, at = a.stack[number], a.names.layer.format(number)
    if layer.attention and a.latent is not None:
        yield from _latent(a.latent, a.heads, f"{at}self_attn.", a.hidden)
    elif layer.attention:
        yield from _attention(a, layer, at)
    if layer.recurrent is not None and a.recurrence is not None:
        yield from _RECURRENT[layer.recurrent](a.recurrence, at + a.names.recurrent, a.hidden)
    if a.layer_inputs is not None:
        yield from _layer_inputs(a.layer_inputs, number, a.layers, at, a.hidden)
    if layer.experts is not None:
        yield from _experts(layer.experts, at, a.hidden)
    if layer.mlp in ("gated", "ungated") or (layer.experts is not None and layer.experts.beside is not None):
        inner = layer.inner or a.intermediate
        rows = [inner] * (1 if layer.mlp == "ungated" else 2)
        yield LoraProduct("up", _modules(at, a.names.up, rows, a.hidden))
        yield LoraProduct("down", (LinearModule(at + a.names.down, a.hidden, inner),))


def _layer_inputs(s: LayerInputs, number: int, layers: int, at: str, hidden: int) -> Iterator[LoraProduct]:
    if number == 0:
        yield LoraProduct("input_projection", (LinearModule(s.projection, layers * s.width, hidden),))
    yield LoraProduct("input_gate", (LinearModule(at + s.gate, s.width, hidden),))
    yield LoraProduct("input_up", (LinearModule(at + s.up, hidden, s.width),))


def _attention(a: Architecture, layer: Layer, at: str) -> Iterator[LoraProduct]:
    sizes = a.sizes(layer)
    wide, narrow = a.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    rows = [(1 + a.gated_attention) * wide, *([narrow, narrow] if layer.source is None else [])]
    arrange = partial(in_runtime_order, a, dtype=torch.float32)
    yield LoraProduct("qkv", _modules(at, a.names.qkv_of(layer), rows, a.hidden), arrange)
    yield LoraProduct("out", (LinearModule(at + a.names.out, a.hidden, wide),))


def keys_and_values(a: Architecture, number: int) -> LinearModule | None:
    """Returns the module from latents to keys and values by head; None without one."""
    if a.latent is None or not a.stack[number].attention:
        return None
    rows = a.heads * (a.latent.plain + a.latent.value)
    return LinearModule(f"{a.names.layer.format(number)}self_attn.kv_b_proj", rows, a.latent.rank)


def _latent(s: LatentAttention, heads: int, at: str, hidden: int) -> Iterator[LoraProduct]:
    wide, narrow = heads * (s.plain + s.rotated), s.rank + s.rotated
    last = LinearModule(f"{at}kv_a_proj_with_mqa", narrow, hidden)
    if s.query_rank:
        yield LoraProduct("qkv", (LinearModule(f"{at}q_a_proj", s.query_rank, hidden), last))
        yield LoraProduct("query_up", (LinearModule(f"{at}q_b_proj", wide, s.query_rank),))
    else:
        yield LoraProduct("qkv", (LinearModule(f"{at}q_proj", wide, hidden), last))
    yield LoraProduct("out", (LinearModule(f"{at}o_proj", hidden, heads * s.value),))


# Names in transformers' modules if those of checkpoints differ. Routers and experts were linear layers once and are
# parameters now, so not every adapter has modules of them.
_EXPERTS, _ROUTERS = ("mlp.experts", "block_sparse_moe.experts"), ("mlp.gate", "block_sparse_moe.router")


def _experts(e: Experts, at: str, hidden: int) -> Iterator[LoraProduct]:
    for name in sorted({e.names.router, *_ROUTERS}):
        yield LoraProduct("router", (LinearModule(at + name, e.count, hidden, name),))
    for name in expert_names(e):
        for number in range(e.count):
            part = f"{at}{name}.{number}."
            up = tuple(LinearModule(part + half, e.intermediate, hidden, name) for half in e.names.up)
            yield LoraProduct("expert_up", up, expert=number)
            down = LinearModule(part + e.names.down, hidden, e.intermediate, name)
            yield LoraProduct("expert_down", (down,), expert=number)
    for name in sorted({e.names.shared, "mlp.shared_experts"}) if e.shared else ():
        rows = [e.shared] * (1 + e.gated)
        yield LoraProduct("shared_up", _modules(f"{at}{name}.", e.names.shared_up, rows, hidden, name))
        yield LoraProduct("shared_down", (LinearModule(f"{at}{name}.{e.names.shared_down}", hidden, e.shared, name),))
    if e.shared_gate:
        yield LoraProduct("shared_gate", (LinearModule(f"{at}{e.names.shared}_gate", 1, hidden),))


def expert_names(e: Experts) -> list[str]:
    """Returns the names of the module of all experts in checkpoints and in transformers, relative to a layer's."""
    return sorted({e.names.experts, *_EXPERTS})


def _delta(r: Recurrence, at: str, hidden: int) -> Iterator[LoraProduct]:
    """Yields the products of gated DeltaNet, as Qwen3.5 and as Qwen3-Next stores its matrices."""

    def module(name: str, rows: int, layout: str) -> LinearModule:
        return LinearModule(f"{at}in_proj_{name}", rows, hidden, layout)

    yield LoraProduct("recurrent_in", (module("qkv", r.channels, "apart"), module("z", r.out, "apart")))
    gates = module("b", r.value_heads, "apart"), module("a", r.value_heads, "apart")
    yield LoraProduct("recurrent_gates", gates, _joined)
    joined, joined_gates = module("qkvz", r.channels + r.out, "joined"), module("ba", r.gates, "joined")
    yield LoraProduct("recurrent_in", (joined,), _ranges(delta_ranges(r)))
    yield LoraProduct("recurrent_gates", (joined_gates,), _ranges(gate_ranges(r)))
    yield LoraProduct("recurrent_out", (LinearModule(f"{at}out_proj", hidden, r.out),))


def _mamba(r: Recurrence, at: str, hidden: int) -> Iterator[LoraProduct]:
    rows = r.channels + r.out + r.value_heads
    modules = (LinearModule(f"{at}in_proj", rows, hidden),)
    yield LoraProduct("recurrent_in", modules, _ranges(mamba_ranges(r)))
    yield LoraProduct("recurrent_gates", modules, _ranges([(rows - r.value_heads, rows)]))
    yield LoraProduct("recurrent_out", (LinearModule(f"{at}out_proj", hidden, r.out),))


def _convolution(r: Recurrence, at: str, hidden: int) -> Iterator[LoraProduct]:
    modules = (LinearModule(f"{at}in_proj", 3 * r.channels, hidden),)
    yield LoraProduct("recurrent_in", modules, _ranges(convolution_ranges(r)))
    yield LoraProduct("recurrent_out", (LinearModule(f"{at}out_proj", hidden, r.out),))


_RECURRENT: dict[RecurrentMixer, Callable[[Recurrence, str, int], Iterator[LoraProduct]]] = {
    "delta": _delta,
    "mamba": _mamba,
    "convolution": _convolution,
}


def _ranges(ranges: Ranges) -> Callable[[tuple[Matrix, ...]], tuple[Matrix, ...]]:
    """Returns a function that selects these ranges of the only module's outputs."""
    return lambda parts: _joined(tuple(slices(parts[0], ranges)))


def _joined(parts: tuple[Matrix, ...]) -> tuple[Matrix, ...]:
    return (torch.cat([part for part in parts if isinstance(part, Tensor)]),)


def _modules(
    at: str, names: tuple[str, ...], rows: list[int], columns: int, layout: str = ""
) -> tuple[LinearModule, ...]:
    """Returns the modules of a product: one per name."""
    rows = rows if len(names) == len(rows) else [sum(rows)]
    return tuple(LinearModule(at + name, count, columns, layout) for name, count in zip(names, rows, strict=True))
