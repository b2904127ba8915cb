"""Single products on the compiled kernels: a pass without layers, whose vocabulary head is the matrix."""

from array import array
from ctypes import addressof

import torch
from torch import Tensor

from foretoken.core.native.build import KernelsUnavailable
from foretoken.models.formats.quantize import Matrix
from foretoken.models.runners.native.bindings import UNIT, BatchSpec, DecoderFunctions, ModelSpec, Workspace
from foretoken.models.runners.native.build import library, packing_library
from foretoken.models.runners.native.packing import KINDS, Arena, WeightPacker, padded


def multiplied(functions: DecoderFunctions, spec: ModelSpec, workspace: Workspace, threads: int, x: Tensor) -> Tensor:
    """Multiplies x [rows, in] by the vocabulary head of a model without layers. Returns float32 [rows, out]."""
    features, rows = x.float().contiguous(), array("i", range(x.shape[0]))
    result = torch.empty(len(rows), padded(spec.vocab, UNIT))
    batch = BatchSpec(
        features=features.data_ptr(),
        outputs=rows.buffer_info()[0],
        logits=result.data_ptr(),
        rows=len(rows),
        output_count=len(rows),
    )
    functions.foretoken_run(spec, batch, workspace, threads)
    return result[:, : spec.vocab]


class NativeProduct:
    """``x @ weight.T + bias``. No row depends on the others.

    Args:
        weight: [out, in].
        bias: [out]; None for none.
        dtype: dtype of the result, float32 or bfloat16.
        table: [tokens, in], float32 or bfloat16: rows that the kernels also take by their number; None for none.

    Raises:
        KernelsUnavailable: the kernels do not support the processor, the dtype or the width.
    """

    def __init__(self, weight: Matrix, bias: Tensor | None, dtype: torch.dtype, table: Tensor | None = None) -> None:
        out, width = weight.shape
        if dtype not in KINDS or width % UNIT:
            raise KernelsUnavailable(f"the kernels multiply multiples of {UNIT} numbers, not {width} of {dtype}")
        self._weights = WeightPacker(Arena(packing_library()), False)
        matrix = self._weights.matrix([weight], bias)
        self._spec = ModelSpec(hidden=width, vocab=out, head=matrix, logit_scale=1.0, mlp_factor=1.0, eps=1.0)
        if table is not None:
            self._spec.embedding, self._spec.embedding_kind = self._weights.keep(table), KINDS[table.dtype]
            self._spec.embedding_rows, self._spec.embedding_scale = len(table), 1.0
        self.kinds: set[int] = {matrix.kind}
        self._functions = library(self.kinds, KINDS[dtype])
        self._workspace = self._functions.workspace(self._spec)
        self._threads, self._dtype = torch.get_num_threads(), dtype

    def __call__(self, x: Tensor) -> Tensor:
        return multiplied(self._functions, self._spec, self._workspace, self._threads, x).to(self._dtype)

    @property
    def addresses(self) -> tuple[int, int]:
        address = self._workspace.address.value
        assert address is not None
        return addressof(self._spec), address
