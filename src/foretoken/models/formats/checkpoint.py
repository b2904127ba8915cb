"""Finds and reads checkpoints: configuration, weights and tokenizer of a folder, a GGUF file or a hub id.

Weights are read from safetensors or GGUF only. Pickles are refused, because loading one can run code.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from foretoken.core.errors import ForetokenError, ModelLoadError, reason_of
from foretoken.core.schema import Layers, Schema, Size, TokenId, TokenIds, parse, read_object
from foretoken.models.formats.gguf import SPLIT_NAME, is_gguf
from foretoken.models.formats.memory import give_back
from foretoken.models.formats.tokenizer import PlainTokenizer, is_plain
from foretoken.models.formats.weight_files import StoredTensors, Weights

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from foretoken.models.formats.gguf.header import Header

HUB_FILES = ("*.json", "*.safetensors", "tokenizer*", "*.model", "*.jinja", "vocab.txt", "merges.txt")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
_VOCABULARY_FILES = ("tokenizer*", "vocab.*", "*.model", "*.tiktoken")
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
            GGUF file and no other weights stands for that file. The first file of a split model stands for all.
        gguf_file: name of a GGUF file in the folder or repository.
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
            f"there is no local folder {hub_id!r}, and the hub returned none ({type(error).__name__}); "
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
    """Returns one file of each model: all but the second and later parts of split ones."""
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


def _header(path: Path) -> Header:
    # Importing the gguf package takes about 0.1 s, and most checkpoints do not need it.
    from foretoken.models.formats.gguf.header import Header

    return Header.read(path)


def load_config(path: Path) -> dict[str, Any]:
    """Returns the checkpoint's config.json; the fields that all architectures share are checked.

    For a GGUF file it follows from the metadata. Raises ModelLoadError if the file is missing or malformed.
    """
    if is_gguf(path := Path(path)):
        from foretoken.models.formats.gguf.families import config_of

        config = config_of(_header(path))
        parse(CommonConfig, config, str(path))
        return config
    return read_object(path / "config.json", CommonConfig, "the folder of a checkpoint has one")


def load_generation_settings(path: Path) -> list[GenerationSettings]:
    """Returns the special token ids from generation_config.json and config.json, those that exist, in that order.

    The first file has precedence. For a GGUF file they come from its metadata. Raises ModelLoadError if a field is
    wrong.
    """
    if is_gguf(path):
        from foretoken.models.formats.gguf.tokenizer import special_ids

        return [parse(GenerationSettings, special_ids(_header(path)), str(path))]
    files = (file for name in ("generation_config.json", "config.json") if (file := path / name).is_file())
    return [parse(GenerationSettings, read_object(file), str(file)) for file in files]


def eos_ids(path: Path, tokenizer: Any, vocab_size: int) -> list[int]:
    """Returns the end-of-sequence ids of the checkpoint and the tokenizer that the vocabulary has."""
    ids = [token for settings in load_generation_settings(path) for token in settings.eos_token_id]
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return sorted(token for token in set(ids) if token < vocab_size)


def start_ids(path: Path, vocab_size: int) -> tuple[int, ...]:
    """Returns the first decoder tokens of an encoder-decoder: its start token, and the forced first token, if any."""
    settings = load_generation_settings(path)

    def named(name: str) -> int | None:
        return next((value for s in settings if (value := getattr(s, name)) is not None), None)

    start = named("decoder_start_token_id")
    if start is None:
        start = named("bos_token_id")
    if start is None:
        raise ModelLoadError(f"{path} names no decoder_start_token_id in generation_config.json or config.json")
    forced = named("forced_bos_token_id")
    start_tokens = (start,) if forced is None else (start, forced)
    if max(start_tokens) >= vocab_size:
        raise ModelLoadError(
            f"{path} begins texts with the token {max(start_tokens)} (decoder_start_token_id, forced_bos_token_id), "
            f"but the model's vocabulary has {vocab_size} tokens"
        )
    return start_tokens


def open_weights(path: Path) -> StoredTensors:
    """Returns all tensors of a checkpoint or GGUF file by name; each is read from disk on access."""
    if not is_gguf(path := Path(path)):
        return Weights(path)
    from foretoken.models.formats.gguf.weights import GGUFWeights

    return GGUFWeights(path)


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase | PlainTokenizer:
    """Loads the checkpoint's tokenizer, without remote code."""
    path = resolve(name)
    try:
        tokenizer = _tokenizer(path)
    except ForetokenError:
        raise
    except Exception as error:  # tokenizers raise bare exceptions for broken files
        if is_gguf(path):
            raise ModelLoadError(f"no tokenizer loads from {path}: {reason_of(error)}") from error
        if not any((path / name).is_file() for name in ("config.json", *_TOKENIZER_FILES)):
            raise ModelLoadError(
                f"{path} is no checkpoint: it has neither config.json nor a tokenizer; expected the folder of a model "
                "or a *.gguf file"
            ) from error
        raise ModelLoadError(
            f"no tokenizer loads from {path}; expected tokenizer.json or vocabulary files: {reason_of(error)}"
        ) from error
    give_back(len(tokenizer))  # loading took four times the tokenizer's memory
    return tokenizer


def _tokenizer(path: Path) -> PreTrainedTokenizerBase | PlainTokenizer:
    if is_gguf(path):
        from foretoken.models.formats.gguf.tokenizer import gguf_tokenizer

        return gguf_tokenizer(_header(path))
    settings = _tokenizer_settings(path)
    if is_plain(path, settings):
        return PlainTokenizer.load(path)
    if settings.get("tokenizer_class") in _FAST_CLASSES and "auto_map" not in settings:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(path)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, trust_remote_code=False)


def load_vocabulary(path: Path) -> dict[str, int] | None:
    """Returns the id of every token of a folder or GGUF file; None if it has no tokenizer."""
    if is_gguf(path):
        from foretoken.models.formats.gguf.tokenizer import token_ids

        return token_ids(_header(path))
    if not any(any(path.glob(pattern)) for pattern in _VOCABULARY_FILES):
        return None
    vocabulary: dict[str, int] = load_tokenizer(path).get_vocab()
    return vocabulary


def vocabulary_size(path: Path) -> int | None:
    """Returns the number of tokens that a checkpoint's config.json names, padding included; None if it names none."""
    config = load_config(path)
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return size if isinstance(size, int) else None


def _tokenizer_settings(path: Path) -> dict[str, Any]:
    """Returns tokenizer_config.json if tokenizer.json lies beside it; else an empty dict.

    It names the tokenizer's class, which AutoTokenizer would otherwise search for seconds.
    """
    file = path / "tokenizer_config.json"
    if not file.is_file() or not (path / "tokenizer.json").is_file():
        return {}
    return read_object(file, TokenizerSettings)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppresses warnings and progress bars of transformers within the block."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
