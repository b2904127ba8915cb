"""Quantizes a checkpoint: reads it layer by layer, rounds, and writes another one atomically, or into the cache."""

import hashlib
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.core.artifacts import GGUF, MODEL, Destination, kind_of
from foretoken.core.errors import InvalidRequest
from foretoken.core.files import cache_folder, write_json
from foretoken.models.decoder import Decoder
from foretoken.models.families.architecture import Architecture
from foretoken.models.formats.checkpoint import (
    load_config,
    load_generation_settings,
    load_tokenizer,
    open_weights,
    resolve,
)
from foretoken.models.formats.gguf import is_gguf, parts_of
from foretoken.models.formats.memory import give_back
from foretoken.models.formats.prequantized import check_prequantized, unpacked
from foretoken.models.seq2seq import EncoderDecoder
from foretoken.quantize.calibration import Calibration, Losses, calibrates
from foretoken.quantize.file import Described, FileWriter, planned
from foretoken.quantize.folder import FolderWriter, copy_files, exported_config, save_tokenizer
from foretoken.quantize.rounding import Rounding, Scheme

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LAYER = re.compile(r"model\.layers\.([0-9]+)\.")
_HEADS = re.compile(r"fc\.weight|(medusa_heads?\.)?[0-9]+\.0\.(linear\.)?weight|blocks\.0\.layers\.0\.weight")


@dataclass(frozen=True, slots=True)
class SourceCheckpoint:
    """A checkpoint."""

    path: Path  # folder or GGUF file
    config: dict[str, Any]  # config.json, without a quantization
    tensors: Mapping[str, Tensor]  # tensors by name, read on access; quantized ones as floats
    shapes: dict[str, tuple[int, ...]]  # their shapes, in the order of writing

    @staticmethod
    def open(path: Path, scheme: Scheme) -> "SourceCheckpoint":
        """Opens a checkpoint. Raises InvalidRequest if the scheme does not fit it."""
        config = load_config(path)
        kind = config.get("model_type")
        if check_prequantized(config):
            raise InvalidRequest(f"{path} is int8 already; quantize the checkpoint that it was made from")
        tensors = unpacked(open_weights(path), config)
        if scheme.quantizes and tensors.quantized:
            raise InvalidRequest(
                f"{path} is quantized already, and rounding twice loses more than once; quantize the checkpoint that "
                "it was made from, or write it as bfloat16 first"
            )
        heads = any(_HEADS.fullmatch(name) for name in tensors)
        if not heads and not Decoder.supports(config) and not EncoderDecoder.supports(config):
            raise InvalidRequest(
                f"{path} (type {kind!r}) is neither a model that the native runtime computes nor EAGLE or Medusa heads"
            )
        if Decoder.supports(config) and Architecture.of(config).recurrence is not None:
            raise InvalidRequest(
                f"{path} (type {kind!r}) has recurrent layers, which are not rounded here; quantization='int8' or "
                "'int4' rounds them on loading"
            )
        if Decoder.supports(config) and not _by_llamas_names(config):
            raise InvalidRequest(
                f"{path} (type {kind!r}) has other names or layouts of tensors than Llama, which are not rounded here; "
                "quantization='int8' or 'int4' rounds them on loading"
            )
        if is_gguf(path) and _stacked(Architecture.of(config)):
            raise InvalidRequest(
                f"{path} (type {kind!r}) has stacks of experts or of heads, which no folder has; quantize the "
                "checkpoint that it was made from, or run the file as it is"
            )
        if heads and scheme.gguf:
            raise InvalidRequest(f"{path} holds drafting heads, for which GGUF has no form here; choose int8 or int4")
        shapes = dict(sorted(tensors.shapes.items(), key=lambda item: _order_key(item[0])))
        if config.get("tie_word_embeddings") and EMBEDDING in shapes:
            shapes.pop(HEAD, None)  # a copy of the embedding
        return SourceCheckpoint(path, {k: v for k, v in config.items() if k != "quantization_config"}, tensors, shapes)

    @property
    def tied(self) -> bool:
        """Whether the embedding is the vocabulary head as well."""
        return EMBEDDING in self.shapes and HEAD not in self.shapes

    def parts(self) -> Iterator[tuple[int | None, dict[str, Tensor]]]:
        """Yields the tensors of each layer with its index, and every other tensor alone with None."""
        for key, names in groupby(self.shapes, key=lambda name: _order_key(name)[:2]):
            yield key[1] if key[0] == 1 else None, {name: self.tensors[name] for name in names}

    def calibration(self, text: str, scheme: Scheme) -> Calibration:
        """Tokenizes a text. Raises InvalidRequest if calibration cannot improve the scheme."""
        if not scheme.quantizes:
            raise InvalidRequest(f"scheme {scheme.name!r} rounds no weights, so a calibration text has no effect")
        if EMBEDDING not in self.shapes or not Decoder.supports(self.config) or not calibrates(self.config):
            raise InvalidRequest(
                "only decoders with layers like those of Llama and Gemma are calibrated; leave --calibration out for "
                "this checkpoint"
            )
        tokens = load_tokenizer(self.path).encode(text, add_special_tokens=False)
        return Calibration(Architecture.of(self.config), torch.tensor(tokens, dtype=torch.long))

    def described(self) -> Described:
        """Returns its description in a GGUF file. Raises InvalidRequest if GGUF has no form for it."""
        ends = next((s.eos_token_id for s in load_generation_settings(self.path) if s.eos_token_id), [])
        title = self.path.stem if is_gguf(self.path) else self.path.name
        return Described.of(self.config, load_tokenizer(self.path), ends, title)


def _by_llamas_names(config: Mapping[str, Any]) -> bool:
    """Returns whether the matrices of a decoder are [out, in] under Llama's prefixes."""
    names = Architecture.of(config).names
    return (names.base, names.layer, names.embedding, names.transposed) == (
        "model.",
        "layers.{}.",
        "embed_tokens",
        False,
    )


def _stacked(a: Architecture) -> bool:
    """Returns whether a GGUF file has tensors of this architecture in a layout that checkpoints do not have."""
    return a.has_experts or a.latent is not None


def _order_key(name: str) -> tuple[int, Any, str]:
    """Returns the sort key of a tensor: the embedding, the layers, the rest."""
    if name == EMBEDDING:
        return 0, name, name
    layer = _LAYER.match(name)
    return (1, int(layer[1]), name) if layer else (2, name, name)


Progress = Callable[[float, str], None]
Put = Callable[[str, Tensor, Rounding], Tensor]
"""Writes a tensor by name, and returns its values as they are read back."""


@dataclass(frozen=True, slots=True)
class QuantizedCheckpoint:
    """The written checkpoint."""

    path: Path  # the folder or file
    scheme: str  # the requested scheme
    bytes_before: int  # bytes of the weights that were read
    bytes_after: int  # bytes of the weights that were written
    seconds: float  # duration
    losses: Losses | None = None  # on held-out windows of the calibration text; None without such a text


@torch.inference_mode()
def quantize_checkpoint(
    source: str | Path,
    out: str | Path,
    scheme: str,
    calibration: str | None = None,
    lm_head: bool = False,
    force: bool = False,
    gguf_file: str | None = None,
    progress: Progress = lambda fraction, task: None,
) -> QuantizedCheckpoint:
    """Writes a checkpoint in another scheme, with no more than a layer of it in memory.

    Args:
        source: a folder, GGUF file or hub id: a decoder or encoder-decoder that the native runtime computes, or
            drafting heads (EAGLE, Medusa).
        out: the folder to write or, for the names of GGUF, the file.
        scheme: ``int4`` (groups of 32), ``int4-g32``, ``-g64``, ``-g128`` or ``int8`` write a compressed-tensors
            folder; ``Q4_K_M``, ``Q8_0`` and so on a GGUF file, ``F16`` and ``BF16`` one of floats; ``bfloat16``,
            ``float16`` and ``float32`` a folder of floats.
        calibration: text like the model's use, for rounding by GPTQ; None rounds each weight to the nearest code.
        lm_head: whether the vocabulary head of a folder is quantized as well. GGUF files always quantize it.
        force: whether ``out`` is replaced if it holds an artifact of the same kind.
        gguf_file: name of a GGUF file in the folder or repository ``source``.
        progress: is called with the finished fraction, from 0 to 1, and the current task.

    Raises:
        InvalidRequest: the scheme is unknown or does not fit the model, or ``out`` must not be written.
        ModelLoadError: the source cannot be read.
        WriteError: the result cannot be written.
    """
    started = time.perf_counter()
    chosen = Scheme.of(scheme)
    path = resolve(source, gguf_file)
    target = _destination(Path(out), path, chosen, force)
    model = SourceCheckpoint.open(path, chosen)
    text = None if calibration is None else model.calibration(calibration, chosen)
    destination = target.file() if chosen.gguf else target.folder()
    with destination as partial, _writer(model, partial, chosen, lm_head) as put:
        losses = stream(model, put, text, lm_head and chosen.quantizer is not None, progress)
    seconds = time.perf_counter() - started
    return QuantizedCheckpoint(
        target.path, chosen.name, _weight_bytes(path), _weight_bytes(target.path), seconds, losses
    )


@contextmanager
def _writer(model: SourceCheckpoint, out: Path, scheme: Scheme, lm_head: bool) -> Iterator[Put]:
    """Yields a function that writes a tensor; all of them must be written in their order."""
    if scheme.gguf:
        described = model.described()
        with tempfile.TemporaryDirectory() as scratch:
            described.check(Path(scratch), planned(described, scheme.name, model.shapes))
        with closing(FileWriter(out, described, scheme.name, model.shapes)) as file:
            yield file.put
        return
    config = model.config
    if is_gguf(model.path):
        config = exported_config(config, model.path, model.shapes)
        save_tokenizer(model.path, out)
    else:
        copy_files(model.path, out)
    write_json(out / "provenance.json", {"quantized_from": model.path.name, "scheme": scheme.name})
    folder = FolderWriter(out, config, scheme, lm_head)
    yield folder.put
    folder.finish()


@torch.inference_mode()
def stream(
    model: SourceCheckpoint,
    put: Put,
    text: Calibration | None,
    lm_head: bool,
    progress: Progress = lambda fraction, task: None,
) -> Losses | None:
    """Writes all tensors, and passes the text through each layer.

    Args:
        put: takes a tensor, and returns the values that the next layers see.
        lm_head: whether a tied head is written besides the embedding.
        progress: see ``quantize_checkpoint``.

    Returns:
        The text's losses; None without a text.
    """
    before: dict[str, Tensor] = {}
    after: dict[str, Tensor] = {}
    done = 0
    for layer, tensors in model.parts():
        curvatures = text.curvatures(layer, tensors) if text is not None and layer is not None else {}
        values = {name: put(name, tensor, Rounding(curvatures.get(name))) for name, tensor in tensors.items()}
        if lm_head and model.tied and EMBEDDING in tensors:
            values[HEAD] = put(HEAD, tensors[EMBEDDING], Rounding())
        if text is not None and layer is not None:
            text.advance(layer, values)
        elif text is not None:
            before |= tensors
            after |= values
            if EMBEDDING in tensors:
                text.begin(tensors[EMBEDDING], values[EMBEDDING])
        done += len(tensors)
        progress(done / len(model.shapes), next(iter(tensors)) if layer is None else f"layer {layer}")
        del tensors, values
        give_back()
    return None if text is None else text.losses(before, after)


def _destination(out: Path, source: Path, scheme: Scheme, force: bool) -> Destination:
    """Returns the artifact to write. Raises InvalidRequest if it may not be written."""
    if is_gguf(out) != scheme.gguf:
        kind = "a file whose name ends with .gguf" if scheme.gguf else "a folder"
        raise InvalidRequest(f"scheme {scheme.name} is written to {kind}, and {out.name!r} is not the name of one")
    source_kind = kind_of(source)
    kind = GGUF if scheme.gguf else MODEL if source.is_file() or source_kind is None else source_kind
    return Destination.checked(out, kind, parts_of(source), force)


def _weight_bytes(path: Path) -> int:
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)


def checkpoint_folder(path: Path) -> Path:
    """Returns the folder of a checkpoint; for a GGUF file the cached folder of its model in bfloat16.

    Raises:
        InvalidRequest: A folder has no form for the model of the file.
        ModelLoadError: The file cannot be read.
        WriteError: The folder cannot be written.
    """
    if not is_gguf(path):
        return path
    identity = [f"{part.resolve()} {part.stat().st_size} {part.stat().st_mtime_ns}" for part in parts_of(path)]
    key = hashlib.sha256("\n".join(identity).encode()).hexdigest()[:12]
    folder = cache_folder() / "folders" / key / path.stem
    if not folder.exists():
        try:
            quantize_checkpoint(path, folder, "bfloat16")
        except InvalidRequest:
            if not folder.exists():  # another process may have written it since
                raise
    return folder
