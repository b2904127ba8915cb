"""The checkpoint that is quantized, and its tensors in the order of writing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.core.errors import InvalidRequest
from foretoken.models.decoder import Decoder
from foretoken.models.families.architecture import Architecture
from foretoken.models.formats.checkpoint import (
    load_config,
    load_generation_settings,
    load_tokenizer,
    open_weights,
)
from foretoken.models.formats.gguf import is_gguf
from foretoken.models.formats.prequantized import check_prequantized, unpacked
from foretoken.models.seq2seq.model import EncoderDecoder
from foretoken.quantize.calibration import Calibration, calibrates
from foretoken.quantize.file import Described
from foretoken.quantize.rounding import Scheme

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LAYER = re.compile(r"model\.layers\.([0-9]+)\.")
_HEADS = re.compile(r"fc\.weight|(medusa_heads?\.)?[0-9]+\.0\.(linear\.)?weight|blocks\.0\.layers\.0\.weight")


@dataclass(frozen=True, slots=True)
class SourceCheckpoint:
    """A checkpoint.

    Attributes:
        path: folder or GGUF file.
        config: config.json, without a quantization.
        tensors: tensors by name, read on access; quantized ones as floats.
        shapes: their shapes, in the order of writing.
    """

    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, Tensor]
    shapes: dict[str, tuple[int, ...]]

    @staticmethod
    def open(path: Path, scheme: Scheme) -> SourceCheckpoint:
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
