"""The file of an adapter's matrices."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from foretoken.core.errors import ModelLoadError
from foretoken.models.formats.weight_files import PICKLES, check_finite

TENSORS = "adapter_model.safetensors"
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])\.weight")


class AdapterFile:
    """Reads the matrices of one adapter.

    Attributes:
        modules: names of the modules that have matrices.

    Raises:
        ModelLoadError: there are no tensors, or some are not matrices of linear layers.
    """

    def __init__(self, folder: Path, file: Any) -> None:
        self._folder, self._file = folder, file
        self.modules = self._modules(file.keys())

    def _modules(self, names: Iterable[str]) -> frozenset[str]:
        stored: dict[str, set[str]] = {}
        for name in sorted(names):
            if (parsed := _NAME.fullmatch(name)) is None:
                raise self.wrong(f"the tensor {name!r}, which is not supported: LoRA is computed on linear layers")
            stored.setdefault(parsed["module"], set()).add(parsed["part"])
        if not stored:
            raise self.wrong("no tensors")
        for module, parts in stored.items():
            if len(parts) < 2:
                raise self.wrong(f"only one of the two matrices of {module!r}")
        return frozenset(stored)

    def shape(self, module: str, part: str) -> tuple[int, int]:
        """Returns the shape of matrix "A" or "B" of a module. Raises ModelLoadError unless it is a matrix."""
        name = _tensor(module, part)
        shape = tuple(self._file.get_slice(name).get_shape())
        if len(shape) != 2:
            raise self.wrong(f"{name!r} of the shape {shape}, and it should be a matrix")
        return shape[0], shape[1]

    def matrix(self, module: str, part: str, shape: tuple[int, int]) -> Tensor:
        """Returns matrix "A" or "B" of a module in float32. Raises ModelLoadError unless it has the shape."""
        name, stored = _tensor(module, part), self.shape(module, part)
        if stored != shape:
            raise self.wrong(f"{name!r} of the shape {stored}; model and adapter_config.json say {shape}")
        tensor: Tensor = self._file.get_tensor(name)
        if not tensor.is_floating_point():
            raise self.wrong(f"{name!r} of {tensor.dtype}; expected floats")
        tensor = tensor.float()  # first, because values of float64 may be too large
        check_finite(name, tensor, str(self._folder))
        return tensor

    def wrong(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"the adapter in {self._folder} has {what}")


def _tensor(module: str, part: str) -> str:
    return f"base_model.model.{module}.lora_{part}.weight"


def opened(folder: Path) -> Any:
    """Opens an adapter's tensors. Raises ModelLoadError."""
    from safetensors import safe_open

    file = folder / TENSORS
    if not file.is_file():
        if pickles := sorted(file.name for pattern in PICKLES for file in folder.glob(pattern)):
            raise ModelLoadError(
                f"{folder} has its weights only as a pickle ({pickles[0]}), which can run code when it is read; where "
                "you trust it, save the adapter again: PeftModel.from_pretrained(MODEL, SRC).save_pretrained(DST)"
            )
        raise ModelLoadError(f"{folder} has no {TENSORS}; expected the folder of a PEFT adapter")
    try:
        return safe_open(str(file), framework="pt")
    except Exception as error:  # safetensors raises its own and OSError kinds
        raise ModelLoadError(f"{file} is truncated or not a safetensors file ({error}); save it again") from error
