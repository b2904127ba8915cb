"""The safetensors files of a checkpoint. Pickles are refused, because loading one can run code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from pathlib import Path

from torch import Tensor

from foretoken.core.errors import ModelLoadError
from foretoken.core.schema import Schema, parse, read_object
from foretoken.models.formats.finite import check_finite
from foretoken.models.formats.safetensors_file import SafetensorsFile

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class ShardIndex(Schema):
    """model.safetensors.index.json: the file of each tensor."""

    weight_map: dict[str, str]


class Weights(Mapping[str, Tensor]):
    """The tensors of a checkpoint, read lazily from memory-mapped files.

    File headers are checked on construction, and each tensor when it is first read. Each tensor has its own mapping,
    which ends with the tensor, so weights that were packed do not stay resident twice.

    Attributes:
        shapes: the shape of each tensor by name, known without reading it.
        files: the files.
    """

    def __init__(self, path: Path) -> None:
        self._where: dict[str, SafetensorsFile] = {}
        self._checked: set[str] = set()
        self.shapes: dict[str, tuple[int, ...]] = {}
        index = _index(path)
        self.files = tuple(path / name for name in _weight_files(path, index))
        for path_of_file in self.files:
            try:
                file = SafetensorsFile(path_of_file)
            except Exception as error:  # safetensors raises its own and OSError kinds
                raise ModelLoadError(
                    f"{path_of_file} is truncated or not a safetensors file ({error}); download or save it again"
                ) from error
            for name, stored in file.tensors.items():
                self._where[name], self.shapes[name] = file, stored.shape
        if missing := sorted(set(index or {}) - set(self._where)):
            raise ModelLoadError(f"{path / INDEX} lists the tensor {missing[0]!r}, which is in none of its files")

    def under(self, prefixes: tuple[str, ...]) -> Weights:
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

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


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
