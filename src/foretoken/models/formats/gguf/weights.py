"""The tensors of a GGUF file by their names in a checkpoint, dequantized or as groups of codes.

Changes of llama.cpp's converter to a checkpoint's tensors are undone.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.core.errors import ModelLoadError
from foretoken.core.schema import shortened
from foretoken.models.families.architecture import Architecture, unsupported
from foretoken.models.families.family import group_order
from foretoken.models.families.recurrence import Recurrence
from foretoken.models.formats.gguf.blocks import FLOATS, LAYOUTS, Bytes, groups_of
from foretoken.models.formats.gguf.families import config_of, family_of
from foretoken.models.formats.gguf.header import Header, StoredTensor, split_parts
from foretoken.models.formats.gguf.tensor_names import Names
from foretoken.models.formats.quantize import Grouped, Groups, TwoLevels
from foretoken.models.formats.weight_files import StoredTensors, check_finite

Order = NDArray[np.int64]
_TAPS = ("ssm_conv1d", "shortconv.conv")
_STATE_NORM = "ssm_norm"  # the norm of a state's outputs, which has no offset


@dataclass(frozen=True, slots=True, eq=False)
class ChangedTensor:
    """A stored tensor and its differences from the checkpoint's."""

    stored: StoredTensor
    shape: tuple[int, ...]  # its shape in the checkpoint
    order: Order | None = None  # the row in the file of each row of the checkpoint; None if they are the same
    columns: Order | None = None  # the head in the file of each head of inputs; None if they are the same
    offset: float = 0.0  # is subtracted from the stored values
    transposed: bool = False  # whether a checkpoint has a matrix of floats as [in, out]

    @property
    def rows(self) -> int:
        """Number of rows. A vector has one, or its length if its order differs."""
        shape = self.stored.shape
        return math.prod(shape[:-1]) if len(shape) > 1 else 1 if self.order is None else shape[0]

    def restored(self, values: Tensor) -> Tensor:
        """Returns the checkpoint's tensor from the stored values by rows."""
        if self.columns is not None:
            values = values.unflatten(-1, (len(self.columns), -1))[..., torch.from_numpy(self.columns), :].flatten(-2)
        values = values.reshape(self.shape[::-1] if self.transposed else self.shape)
        values = values.float() - self.offset if self.offset else values
        return values.t() if self.transposed else values

    def arranged(self, groups: Grouped) -> Grouped | None:
        """Returns a quantized matrix with the checkpoint's inputs; None if groups do not allow it."""
        if self.columns is None:
            return groups
        return groups.with_inputs(torch.from_numpy(self.columns))


def source(stored: StoredTensor, a: Architecture, part: str, interleaved: bool, tiled: bool) -> ChangedTensor:
    """Returns the stored tensor with its differences from the checkpoint's.

    Args:
        part: its name in the file, without ``blk.N.``.
        interleaved: whether rows of queries and keys are stored in pairs.
        tiled: whether heads of values are stored in another order than the keys that serve them.

    Raises:
        ValueError: its shape does not fit the architecture.
    """
    name, _, suffix = part.rpartition(".") if part.endswith((".weight", ".bias")) else (part, "", "")
    result = ChangedTensor(stored, stored.shape)
    if suffix == "weight" and name.endswith("norm") and name != _STATE_NORM:
        result = replace(result, offset=a.norm_offset)
    if name in _TAPS and suffix == "weight":
        result = replace(result, shape=(stored.shape[0], 1, *stored.shape[1:]))
    if a.names.transposed and len(stored.shape) == 2 and name in ("attn_qkv", "attn_output", "ffn_up", "ffn_down"):
        result = replace(result, shape=stored.shape[::-1], transposed=True)
    rows = stored.shape[0]
    if interleaved and name in ("attn_q", "attn_k"):
        return replace(result, order=_pairs(rows, a.heads if name == "attn_q" else a.kv_heads))
    if a.names.by_group and name == "attn_qkv":
        order = np.argsort(group_order(a.heads, a.kv_heads, a.head_dim).numpy())
        if len(order) != rows:
            raise ValueError(f"where {a.heads} and {a.kv_heads} heads have {len(order)} rows")
        return replace(result, order=order)
    r = a.recurrence
    if not tiled or r is None or r.value_heads == r.key_heads:
        return result
    if name == "ssm_out":
        if stored.shape[-1] % r.value_heads:
            raise ValueError(f"which {r.value_heads} heads do not divide")
        return replace(result, columns=_tiles(r, 1))
    if name in ("attn_gate", "attn_qkv", "ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt", "ssm_conv1d"):
        return replace(result, order=_values_last(r, rows))
    return result


def _pairs(rows: int, heads: int) -> Order:
    """Returns the stored row of each row of heads whose halves are stored in turns."""
    if heads < 1 or rows % (2 * heads):
        raise ValueError(f"which {heads} heads do not divide")
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _tiles(r: Recurrence, width: int) -> Order:
    """Returns the stored row of each row of all heads of values.

    A checkpoint groups heads of values by the head of keys that serves them; a file has the first of each group first.
    """
    by_key = np.arange(r.value_heads * width).reshape(-1, r.key_heads, width)
    return by_key.swapaxes(0, 1).reshape(-1)


def _values_last(r: Recurrence, rows: int) -> Order:
    """Returns the stored row of each row of a tensor that ends with the heads of values, all of one width."""
    keys = 2 * r.key_heads * r.key_dim if rows == r.channels else 0
    if (rows - keys) % r.value_heads:
        raise ValueError(f"which {r.value_heads} heads do not divide")
    return np.concatenate([np.arange(keys), keys + _tiles(r, (rows - keys) // r.value_heads)])


_FUSED = re.compile(r"blk\.([0-9]{1,5})\.attn_qkv\.(weight|bias)")


def _packed_bytes(stored: StoredTensor) -> int:
    """Returns the bytes of a tensor on the compiled kernels, whose codes may have more bits than those of its type."""
    if stored.kind not in LAYOUTS:
        return stored.nbytes
    bits = int(re.findall(r"\d", stored.kind.name)[0])  # such as Q5_0, IQ4_NL and MXFP4
    return stored.nbytes + math.prod(stored.shape) * max(0, LAYOUTS[stored.kind].bits - bits) // 8


class GGUFWeights(StoredTensors):
    """The tensors of a GGUF file under the checkpoint's names, with llama.cpp's changes undone.

    Tensors are read on access, in parts, so nothing stays resident: floats in the type of the file, quantized ones as
    float32.
    """

    def __init__(self, path: Path) -> None:
        header = Header.read(path)
        self._path = path
        self.files = tuple(split_parts(header))
        self._sources = _sources(header)
        self.shapes = {name: source.shape for name, source in self._sources.items()}
        self.nbytes = sum(_packed_bytes(source.stored) for source in self._sources.values())

    def __getitem__(self, name: str) -> Tensor:
        source, groups = self._sources[name], self._groups(name)
        if groups is not None:
            tensor = source.restored(groups.dequantize())
        else:
            floats = torch.from_numpy(self._rows(source, 0, source.rows)).view(FLOATS[source.stored.kind])
            tensor = source.restored(floats)
        check_finite(name, tensor, str(self._path))
        return tensor

    @property
    def quantized(self) -> bool:
        return any(source.stored.kind not in FLOATS for source in self._sources.values())

    def grouped(self, name: str) -> Grouped | None:
        """Returns a quantized matrix that reads its rows from the file; None if the tensor holds floats.

        Matrices of several experts are concatenated along outputs.
        """
        groups = self._groups(name)
        return None if groups is None else self._sources[name].arranged(groups)

    def _groups(self, name: str) -> Grouped | None:
        """Returns a quantized matrix with the file's inputs; None if the tensor holds floats."""
        source = self._sources[name]
        kind, shape = source.stored.kind, source.stored.shape
        if kind not in LAYOUTS or source.offset or len(shape) < 2:
            return None

        def rows(first: int, last: int) -> Groups:
            groups = groups_of(kind, self._rows(source, first, last))
            for numbers in (groups.scales, groups.offsets):
                if numbers is not None:
                    check_finite(name, numbers.wholes if isinstance(numbers, TwoLevels) else numbers, str(self._path))
            return groups

        return Grouped((source.rows, shape[-1]), LAYOUTS[kind], rows)

    def _rows(self, source: ChangedTensor, first: int, last: int) -> Bytes:
        """Returns the bytes [last - first, bytes of a row] of a tensor's rows, in the checkpoint's order."""
        stored, order, count = source.stored, source.order, source.rows
        width = stored.nbytes // count
        try:
            if order is None:
                start, size = stored.start + first * width, (last - first) * width
                return np.fromfile(stored.path, np.uint8, size, offset=start).reshape(last - first, width)
            return np.memmap(stored.path, np.uint8, "c", stored.start, (count, width))[order[first:last]]
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{stored.path} cannot be read ({error}); was it changed?") from None


def _sources(header: Header) -> dict[str, ChangedTensor]:
    """Returns the file's tensors by their names in a checkpoint. Raises ModelLoadError for unsupported ones."""
    _, family = family_of(header)
    config = config_of(header)
    if (reason := unsupported(config)) is not None:
        raise ModelLoadError(f"{header.path} is not computed here: {reason}")
    a = Architecture.of(config)
    names, sources = Names.of(a, family.renamed, header.tensors), {}
    for name, stored in _separated(header, a):
        try:
            checkpoint_name = names.checkpoint(name)
        except KeyError:
            raise ModelLoadError(
                f"{header.path} has the tensor {shortened(name)}, which its architecture does not have here"
            ) from None
        if checkpoint_name is None:
            continue
        _check_type(header.path, stored)
        part = name.split(".", 2)[2] if name.startswith("blk.") else name
        try:
            sources[checkpoint_name] = source(stored, a, part, family.interleaved, family.tiled)
        except ValueError as error:
            raise ModelLoadError(f"{header.path} has {name} {stored.shape}, {error}") from None
    return sources


def _separated(header: Header, a: Architecture) -> Iterator[tuple[str, StoredTensor]]:
    """Yields the file's tensors; queries, keys and values that llama.cpp's converter joined are split.

    With ``--fuse-qkv`` it concatenates these three matrices of a checkpoint along outputs.
    """
    for name, stored in header.tensors.items():
        fused = _FUSED.fullmatch(name)
        layer = None if fused is None else a.stack[min(int(fused[1]), a.layers - 1)]
        apart = len(a.names.qkv) == 3 and a.latent is None
        if fused is None or layer is None or not apart or not layer.attention or layer.recurrent == "delta":
            yield name, stored
            continue
        sizes = a.sizes(layer)
        narrow = sizes.kv_heads * sizes.head_dim
        rows = ((1 + a.gated_attention) * a.heads * sizes.head_dim, narrow, narrow)
        if sum(rows) != stored.shape[0]:
            raise ModelLoadError(f"{header.path} has {name} {stored.shape}, but its keys say {sum(rows)} rows")
        for part, (first, last) in zip("qkv", pairwise(accumulate(rows, initial=0)), strict=True):
            part_name = f"blk.{fused[1]}.attn_{part}.{fused[2]}"
            yield part_name, stored.rows(part_name, first, last)


def _check_type(path: Path, stored: StoredTensor) -> None:
    stacks = ("_exps.", "attn_k_b.", "attn_v_b.")
    vector, max_dimensions = len(stored.shape) == 1, 3 if any(stack in stored.name for stack in stacks) else 2
    if len(stored.shape) > max_dimensions or (stored.kind not in FLOATS and (vector or stored.kind not in LAYOUTS)):
        raise ModelLoadError(
            f"{path} stores {stored.name} {stored.shape} as {stored.kind.name}; supported are vectors of "
            f"{', '.join(kind.name for kind in FLOATS)}, and matrices of these and {', '.join(k.name for k in LAYOUTS)}"
        )
