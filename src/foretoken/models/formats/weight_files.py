"""The tensors of a checkpoint's safetensors files, and the check that they are finite.

``safe_open`` maps a whole file, and pages that were read stay resident until it is closed. So each tensor is mapped
separately. Pickles are refused, because loading one can run code.
"""

import json
import mmap
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from foretoken.core.errors import ModelLoadError, allocation_failed
from foretoken.core.schema import Schema, parse, read_object


def is_finite(tensor: Tensor) -> bool:
    """Returns whether the tensor holds neither NaN nor infinity. The tensor is read once, at memory bandwidth."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.itemsize == 1:
        tensor = tensor.float()  # torch reduces no float8
    # A sum keeps every NaN and infinity, but sums of large numbers overflow; then the extremes decide.
    return bool(tensor.sum().isfinite()) or bool(torch.stack(tensor.aminmax()).isfinite().all())


def check_finite(name: str, tensor: Tensor, where: str) -> None:
    """Checks a tensor as it is stored.

    Args:
        name: the tensor's name in the checkpoint.
        tensor: its values.
        where: the file or folder that holds it.
    """
    if not is_finite(tensor):
        raise ModelLoadError(
            f"the tensor {name!r} in {where} holds NaN or infinite numbers; download or save the checkpoint again"
        )


def converted(name: str, tensor: Tensor, dtype: torch.dtype, copy: bool = False) -> Tensor:
    """Returns a finite tensor in ``dtype``."""
    result = tensor.to(dtype, copy=copy)
    if dtype == torch.float16 and result.dtype != tensor.dtype and not is_finite(result):
        raise ModelLoadError(
            f"the tensor {name!r} holds numbers beyond the range of float16; use dtype 'bfloat16' or 'float32'"
        )
    return result


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Stored(NamedTuple):
    """A tensor in a file: the name of its dtype, its shape, and its bytes from ``start`` to ``end``."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """A safetensors file, which is checked on construction. tensors: stored tensors by name."""

    def __init__(self, path: Path) -> None:
        """Reads the header. Raises safetensors' own errors and OSError for a file that is damaged or not readable."""
        self.path = path
        names = safe_open(str(self.path), framework="np").keys()  # for torch it would map the file twice
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        self.tensors: dict[str, Stored] = {}
        for name in names:
            fields = header[name]
            start, end = (8 + size + offset for offset in fields["data_offsets"])
            self.tensors[name] = Stored(fields["dtype"], tuple(fields["shape"]), start, end)

    def read(self, name: str) -> Tensor:
        """Returns a tensor. Its mapping is private, and ends with it."""
        stored = self.tensors[name]
        if stored.dtype not in _DTYPES or stored.start == stored.end:
            tensor: Tensor = safe_open(str(self.path), framework="pt").get_tensor(name)
            return tensor
        first = stored.start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        with self.path.open("rb") as file:
            content = mmap.mmap(file.fileno(), stored.end - first, access=mmap.ACCESS_COPY, offset=first)
        numbers = torch.frombuffer(
            content, dtype=torch.uint8, offset=stored.start - first, count=stored.end - stored.start
        )
        return numbers.view(_DTYPES[stored.dtype]).view(stored.shape)


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class ShardIndex(Schema):
    """model.safetensors.index.json: the file of each tensor."""

    weight_map: dict[str, str]


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint by name, each of which is read on access."""

    shapes: Mapping[str, tuple[int, ...]]  # the shape of each tensor by name, known without reading it
    files: Sequence[Path]
    # bytes of all tensors as they are stored, if the compiled kernels keep them so; None if they do not
    nbytes: int | None = None

    @property
    def quantized(self) -> bool:
        """Whether tensors hold codes, so that quantizing them rounds a second time.

        Eight-bit floats do not count: checkpoints that were trained with them exist in no other form.
        """
        return False

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


class Weights(StoredTensors):
    """The tensors of a checkpoint's safetensors files, read lazily from memory-mapped files.

    File headers are checked on construction, and each tensor when it is first read. Each tensor has its own mapping,
    which ends with the tensor, so weights that were packed do not stay resident twice.
    """

    def __init__(self, path: Path) -> None:
        self._where: dict[str, SafetensorsFile] = {}
        self._checked: set[str] = set()
        shapes: dict[str, tuple[int, ...]] = {}
        index = _index(path)
        self.files = tuple(path / name for name in _weight_files(path, index))
        for path_of_file in self.files:
            try:
                file = SafetensorsFile(path_of_file)
            except Exception as error:  # safetensors raises its own and OSError kinds
                if allocation_failed(error):
                    raise ModelLoadError(
                        f"cannot map {path_of_file}, {path_of_file.stat().st_size / 2**30:.1f} GiB, into memory; "
                        "free memory, or raise the limit of the address space (ulimit -v)"
                    ) from error
                raise ModelLoadError(
                    f"{path_of_file} is truncated or not a safetensors file ({error}); download or save it again"
                ) from error
            for name, stored in file.tensors.items():
                self._where[name], shapes[name] = file, stored.shape
        self.shapes = shapes
        if missing := sorted(set(index or {}) - set(self._where)):
            raise ModelLoadError(f"{path / INDEX} lists the tensor {missing[0]!r}, which is in none of its files")

    def under(self, prefixes: tuple[str, ...]) -> "Weights":
        """Returns the tensors whose names begin with one of ``prefixes``."""
        chosen = copy(self)
        chosen._where = {name: file for name, file in self._where.items() if name.startswith(prefixes)}
        chosen.shapes = {name: self.shapes[name] for name in chosen._where}
        return chosen

    def __getitem__(self, name: str) -> Tensor:
        file = self._where[name]
        tensor = file.read(name)
        if name not in self._checked:
            check_finite(name, tensor, str(file.path))
            self._checked.add(name)
        return tensor


def _weight_files(path: Path, index: Mapping[str, str] | None) -> list[str]:
    if index is None:
        if (path / SINGLE).is_file():
            return [SINGLE]
        if pickles := sorted(file.name for pattern in PICKLES for file in path.glob(pattern)):
            raise ModelLoadError(
                f"{path} has its weights only as a pickle ({pickles[0]}), which can run code when it is read; convert "
                "them with transformers where you trust the file: "
                "AutoModelForCausalLM.from_pretrained(SRC).save_pretrained(DST)"
            )
        raise ModelLoadError(f"{path} has no weights; expected {SINGLE}, or {INDEX} and its shards")
    files = sorted(set(index.values()))
    if missing := [file for file in files if not (path / file).is_file()]:
        raise ModelLoadError(
            f"{path} lacks {len(missing)} of {len(files)} shards, first {missing[0]}; download it again"
        )
    return files


def _index(path: Path) -> dict[str, str] | None:
    """Returns the file of each tensor of a sharded checkpoint; None if the checkpoint has no index."""
    if (path / SINGLE).is_file() or not (path / INDEX).is_file():
        return None
    where = parse(ShardIndex, read_object(path / INDEX), str(path / INDEX)).weight_map
    if outside := [file for file in where.values() if Path(file).name != file]:
        raise ModelLoadError(f"{path / INDEX} names {outside[0]!r}; expected the names of files in its own folder")
    return where
