"""A tokenizer that needs no transformers, whose import takes longer than loading a small model."""

import json
import re
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from foretoken.core.errors import ModelLoadError

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # stands for a space in SentencePiece

# Keys of tokenizer_config.json that PlainTokenizer handles, or that do not change how it encodes.
_KEYS = {"backend", "is_local", "local_files_only", "tokenizer_class", "model_max_length"}
_KEYS |= {"eos_token", "bos_token", "unk_token", "pad_token"}
_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_NOT_UTF8 = re.compile("[\udc80-\udcff]")  # bytes that the handler "surrogateescape" could not decode
_LONG = 4096  # characters; shorter texts take less time than another thread's wait for the GIL


def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Returns the token ids of ``text``, without blocking other threads if it is long.

    ``Tokenizer.encode`` holds the GIL throughout, for seconds with megabytes of text; ``encode_batch_fast`` releases
    it. The ids are the same.
    """
    if len(text) < _LONG:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
    else:
        ids = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


class PlainTokenizer:
    """Encodes and decodes as ``transformers.PreTrainedTokenizerFast`` of the same tokenizer does.

    Everything else, such as chat templates and padding, is delegated to that class, which is loaded on first use.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token: str | None, full: Callable[[], Any]) -> None:
        """Wraps a tokenizer.

        Args:
            tokenizer: encodes and decodes; its truncation and padding are switched off.
            eos_token: the end of a sequence.
            full: builds the tokenizer of transformers. Can be pickled, as the server's side process needs it.
        """
        self._fast = tokenizer
        self._fast.no_truncation()
        self._fast.no_padding()
        self._build = full
        self.eos_token = eos_token
        self.eos_token_id: int | None = None if eos_token is None else self._fast.token_to_id(eos_token)

    @staticmethod
    def load(path: Path) -> "PlainTokenizer":
        """Loads tokenizer.json.

        Args:
            path: a folder that ``is_plain`` accepts.

        Raises:
            Exception: the file is broken; tokenizers raises no narrower class.
        """
        settings = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
        full = partial(_from_folder, path)
        return PlainTokenizer(Tokenizer.from_file(str(path / "tokenizer.json")), settings.get("eos_token"), full)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return encode(self._fast, text, add_special_tokens)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        """Returns the text of token ids; ``options`` are those of transformers."""
        try:
            text = None if options else self._fast.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except TypeError:  # no sequence of integers
            text = None
        if text is None:
            return self.full.decode(token_ids, skip_special_tokens=skip_special_tokens, **options)
        if _REPLACEMENT not in text or "ByteFallback" not in self._decoders:
            return text
        special = self._special_ids if skip_special_tokens else ()
        return self._with_bytes([token for token in token_ids if token not in special])

    def _with_bytes(self, token_ids: list[int]) -> str:
        """Returns the text of tokens and bytes as SentencePiece does: each byte that is not UTF-8 becomes U+FFFD.

        ``tokenizers`` replaces all bytes of a run, even those of complete characters.
        """
        data = bytearray()
        for token in filter(None, map(self._fast.id_to_token, token_ids)):
            byte = _BYTE.fullmatch(token)
            data += bytes.fromhex(byte[1]) if byte else token.replace(SPACE, " ").encode()
        text = _NOT_UTF8.sub(_REPLACEMENT, data.decode("utf-8", "surrogateescape"))
        return text.removeprefix(" ") if "Strip" in self._decoders else text

    @cached_property
    def _decoders(self) -> set[str]:
        """The types of the decoder's steps."""
        state = json.loads(self._fast.decoder.__getstate__()) if self._fast.decoder is not None else {}
        return {step["type"] for step in state.get("decoders", [state] if state else [])}

    @cached_property
    def _special_ids(self) -> set[int]:
        return {i for i, token in self._fast.get_added_tokens_decoder().items() if token.special}

    def get_vocab(self) -> dict[str, int]:
        """Returns the id of every token, added tokens included."""
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

    @property
    def backend_tokenizer(self) -> Tokenizer:
        return self._fast

    @cached_property
    def full(self) -> Any:
        """The tokenizer of transformers. Raises ModelLoadError if one of its files is broken."""
        try:
            return self._build()
        except Exception as error:  # transformers raises bare exceptions for broken files
            raise ModelLoadError(f"the tokenizer cannot be loaded with transformers ({error})") from error


def _from_folder(path: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(path)


def is_plain(path: Path, config: Any) -> bool:
    """Returns whether ``PlainTokenizer`` tokenizes as transformers does.

    True if the folder has only files and settings that are known not to change the ids.
    config: the content of tokenizer_config.json.
    """
    files = ("special_tokens_map.json", "added_tokens.json")  # chat templates are left to transformers
    return (
        isinstance(config, dict)
        and config.get("tokenizer_class") in _CLASSES
        and _KEYS.issuperset(config)
        and all(isinstance(config[key], str | None) for key in config if key.endswith("_token"))
        and not any((path / name).exists() for name in files)
    )
