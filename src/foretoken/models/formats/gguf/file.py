"""A GGUF file as a checkpoint: configuration, special tokens, weights and tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from foretoken.models.formats.gguf.families import config_of
from foretoken.models.formats.gguf.header import Header
from foretoken.models.formats.gguf.tokenizer import gguf_tokenizer, special_ids, token_ids
from foretoken.models.formats.gguf.weights import GGUFWeights
from foretoken.models.formats.tokenizer import PlainTokenizer


class GGUFCheckpoint:
    """What a GGUF file holds, by the names of a checkpoint's files. Its header is read once and kept.

    Raises:
        ModelLoadError: The file is damaged, or holds what is not supported.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._header = Header.read(path)

    def config(self) -> dict[str, Any]:
        """Returns the content of config.json that the metadata stand for."""
        return config_of(self._header)

    def special_ids(self) -> dict[str, Any]:
        """Returns the ids of special tokens by their names in generation_config.json."""
        return special_ids(self._header)

    def weights(self) -> GGUFWeights:
        """Returns the tensors, with llama.cpp's changes undone."""
        return GGUFWeights(self._path)

    def tokenizer(self) -> PlainTokenizer:
        """Returns the tokenizer, with special tokens and chat template."""
        return gguf_tokenizer(self._header)

    def token_ids(self) -> dict[str, int] | None:
        """Returns the id of every token; None if the file has no vocabulary."""
        return token_ids(self._header)
