"""A tokenizer.json that says it all, read without transformers, whose import takes longer than a small model."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

_SAID = {
    "backend", "is_local", "local_files_only", "tokenizer_class", "model_max_length", "eos_token", "bos_token",
    "unk_token", "pad_token",
}  # fmt: skip
_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")


_LONG = 4096  # characters; fewer are encoded before another thread could take its turn


def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Returns the ids of ``text``. Other threads run meanwhile where it is long.

    ``Tokenizer.encode`` holds the GIL from beginning to end, for seconds with megabytes of text; ``encode_batch_fast``
    gives it free. The ids are the same.
    """
    if len(text) < _LONG:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
    else:
        ids = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


class PlainTokenizer:
    """Encodes and decodes as ``transformers.PreTrainedTokenizerFast`` on the same folder does.

    Whatever else is asked of it, chat templates or padding, is answered by that class, loaded when it is first needed.
    """

    def __init__(self, path: Path) -> None:
        """``path`` is a folder that ``is_plain`` accepts. tokenizers raises a bare Exception for a broken file."""
        self._path = path
        self._fast = Tokenizer.from_file(str(path / "tokenizer.json"))
        self._fast.no_truncation()
        self._fast.no_padding()
        settings = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
        self.eos_token: str | None = settings.get("eos_token")
        self.eos_token_id: int | None = None if self.eos_token is None else self._fast.token_to_id(self.eos_token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return encode(self._fast, text, add_special_tokens)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        plain = isinstance(token_ids, list | tuple) and all(isinstance(token, int) for token in token_ids)
        if options or not plain:
            return self.full.decode(token_ids, skip_special_tokens=skip_special_tokens, **options)
        return self._fast.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def get_vocab(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self._fast.get_vocab(with_added_tokens=True)
        return vocabulary

    def __call__(self, text: Any, **options: Any) -> Any:
        if isinstance(text, str) and options.keys() <= {"add_special_tokens"}:
            return {"input_ids": self.encode(text, **options)}
        return self.full(text, **options)

    def __len__(self) -> int:
        return int(self._fast.get_vocab_size(with_added_tokens=True))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.full, name)

    @cached_property
    def full(self) -> Any:
        """transformers' tokenizer."""
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(self._path)


def is_plain(path: Path, config: Any) -> bool:
    """Whether tokenizer.json and a few names of special tokens are all there is. config: tokenizer_config.json's."""
    files = ("special_tokens_map.json", "added_tokens.json")  # a chat template is rendered by transformers anyway
    return (
        isinstance(config, dict)
        and config.get("tokenizer_class") in _CLASSES
        and _SAID.issuperset(config)
        and all(isinstance(config[key], str | None) for key in config if key.endswith("_token"))
        and not any((path / name).exists() for name in files)
    )
