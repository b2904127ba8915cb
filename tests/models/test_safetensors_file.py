"""Tensors of a safetensors file that are mapped one by one are those that safetensors reads of the whole file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from foretoken.models.formats.weight_files import SafetensorsFile

MAPS = Path("/proc/self/maps")
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.uint16, torch.complex64),
)
SHAPES = ((), (3,), (0, 4), (7, 5, 2), (90, 100))


def test_every_dtype_and_shape(tmp_path: Path) -> None:
    """Those of one byte begin anywhere; some tensors are empty, and some are larger than a page."""
    file, generator = tmp_path / "model.safetensors", torch.Generator().manual_seed(1)
    tensors = {
        f"{dtype} {shape}": torch.randint(0, 2, shape, generator=generator).to(dtype)
        for dtype in DTYPES
        for shape in SHAPES
    }
    save_file(tensors, file, metadata={"format": "pt"})
    stored, expected = SafetensorsFile(file), load_file(file)
    assert stored.tensors.keys() == tensors.keys()
    for name, tensor in expected.items():
        read = stored.read(name)
        assert stored.tensors[name].shape == read.shape == tensor.shape
        assert read.dtype == tensor.dtype and torch.equal(read, tensor), name


def test_a_mapping_ends_with_its_tensor_and_changes_no_file(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(5000), "b": torch.ones(5000)}, file)
    stored = SafetensorsFile(file)
    tensor = stored.read("a")
    tensor += 3
    assert torch.equal(stored.read("a"), torch.zeros(5000))
    if MAPS.exists():
        assert str(file) in MAPS.read_text()
        del tensor
        assert str(file) not in MAPS.read_text()


@pytest.mark.parametrize("kept", [0, 7, 40, -1])
def test_a_file_that_ends_early_is_refused(kept: int, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(50)}, file)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(SafetensorError):
        SafetensorsFile(file)
