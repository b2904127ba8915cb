"""Tokenizers as bytes: the bytes of every id, ids for given bytes, and one text tracked in two vocabularies."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from foretoken.core.errors import InvalidRequest
from foretoken.models.formats.tokenizer import SPACE, encode

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_INVALID = re.compile("([\udc80-\udcff]+)")  # bytes that are not UTF-8, as decoded by "surrogateescape"
_BLANK = (b" ", b"\n", b"\t", b"\r")


class Pieces:
    """The bytes of a tokenizer's ids, and the tokenizer without its additions (leading space, special tokens).

    Attributes:
        spelled: Bytes by id. None for special tokens and for undefined ids.
        ids: Id by bytes: the lowest, but a whole character before sentencepiece's byte token.
        specials: Contents of special tokens by id.
        special_ids: Ids of special tokens by content.
        lead: Ids that the tokenizer puts before every text (BOS).
        spaced: It puts a space before every text (sentencepiece).

    Args:
        tokenizer: A fast tokenizer.
        vocab_size: Ids from this number on, which its model has no embedding for, are not used. None uses all.
    """

    def __init__(self, tokenizer: Any, vocab_size: int | None = None) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise InvalidRequest(
                f"{type(tokenizer).__name__} has no tokenizer.json, which is needed to read its tokens; "
                "convert it with transformers' fast tokenizers"
            )
        state = json.loads(backend.to_str())
        kinds = {part["type"] for part in _parts(state["decoder"])}
        self._byte_level = "ByteLevel" in kinds
        if not self._byte_level and not kinds & {"Metaspace", "ByteFallback"}:
            raise InvalidRequest(
                f"the bytes of this tokenizer's tokens are not known (decoder: {', '.join(sorted(kinds)) or 'none'}); "
                "byte-level BPE and sentencepiece tokenizers are supported"
            )
        self.spaced = _tamed(state)
        self._encoder = Tokenizer.from_str(json.dumps(state))
        self._encoder.encode_special_tokens = True  # a text that spells a special token is still a text
        self.spelled, self.specials = _spelled(backend, self._byte_level)
        self._limit = min(len(self.spelled), vocab_size or len(self.spelled))
        self.special_ids = {content: token for token, content in self.specials.items() if token < self._limit}
        self.ids: dict[bytes, int] = {}
        for token in sorted(
            range(self._limit), key=lambda i: _BYTE.fullmatch(backend.id_to_token(i) or "") is not None
        ):
            if piece := self.spelled[token]:
                self.ids.setdefault(piece, token)
        known = [token for token in tokenizer("")["input_ids"] if token in self.specials and token < self._limit]
        self.lead = tuple(known)
        end = getattr(tokenizer, "eos_token_id", None)
        end = 0 if end is None or end >= self._limit else end
        self.blank = self.lead[-1] if self.lead else end  # stands for an empty text

    def encode(self, text: bytes) -> list[int]:
        """Returns the ids of ``text``, which may begin or end within a character. Drops bytes without a token."""
        ids: list[int] = []
        for at, part in enumerate(_INVALID.split(text.decode("utf-8", "surrogateescape"))):
            if at % 2 == 0:
                ids += encode(self._encoder, part, add_special_tokens=False) if part else []
                continue
            data = part.encode("utf-8", "surrogateescape")
            if self._byte_level:
                ids += [token.id for token in self._encoder.model.tokenize("".join(_ALPHABET[b] for b in data))]
            else:
                ids += [self.ids[data[i : i + 1]] for i in range(len(data)) if data[i : i + 1] in self.ids]
        return [token for token in ids if token < self._limit] if self._limit < len(self.spelled) else ids

    def piece(self, token: int) -> bytes | None:
        """Returns the bytes of ``token``, None for special and unknown ids."""
        return self.spelled[token] if token < len(self.spelled) else None

    def spell(self, ids: Sequence[int]) -> bytes:
        """Returns the bytes of ``ids``. Special tokens have none."""
        return b"".join(self.piece(token) or b"" for token in ids)


class Script:
    """A text of ``source`` tokens kept as ids of ``own``, extended as the text grows.

    Only the end is tokenized again when text is added, from a token that begins a word, so the cost per token does not
    depend on the length of the text. Special tokens map to those of the same content, or are dropped.
    """

    _KEPT = 16  # ids at the end whose tokenization may still change

    def __init__(self, source: Pieces, own: Pieces, tokens: Sequence[int]) -> None:
        self.source, self.own = source, own
        self.ids = list(own.lead)
        self._settled = len(self.ids)  # ids before this index are final
        self._tail = b""  # bytes of the other ids
        self._begun = False
        self._read, self._gone = 0, 0  # source tokens processed; ids dropped
        self.extend(tokens)

    @property
    def rate(self) -> float:
        """Ids per token of ``source`` so far."""
        return (len(self.ids) + self._gone) / max(1, self._read)

    def extend(self, tokens: Sequence[int]) -> int:
        """Adds tokens of ``source``. Returns the index from which ``ids`` may have changed."""
        start = self._settled
        self._read += len(tokens)
        for token in tokens:
            piece = self.source.piece(token)
            if piece is None:
                self._special(token)
            else:
                self._tail += piece if self._begun else self._first(piece)
                self._begun = True
        self._cut()
        return min(start, len(self.ids))

    def shorten(self, count: int) -> None:
        """Drops all but the last ``count`` ids and the tokenizer's leading ids."""
        lead = list(self.own.lead)
        gone = max(0, len(self.ids) - len(lead) - count)
        self.ids = lead + self.ids[len(lead) + gone :]
        self._gone += gone
        self._settled = max(len(lead), self._settled - gone)
        self._tail = self.own.spell(self.ids[self._settled :])

    def _first(self, piece: bytes) -> bytes:
        if self.source.spaced:
            piece = piece.removeprefix(b" ")
        return b" " + piece if self.own.spaced else piece

    def _special(self, token: int) -> None:
        self.ids[self._settled :] = self.own.encode(self._tail)
        self._tail = b""
        match = self.own.special_ids.get(self.source.specials.get(token, ""))
        if match is not None and not (tuple(self.ids) == self.own.lead and self.ids[-1:] == [match]):
            self.ids.append(match)
        self._settled = len(self.ids)

    def _cut(self) -> None:
        """Tokenizes the tail, and makes final what later text is unlikely to change."""
        self.ids[self._settled :] = self.own.encode(self._tail)
        if not self.ids:
            self.ids, self._settled = [self.own.blank], 1
        if len(self.ids) - self._settled <= 2 * self._KEPT:
            return
        latest = len(self.ids) - self._KEPT
        words = (i for i in range(latest, max(self._settled, latest - 2 * self._KEPT), -1) if self._begins_word(i))
        cut = next(words, latest)
        before = self.own.spell(self.ids[self._settled : cut])
        # A tokenizer that normalizes yields other bytes. Then the tail's ids become final.
        self._settled, self._tail = (
            (cut, self._tail[len(before) :]) if self._tail.startswith(before) else (len(self.ids), b"")
        )

    def _begins_word(self, index: int) -> bool:
        here, before = (self.own.piece(self.ids[i]) or b"" for i in (index, index - 1))
        return here.startswith(_BLANK) and not before.endswith(_BLANK)


def _alphabet() -> list[str]:
    """Returns byte-level BPE's character for each byte: itself if printable, else the next one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(b if b in printable else next(others)) for b in range(256)]


_ALPHABET = _alphabet()
_BYTES = {character: byte for byte, character in enumerate(_ALPHABET)}


def _parts(part: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yields a component of a tokenizer's state, or the members of a sequence of components."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield dict(part)
        return
    for key in ("decoders", "normalizers", "pretokenizers"):
        for inner in part.get(key, ()):
            yield from _parts(inner)


def _tamed(state: dict[str, Any]) -> bool:
    """Removes additions to texts from a tokenizer's state, in place.

    Returns whether the tokenizer put a space before every text.
    """
    spaced = False
    normalizers, cutters = list(_parts(state["normalizer"])), list(_parts(state["pre_tokenizer"]))
    for cutter in cutters:
        if cutter["type"] == "Metaspace":
            spaced |= cutter.get("prepend_scheme", "always") != "never"
            cutter["prepend_scheme"] = "never"
        elif cutter["type"] == "ByteLevel":
            spaced |= bool(cutter.get("add_prefix_space"))
            cutter["add_prefix_space"] = False
    spaced |= any(n["type"] == "Prepend" for n in normalizers)
    kept = [n for n in normalizers if n["type"] != "Prepend" and not _removes_prefix(n)]
    state["normalizer"] = {"type": "Sequence", "normalizers": kept} if kept else None
    state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": cutters} if cutters else None
    state.update(post_processor=None, truncation=None, padding=None)
    return spaced


def _removes_prefix(normalizer: Mapping[str, Any]) -> bool:
    """Returns whether a normalizer removes the space that ``Prepend`` put before a token's text."""
    pattern = normalizer.get("pattern")
    return isinstance(pattern, Mapping) and str(pattern.get("Regex")).startswith(rf"\A{SPACE}")


def _spelled(backend: Tokenizer, byte_level: bool) -> tuple[list[bytes | None], dict[int, str]]:
    """Returns bytes by id, and the special tokens."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    added = backend.get_added_tokens_decoder()
    spelled: list[bytes | None] = [None] * (max(vocabulary.values()) + 1)
    for token, index in vocabulary.items():
        if index in added and (added[index].special or byte_level):
            spelled[index] = None if added[index].special else added[index].content.encode()
        elif byte_level:
            known = all(character in _BYTES for character in token)
            spelled[index] = bytes(_BYTES[character] for character in token) if known else None
        else:
            match = _BYTE.fullmatch(token)
            spelled[index] = bytes([int(match[1], 16)]) if match else token.replace(SPACE, " ").encode()
    return spelled, {index: token.content for index, token in added.items() if token.special}
