"""From a name or folder to weights, tokenizer and model. Safetensors only; a pickle can run code, so it is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretoken.core.checks import integer
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.core.schema import parse, read_object
from foretoken.models.base import Model
from foretoken.models.finite import check_finite
from foretoken.models.memory import check_fits, weight_bytes
from foretoken.models.options import DTYPES, check_backend, check_dtype, check_quantization
from foretoken.models.prequantized import check_prequantized
from foretoken.models.schema import CommonConfig, GenerationSettings, ShardIndex, TokenizerSettings
from foretoken.models.tokenizer import PlainTokenizer, is_plain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from foretoken.models.decoder import Decoder

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
HUB_FILES = ("*.json", "*.safetensors", "tokenizer*", "*.model", "*.jinja", "vocab.txt", "merges.txt")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_FAST_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")


# finding and reading


def resolve(name_or_path: str | Path) -> Path:
    """The local folder of a checkpoint: an existing one, or a hub id brought into the hub's cache.

    Only json, safetensors and tokenizer files are fetched. Raises ModelLoadError when neither exists.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir() and str(name_or_path):
        return path
    if path.is_file():
        raise ModelLoadError(f"{path} is a file; expected the folder of a checkpoint (config.json and *.safetensors)")
    name = str(name_or_path)
    if not name or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelLoadError(f"there is no folder {name!r}; expected a checkpoint's folder or a hub id like 'org/name'")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except HFValidationError:
        raise ModelLoadError(f"{name!r} is neither a local folder nor a valid hub id") from None
    except Exception as error:  # the hub client raises whatever its transport raises
        raise ModelLoadError(
            f"there is no local folder {name!r}, and the hub did not give it ({type(error).__name__}); "
            "check the spelling, or download the checkpoint and pass its folder"
        ) from error


def load_config(path: Path) -> dict[str, Any]:
    """The checkpoint's config.json, with the fields checked that all architectures share. Raises ModelLoadError."""
    return read_object(Path(path) / "config.json", CommonConfig, "the folder of a checkpoint has one")


def load_generation_settings(path: Path) -> list[GenerationSettings]:
    """What generation_config.json and config.json say of the ids that begin and end a text; the first one counts.

    Raises ModelLoadError for a field that is wrong.
    """
    files = (file for name in ("generation_config.json", "config.json") if (file := path / name).is_file())
    return [parse(GenerationSettings, read_object(file), str(file)) for file in files]


def open_weights(path: Path) -> Weights:
    """All tensors of a single or sharded checkpoint by name, each read from disk when it is asked for."""
    return Weights(Path(path))


class Weights(Mapping[str, Tensor]):
    """Lazily read tensors, memory-mapped; every file's header is checked at once, every tensor when it is first read.

    Each tensor has a mapping of its own, which goes when the tensor goes, so that what was read and packed does
    not stay resident a second time.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._where: dict[str, str] = {}
        self._checked: set[str] = set()
        self.shapes: dict[str, tuple[int, ...]] = {}
        index = _index(path)
        for file in _weight_files(path, index):
            try:
                handle = self._open(file)
                for name in handle.keys():  # noqa: SIM118 (not a mapping)
                    self._where[name], self.shapes[name] = file, tuple(handle.get_slice(name).get_shape())
            except Exception as error:  # safetensors raises its own and OSError kinds
                raise ModelLoadError(
                    f"{path / file} is truncated or not a safetensors file ({error}); download or save it again"
                ) from error
        if lost := sorted(set(index or {}) - set(self._where)):
            raise ModelLoadError(f"{path / INDEX} lists the tensor {lost[0]!r}, which is in none of its files")

    def __getitem__(self, name: str) -> Tensor:
        file = self._where[name]
        tensor: Tensor = self._open(file).get_tensor(name)
        if name not in self._checked:
            check_finite(name, tensor, str(self._path / file))
            self._checked.add(name)
        return tensor

    def _open(self, file: str) -> Any:
        from safetensors import safe_open

        return safe_open(str(self._path / file), framework="pt")

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
    if lost := [file for file in files if not (path / file).is_file()]:
        raise ModelLoadError(f"{path} lacks {len(lost)} of {len(files)} shards, first {lost[0]}; download it again")
    return files


def _index(path: Path) -> dict[str, str] | None:
    """Tensor name to file of a sharded checkpoint, None where there is no index."""
    if (path / SINGLE).is_file() or not (path / INDEX).is_file():
        return None
    where = parse(ShardIndex, read_object(path / INDEX), str(path / INDEX)).weight_map
    if outside := [file for file in where.values() if Path(file).name != file]:
        raise ModelLoadError(f"{path / INDEX} names {outside[0]!r}; expected the names of files in its own folder")
    return where


# choosing


def resolve_device(device: str | torch.device = "auto") -> torch.device:
    """``auto``: CUDA when present, else the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise InvalidRequest(f"device {device!r} is not known; expected 'auto', 'cpu' or 'cuda[:n]'") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest(f"device {str(device)!r} was asked for, but torch finds no CUDA device here; use 'cpu'")
    return chosen


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """``auto``: bf16 where the device computes it well (CUDA, CPUs with avx512_bf16 or amx), else float32."""
    name = str(dtype)
    check_dtype(name)
    if name == "auto":
        fast = device.type == "cuda" or (device.type == "cpu" and torch.ops.mkldnn._is_mkldnn_bf16_supported())
        return torch.bfloat16 if fast else torch.float32
    kind: torch.dtype = getattr(torch, DTYPES[name.removeprefix("torch.")])
    return kind


def load_model(
    name: str | Path,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    backend: str = "auto",
    max_length: int | None = None,
    quantization: str | None = None,
    tensor_parallel_size: int = 1,
) -> Model:
    """Load a causal language model from a folder or hub id.

    backend: ``"native"`` is our own decoder for the Llama family, ``"hf"`` transformers' module for any other,
    ``"auto"`` the first that fits. quantization: ``"int8"`` quantises the native decoder's matrices and, row by
    row, what they multiply. tensor_parallel_size: ranks that share the model, see ``models/sharded.py``. Raises
    ModelLoadError or InvalidRequest, each one line; also where the weights are larger than the memory that is free.
    """
    quantise = check_quantization(quantization)
    check_backend(backend)
    where = resolve_device(device)
    kind = resolve_dtype(dtype, where)
    path = resolve(name)
    config = load_config(path)
    weights = open_weights(path)
    _check_counts(config, weights, path)
    if check_ranks(tensor_parallel_size, backend, quantization):
        from foretoken.models.sharded import ShardedModel

        return ShardedModel.join(path, kind, where, tensor_parallel_size, weights.shapes, max_length)
    runtime = _runtime(config, path) if backend != "hf" else None
    native = runtime is not None
    int8 = quantise or (native and check_prequantized(config))
    check_fits(weight_bytes(weights.shapes, kind, int8), where, str(path))
    if runtime is not None:
        return runtime(config, weights, kind, where, max_length, quantization)
    if quantise:
        raise InvalidRequest(
            f"quantization={quantization!r} needs the native decoder, and {path} (type {config.get('model_type')!r}) "
            "would run on backend 'hf'; leave it out, or quantise the checkpoint with transformers"
        )
    if backend == "native":
        raise ModelLoadError(
            f"the native decoder does not compute the type {config.get('model_type')!r} of {path}; use backend='hf'"
        )
    from foretoken.models.hf import HFModel

    return HFModel.load(path, kind, where, max_length)


def check_ranks(size: int, backend: str, quantization: str | None) -> bool:
    """Whether a model is to be divided among ranks. Raises InvalidRequest for what cannot be."""
    integer("tensor_parallel_size", size, 1)
    if size > 1 and backend == "native":
        raise InvalidRequest("tensor_parallel_size divides transformers' modules; use backend='hf' or 'auto'")
    if size > 1 and quantization is not None:
        raise InvalidRequest(f"quantization={quantization!r} needs the native decoder, which runs on one rank")
    return size > 1


def _runtime(config: Mapping[str, Any], path: Path) -> type[Decoder] | None:
    """The class of ours that computes that architecture. Raises ModelLoadError for a config.json that is wrong."""
    from foretoken.models.decoder import Decoder
    from foretoken.models.seq2seq.model import EncoderDecoder

    try:
        return next((kind for kind in (Decoder, EncoderDecoder) if kind.supports(config)), None)
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from None


def _check_counts(config: Mapping[str, Any], weights: Weights, path: Path) -> None:
    """Raises ModelLoadError where config.json asks for more layers or experts than the tensors can hold.

    Modules are built, and lists filled, layer by layer before the first tensor is compared.
    """
    largest = max((len(weights), *(size for shape in weights.shapes.values() for size in shape)))
    for settings in (config, config.get("text_config") or {}):
        for name, value in settings.items():
            if isinstance(value, int) and value > largest and any(part in name for part in ("layer", "expert")):
                raise ModelLoadError(
                    f"{path / 'config.json'} has {name} = {value}, but the checkpoint holds {len(weights)} tensors of "
                    f"at most {largest} numbers in one dimension; do they belong together?"
                )


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase | PlainTokenizer:
    """The checkpoint's own tokenizer; no remote code."""
    path = resolve(name)
    try:
        settings = _tokenizer_settings(path)
        if is_plain(path, settings):
            return PlainTokenizer(path)
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
    """tokenizer_config.json where tokenizer.json lies beside it: the class is then known without a search (seconds)."""
    file = path / "tokenizer_config.json"
    if not file.is_file() or not (path / "tokenizer.json").is_file():
        return {}
    return read_object(file, TokenizerSettings)
