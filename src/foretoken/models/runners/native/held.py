"""Weights of a model that are packed or kept for the kernels, and lie where its specification points to."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from foretoken.models.formats.experts import MatrixStack
from foretoken.models.formats.grouped import Grouped, joinable
from foretoken.models.formats.quantize import Int8
from foretoken.models.formats.quantize import Matrix as AnyMatrix
from foretoken.models.formats.weights import NormWeight
from foretoken.models.runners.native.bindings import Matrix, NormSpec
from foretoken.models.runners.native.memory import Arena
from foretoken.models.runners.native.packing import Packed, pack, pack_stack


class HeldWeights:
    """Packs weights, and keeps what specifications point to.

    Args:
        arena: allocates packed matrices.
        compress: whether bfloat16 matrices are stored in 12 bits, without loss (csrc/packed.hpp).

    Attributes:
        held: tensors and structures that must outlive the specifications.
        nbytes: bytes of what is packed.
        inactive: those of them that a pass over one row does not read.
    """

    def __init__(self, arena: Arena, compress: bool) -> None:
        self._arena, self._compress = arena, compress
        self.held: list[object] = []
        self.nbytes, self.inactive = 0, 0.0

    def matrix(self, parts: Sequence[AnyMatrix], bias: Tensor | None = None, interleave: bool = False) -> Matrix:
        """Packs the matrices of one product; see ``pack``."""
        return self._hold(pack(self._arena, _one_layout(parts), bias, interleave, self._compress))

    def router(self, weights: Tensor, bias: Tensor | None) -> Matrix:
        """Packs the matrix of a router, which is not compressed."""
        return self._hold(pack(self._arena, [weights], bias))

    def stack(self, matrices: MatrixStack) -> Matrix:
        """Packs matrices that lie one after the other."""
        return self._hold(pack_stack(self._arena, matrices, self._compress))

    def norm(self, norm: NormWeight | None) -> NormSpec:
        """Keeps a norm. Returns its description, empty without one."""
        return NormSpec() if norm is None else NormSpec(self.keep(norm.weight), self.keep(norm.bias))

    def keep(self, tensor: Tensor | None) -> int | None:
        """Keeps a tensor in ``held``. Returns its address."""
        if tensor is None:
            return None
        tensor = tensor.contiguous()
        self.held.append(tensor)
        return tensor.data_ptr()

    def _hold(self, packed: Packed) -> Matrix:
        self.nbytes += packed.nbytes
        self.held.extend(packed.held)
        return packed.matrix


def _one_layout(parts: Sequence[AnyMatrix]) -> Sequence[AnyMatrix]:
    """Returns the parts of a product in one layout, if they are grouped."""
    grouped = [part for part in parts if isinstance(part, Grouped)]
    return joinable(grouped) if grouped else parts


def halves(parts: Sequence[AnyMatrix]) -> Sequence[AnyMatrix]:
    """Returns gate and up as two matrices."""
    if len(parts) == 2:
        return parts
    (matrix,) = parts
    middle = matrix.shape[0] // 2
    if isinstance(matrix, Grouped):
        return [matrix.part(at, at + middle) for at in (0, middle)]
    if isinstance(matrix, Int8):
        return [Int8(matrix.values[at : at + middle], matrix.scales[at : at + middle]) for at in (0, middle)]
    return list(matrix.split(middle))
