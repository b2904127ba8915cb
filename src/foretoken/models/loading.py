"""Loads whole models: chooses the implementation for a checkpoint, a device and a dtype."""

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foretoken.core.checks import integer
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.core.threads import respect_limits
from foretoken.models.base import Model
from foretoken.models.decoder import Decoder
from foretoken.models.families.architecture import Architecture, unsupported
from foretoken.models.families.config import text_part
from foretoken.models.formats.checkpoint import load_config, open_weights, resolve
from foretoken.models.formats.gguf import is_gguf
from foretoken.models.formats.memory import check_fits, give_back, weight_bytes
from foretoken.models.formats.packed import PackedWeights
from foretoken.models.formats.prequantized import check_prequantized, unpacked
from foretoken.models.formats.quantize import Quantizer
from foretoken.models.formats.reader import located
from foretoken.models.formats.weight_files import StoredTensors, Weights
from foretoken.models.options import DTYPES, check_dtype, check_options
from foretoken.models.runners.native.build import kernels_available, packs_groups
from foretoken.models.runners.native.support import PACKED_BITS, packs
from foretoken.models.seq2seq import EncoderDecoder

_log = logging.getLogger(__name__)


def load_model(
    name: str | Path,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    backend: str = "auto",
    max_length: int | None = None,
    quantization: str | None = None,
    tensor_parallel_size: int = 1,
    gguf_file: str | None = None,
    weight_format: str = "raw",
    kv_cache_dtype: str = "auto",
    attention_window: int | None = None,
) -> Model:
    """Loads a causal language model or an encoder-decoder.

    Args:
        name: a checkpoint's folder, a GGUF file, or a hub id; see ``resolve``.
        dtype: see ``resolve_dtype``.
        device: see ``resolve_device``.
        backend: ``"native"`` is our own decoder for the Llama family, ``"hf"`` is transformers' module for any other
            model, ``"auto"`` is the first of the two that supports the checkpoint.
        max_length: maximum length of a sequence in tokens; None for the checkpoint's.
        quantization: quantizes the matrices of the native decoder, and their inputs row by row: ``"int8"`` with a scale
            for each output, ``"int4"`` (or ``"int4-g32"``, ``-g64``, ``-g128``) with one for each group of inputs.
        tensor_parallel_size: number of ranks that share the model; see ``models/hf/sharded.py``.
        gguf_file: name of a GGUF file in the folder or repository.
        weight_format: format of the native decoder's bfloat16 matrices in memory: ``"raw"`` unchanged, ``"packed"`` in
            12 bits without loss, ``"auto"`` packed if that makes passes of few rows faster.
        kv_cache_dtype: type of the native decoder's keys and values: ``"auto"`` in the model's dtype, ``"bfloat16"``,
            or ``"int8"`` with a scale for each token and head.
        attention_window: number of tokens that attention sees at most, which changes the model; None for its own.

    Raises:
        InvalidRequest: an option is unknown, or the model does not support it.
        ModelLoadError: the checkpoint cannot be loaded, or its weights are larger than the free memory.
    """
    check_options(kv_cache_dtype=kv_cache_dtype)
    opened = open_model(name, dtype, device, backend, quantization, tensor_parallel_size, gguf_file, weight_format)
    path, runtime, where = opened.path, opened.runtime, opened.device
    if attention_window is not None and runtime is not Decoder:
        raise InvalidRequest(f"draft_window needs the native decoder, which does not run {path} here; leave it out")
    if runtime is not None:
        if quantization is not None:
            _check_rounding(opened.config, opened.weights, quantization, path)
        check_fits(opened.weight_bytes, where, str(path))
        formats = (quantization, weight_format, kv_cache_dtype, attention_window)
        model = runtime(opened.config, opened.weights, opened.dtype, where, max_length, *formats)
        give_back(int(opened.config.get("hidden_size") or 0))
        return model
    if kv_cache_dtype != "auto":
        raise InvalidRequest(
            f"kv_cache_dtype={kv_cache_dtype!r} needs the native decoder, which does not run {path} here; leave it out"
        )
    if tensor_parallel_size > 1:
        from foretoken.models.hf.sharded import ShardedModel

        return ShardedModel.join(path, opened.dtype, where, tensor_parallel_size, opened.weights.shapes, max_length)
    check_fits(opened.weight_bytes, where, str(path))
    _check_hf(opened.config, path, backend, quantization)
    from foretoken.models.hf.model import HFModel  # transformers takes seconds to import

    return HFModel.load(path, opened.dtype, where, max_length)


@dataclass(frozen=True, slots=True, eq=False)
class OpenedModel:
    """A checkpoint before its tensors are read."""

    path: Path  # its folder or GGUF file
    config: dict[str, Any]  # its config.json; of a multimodal checkpoint that of the language model
    weights: StoredTensors  # its tensors
    runtime: type[Decoder] | None  # our class that computes it; None for transformers' module
    dtype: torch.dtype  # dtype of weights and activations
    device: torch.device
    weight_bytes: int  # bytes of its weights once they are loaded


def open_model(
    name: str | Path,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    backend: str = "auto",
    quantization: str | None = None,
    tensor_parallel_size: int = 1,
    gguf_file: str | None = None,
    weight_format: str = "raw",
) -> OpenedModel:
    """Opens a checkpoint as ``load_model`` does, whose arguments these are, and raises what it raises."""
    respect_limits()
    check_options(quantization=quantization, backend=backend, weight_format=weight_format)
    where = resolve_device(device)
    path = resolve(name, gguf_file)
    config = load_config(path)
    weights = open_weights(path)
    _check_counts(config, weights.shapes, path)
    if backend != "hf" and tensor_parallel_size == 1 and isinstance(weights, Weights):
        config, weights = _language_model(config, weights, path)
    ranks = check_ranks(tensor_parallel_size, backend, quantization)
    if is_gguf(path) and (ranks or backend == "hf"):
        raise InvalidRequest(f"{path} is a GGUF file, which runs on the native decoder, on one rank")
    runtime = _runtime(config, path) if backend != "hf" and not ranks else None
    kind = resolve_dtype(dtype, where, compiled=runtime is not None)
    if weight_format == "packed":
        _check_packed(runtime, quantization, path)
    if runtime is None:
        needed = _needed(weights, Quantizer.of(quantization), kind, False, None)
        return OpenedModel(path, config, weights, None, kind, where, needed)
    tensors = unpacked(weights, config)
    scheme = Quantizer.of(quantization or ("int8" if check_prequantized(config) else None))
    compiled = where.type == "cpu" and packs_groups(kind)
    compress = compiled and packs(runtime.decoder_of(config), kind, weight_format)
    needed = _needed(tensors, scheme, kind, compiled, PACKED_BITS if compress else None)
    return OpenedModel(path, config, tensors, runtime, kind, where, needed)


def _check_hf(config: Mapping[str, Any], path: Path, backend: str, quantization: str | None) -> None:
    """Raises InvalidRequest or ModelLoadError if transformers' module is no substitute for our decoder."""
    if quantization is not None:
        raise InvalidRequest(
            f"quantization={quantization!r} needs the native decoder, and {path} (type {config.get('model_type')!r}) "
            "would run on backend 'hf'; leave it out, or quantize the checkpoint with transformers"
        )
    if backend == "native" or is_gguf(path):
        raise ModelLoadError(
            f"the native decoder does not compute {unsupported(config)}, which {path} has; use backend='hf'"
        )


def _language_model(config: dict[str, Any], weights: Weights, path: Path) -> tuple[dict[str, Any], Weights]:
    """Returns configuration and tensors of a multimodal checkpoint's language model, if our decoder computes it.

    For other checkpoints they are returned unchanged.
    """
    text = text_part(config)
    if text is None or _runtime(text, path) is not Decoder:
        return config, weights
    report_language_model_alone(str(path))
    return text, weights.under(located(weights, Architecture.of(text).names))


@functools.cache
def report_language_model_alone(path: str) -> None:
    """Warns once for each checkpoint that images and sound are not read."""
    _log.warning("%s is multimodal; its language model is loaded alone, so images and sound are not read", path)


def _check_rounding(config: Mapping[str, Any], tensors: StoredTensors, quantization: str, path: Path) -> None:
    """Warns if weights are rounded a second time. Raises InvalidRequest if they are int8 and would stay so."""
    if check_prequantized(config) and quantization != "int8":
        raise InvalidRequest(
            f"{path} is int8 already, so quantization={quantization!r} would change nothing; leave it out, or name the "
            "checkpoint that it was made from"
        )
    if tensors.quantized:
        report_second_rounding(str(path), quantization)


@functools.cache
def report_second_rounding(path: str, quantization: str) -> None:
    """Warns once for each checkpoint that rounding twice loses more than once."""
    _log.warning(
        "%s is quantized already, and quantization=%r rounds its weights a second time, which changes the output more "
        "than rounding once; leave it out, or name the checkpoint that it was made from",
        path,
        quantization,
    )


def _needed(
    tensors: StoredTensors, scheme: Quantizer | None, dtype: torch.dtype, compiled: bool, bits: float | None
) -> int:
    """Returns the bytes of the weights once they are loaded.

    Args:
        tensors: the checkpoint's tensors.
        scheme: quantization of matrices on loading; None for none.
        dtype: dtype of the model.
        compiled: whether the compiled kernels run, which keep matrices quantized in groups; otherwise they are
            dequantized.
        bits: bits of a weight that is not quantized; None for the dtype's.
    """
    if scheme is not None:
        return weight_bytes(tensors.shapes, dtype, scheme.weight_bits if compiled or scheme.group is None else None)
    if isinstance(tensors, PackedWeights):
        bits = tensors.bits if compiled else None
    elif compiled and tensors.nbytes is not None:
        return min(tensors.nbytes, weight_bytes(tensors.shapes, dtype, None))
    return weight_bytes(tensors.shapes, dtype, bits)


def resolve_device(device: str | torch.device = "auto") -> torch.device:
    """Returns the device to use; for ``"auto"`` CUDA if there is a device, else the CPU.

    Raises InvalidRequest if torch does not know the device, or has no CUDA device.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise InvalidRequest(f"device {device!r} is not known; expected 'auto', 'cpu' or 'cuda[:n]'") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest(f"device {str(device)!r} needs a CUDA device, and torch finds none here; use 'cpu'")
    return chosen


def resolve_dtype(dtype: str | torch.dtype, device: torch.device, compiled: bool = False) -> torch.dtype:
    """Returns the dtype to use; for ``"auto"`` bfloat16 if it is faster, else float32.

    CUDA devices compute bfloat16 fast, and so do torch's operators on CPUs with AVX-512. Compiled kernels do so on
    every CPU, because they read half the bytes. Raises InvalidRequest if the dtype is unknown.

    Args:
        dtype: a dtype, its name, or ``"auto"``.
        device: device of the model.
        compiled: whether the model runs on the compiled runtime, if this machine has kernels.
    """
    name = str(dtype)
    check_dtype(name)
    if name == "auto":
        fast = device.type == "cuda" or (device.type == "cpu" and torch.ops.mkldnn._is_mkldnn_bf16_supported())
        kernels = compiled and device.type == "cpu" and kernels_available()
        return torch.bfloat16 if fast or kernels else torch.float32
    kind: torch.dtype = getattr(torch, DTYPES[name.removeprefix("torch.")])
    return kind


def check_ranks(size: int, backend: str, quantization: str | None) -> bool:
    """Returns whether a model is divided among ranks. Raises InvalidRequest for options that do not allow it."""
    integer("tensor_parallel_size", size, 1)
    if size > 1 and backend == "native":
        raise InvalidRequest("tensor_parallel_size divides transformers' modules; use backend='hf' or 'auto'")
    if size > 1 and quantization is not None:
        raise InvalidRequest(f"quantization={quantization!r} needs the native decoder, which runs on one rank")
    return size > 1


def _check_packed(runtime: type[Decoder] | None, quantization: str | None, path: Path) -> None:
    """Raises InvalidRequest if the weights of this model cannot be packed."""
    if quantization is not None:
        raise InvalidRequest(f"weight_format='packed' holds bfloat16 weights; omit quantization={quantization!r}")
    if runtime is None:
        raise InvalidRequest(
            f"weight_format='packed' needs the compiled decoder, which does not run {path}; use 'auto'"
        )


def _runtime(config: Mapping[str, Any], path: Path) -> type[Decoder] | None:
    """Returns our own class for this architecture, or None. Raises ModelLoadError for a malformed config.json."""
    try:
        return next((kind for kind in (Decoder, EncoderDecoder) if kind.supports(config)), None)
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from None


def _check_counts(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Raises ModelLoadError if config.json has more layers or experts than the tensors can hold.

    Modules and lists are built layer by layer before the first tensor is compared, so a huge count would take all
    memory.
    """
    largest = max((len(shapes), *(size for shape in shapes.values() for size in shape)))
    for settings in (config, config.get("text_config") or {}):
        for name, value in settings.items():
            if isinstance(value, int) and value > largest and any(part in name for part in ("layer", "expert")):
                raise ModelLoadError(
                    f"{path / 'config.json'} has {name} = {value}, but the checkpoint holds {len(shapes)} tensors of "
                    f"at most {largest} elements in one dimension; do they belong together?"
                )
