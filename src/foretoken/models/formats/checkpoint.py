"""Finds and reads checkpoints: configuration, weights and tokenizer of a folder, a GGUF file or a hub id.

Weights are read from safetensors or GGUF only. Pickles are refused, because loading one can run code.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field
from torch import Tensor

from foretoken.core.errors import ModelLoadError
from foretoken.core.schema import Layers, Schema, Size, TokenId, TokenIds, parse, read_object
from foretoken.models.formats.finite import check_finite
from foretoken.models.formats.gguf.names import SPLIT_NAME, is_gguf
from foretoken.models.formats.safetensors_file import SafetensorsFile
from foretoken.models.formats.tokenizer import PlainTokenizer, is_plain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from foretoken.models.formats.gguf.file import GGUFCheckpoint
    from foretoken.models.formats.gguf.weights import GGUFWeights

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
HUB_FILES = ("*.json", "*.safetensors", "tokenizer*", "*.model", "*.jinja", "vocab.txt", "merges.txt")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_FAST_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")


class GenerationSettings(Schema):
    """Special token ids from generation_config.json or config.json."""

    eos_token_id: TokenIds = Field(default_factory=list)
    bos_token_id: TokenId | None = None
    decoder_start_token_id: TokenId | None = None
    forced_bos_token_id: TokenId | None = None


class TokenizerSettings(Schema):
    """The fields of tokenizer_config.json that choose the tokenizer's class; transformers checks the others."""

    tokenizer_class: str | None = None
    auto_map: dict[str, Any] | None = None


class ShardIndex(Schema):
    """model.safetensors.index.json: the file of each tensor."""

    weight_map: dict[str, str]


class CommonConfig(Schema):
    """The fields of config.json that are read before the architecture is known."""

    model_type: str | None = None
    architectures: list[str] | None = None
    quantization_config: dict[str, Any] | None = None
    max_position_embeddings: Size | None = None
    num_hidden_layers: Layers | None = None
    num_layers: Layers | None = None
    num_decoder_layers: Layers | None = None
    n_layer: Layers | None = None
    n_layers: Layers | None = None
    encoder_layers: Layers | None = None
    decoder_layers: Layers | None = None
    text_config: CommonConfig | None = None


def resolve(name_or_path: str | Path, gguf_file: str | None = None) -> Path:
    """Returns the local folder or GGUF file of a checkpoint, after a download to the hub's cache if it is a hub id.

    Only json, safetensors and tokenizer files are downloaded, or the one GGUF file that is asked for.

    Args:
        name_or_path: a folder, a GGUF file, or a hub id like ``org/name`` or ``org/name:Q4_K_M``. A folder with one
            GGUF file and no other weights stands for that file. The first of several parts stands for all.
        gguf_file: name of a GGUF file in the folder or repository.

    Raises:
        ModelLoadError: no such folder, file or hub id exists.
    """
    path, name = Path(name_or_path).expanduser(), str(name_or_path)
    if path.is_dir() and name:
        return _in_folder(path, gguf_file)
    if path.is_file():
        if is_gguf(path) and gguf_file is None:
            return path
        raise ModelLoadError(
            f"{path} is a file; expected the folder of a checkpoint (config.json and *.safetensors) or a *.gguf file"
        )
    hub_id, _, tag = name.partition(":")
    if not name or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelLoadError(f"there is no folder {name!r}; expected a checkpoint's folder or a hub id like 'org/name'")
    if gguf_file is not None:
        split = SPLIT_NAME.fullmatch(gguf_file)
        names = glob.escape(gguf_file) if split is None else f"{glob.escape(split[1])}-?????-of-{split[3]}.gguf"
        return _in_folder(_download(hub_id, [names]), gguf_file)
    if tag:
        return _tagged(hub_id, tag)
    return _download(name, list(HUB_FILES))


def _download(hub_id: str, patterns: list[str]) -> Path:
    """Downloads the files of a hub repository that match. Returns the local folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns))
    except HFValidationError:
        raise ModelLoadError(f"{hub_id!r} is neither a local folder nor a valid hub id") from None
    except Exception as error:  # the hub client raises whatever its transport raises
        raise ModelLoadError(
            f"there is no local folder {hub_id!r}, and the hub did not give it ({type(error).__name__}); "
            "check the spelling, or download the checkpoint and pass its folder"
        ) from error


def _in_folder(folder: Path, gguf_file: str | None) -> Path:
    """Returns the GGUF file of a folder if it is named or has no other weights, else the folder."""
    if gguf_file is not None:
        if (folder / gguf_file).is_file() and is_gguf(Path(gguf_file)):
            return folder / gguf_file
        raise ModelLoadError(f"{folder} has no GGUF file {gguf_file!r}; it has {_listed(folder)}")
    if any(folder.glob("*.safetensors")) or not (files := _models([f for f in folder.iterdir() if is_gguf(f)])):
        return folder
    if len(files) > 1:
        raise ModelLoadError(f"{folder} has {_listed(folder)}; choose one with gguf_file=, or pass its path")
    return files[0]


def _models(files: Iterable[Path]) -> list[Path]:
    """Returns the files of which each stands for a model: all but the further parts of split ones."""
    split = {file: SPLIT_NAME.fullmatch(file.name) for file in files}
    return sorted(file for file, name in split.items() if name is None or int(name[2]) == 1)


def _tagged(hub_id: str, tag: str) -> Path:
    """Downloads the GGUF file of a repository whose name ends with ``tag``, or its parts. Returns its path."""
    patterns = [
        f"{before}{glob.escape(t)}{part}.gguf"
        for t in {tag, tag.upper(), tag.lower()}
        for before in ("*[-._]", "")
        for part in ("", "-?????-of-?????")
    ]
    folder = _download(hub_id, patterns)
    files = _models({file for pattern in patterns for file in folder.rglob(pattern)})
    if len(files) != 1:
        raise ModelLoadError(
            f"the hub's {hub_id!r} has {len(files) or 'no'} GGUF files that end with {tag!r}; name one by gguf_file="
        )
    return files[0]


def _listed(folder: Path) -> str:
    return ", ".join(sorted(file.name for file in folder.iterdir() if is_gguf(file))) or "none"


def _gguf(path: Path) -> GGUFCheckpoint:
    # The gguf package is a tenth of the time to import ours, and most checkpoints do not need it.
    from foretoken.models.formats.gguf.file import GGUFCheckpoint

    return GGUFCheckpoint(Path(path))


def load_config(path: Path) -> dict[str, Any]:
    """Returns the checkpoint's config.json; the fields that all architectures share are checked.

    For a GGUF file it follows from the metadata.

    Raises:
        ModelLoadError: the file is missing or malformed.
    """
    if is_gguf(Path(path)):
        config = _gguf(path).config()
        parse(CommonConfig, config, str(path))
        return config
    return read_object(Path(path) / "config.json", CommonConfig, "the folder of a checkpoint has one")


def load_generation_settings(path: Path) -> list[GenerationSettings]:
    """Returns the special token ids from generation_config.json and config.json, as far as they exist, in that order.

    The first file has precedence. For a GGUF file they come from its metadata.

    Raises:
        ModelLoadError: a field is wrong.
    """
    if is_gguf(path):
        return [parse(GenerationSettings, _gguf(path).special_ids(), str(path))]
    files = (file for name in ("generation_config.json", "config.json") if (file := path / name).is_file())
    return [parse(GenerationSettings, read_object(file), str(file)) for file in files]


def open_weights(path: Path) -> Weights | GGUFWeights:
    """Returns all tensors of a checkpoint or GGUF file by name; each is read from disk on access.

    Raises:
        ModelLoadError: a file is missing or damaged, or the weights are pickles.
    """
    return _gguf(path).weights() if is_gguf(Path(path)) else Weights(Path(path))


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


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase | PlainTokenizer:
    """Loads the checkpoint's own tokenizer, without remote code.

    Raises:
        ModelLoadError: the tokenizer cannot be loaded.
    """
    path = resolve(name)
    try:
        if is_gguf(path):
            return _gguf(path).tokenizer()
        settings = _tokenizer_settings(path)
        if is_plain(path, settings):
            return PlainTokenizer.load(path)
        if settings.get("tokenizer_class") in _FAST_CLASSES and "auto_map" not in settings:
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(path)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # tokenizers raise bare exceptions for broken files
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ModelLoadError(
            f"no tokenizer loads from {path} ({reason}); expected tokenizer.json or the model's vocabulary files"
        ) from error


def _tokenizer_settings(path: Path) -> dict[str, Any]:
    """Returns tokenizer_config.json if tokenizer.json lies beside it; else an empty dict.

    It names the tokenizer's class, which AutoTokenizer would otherwise search for seconds.
    """
    file = path / "tokenizer_config.json"
    if not file.is_file() or not (path / "tokenizer.json").is_file():
        return {}
    return read_object(file, TokenizerSettings)
