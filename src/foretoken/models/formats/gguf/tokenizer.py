"""The tokenizer that a GGUF file's metadata describes.

Two kinds are built: byte-level BPE (``gpt2``), whose pre-tokenizer the file names, and SentencePiece BPE (``llama``),
whose merges follow from the tokens' scores, or are stored (``gemma4``). The result tokenizes as the original
checkpoint's tokenizer.json does, which in a few cases differs from llama.cpp (Qwen normalizes to NFC).

The pre-tokenizers' patterns are those of the original tokenizer.json files, written for the regular expressions of
``tokenizers``.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

from foretoken.core.errors import ModelLoadError
from foretoken.core.schema import shortened
from foretoken.models.formats.gguf.header import Header
from foretoken.models.formats.tokenizer import SPACE, PlainTokenizer


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """A rule for splitting text."""

    patterns: tuple[str, ...] = ()  # applied in order, each to the results of the previous one
    gpt2: bool = False  # whether GPT-2's pattern follows them
    nfc: bool = False  # whether text is normalized to NFC first
    ignore_merges: bool = False  # whether a piece that is a token stays whole, even if no merges lead to it
    bos: bool = False  # whether texts begin with the start token, by default


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_SLASHES}"
_GPT4O = rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_SLASHES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_RUNS = "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
_JAIS2 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_RUNS}|\s{{1}}"
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")

_llama3 = PreTokenizer((_LLAMA3,), ignore_merges=True, bos=True)
PRE_TOKENIZERS = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4"), PreTokenizer(gpt2=True)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), PreTokenizer((r"\p{N}",), gpt2=True)
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2"), _llama3),
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "dbrx": PreTokenizer((_LLAMA3,)),
    "qwen2": PreTokenizer((_QWEN2,), nfc=True),
    "deepseek-r1-qwen": PreTokenizer((_QWEN2,)),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), PreTokenizer((_GPT4O,))),
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    "chatglm-bpe": PreTokenizer((_LLAMA3,)),
    **dict.fromkeys(("glm4", "glm5"), PreTokenizer((_LLAMA3,), ignore_merges=True)),
    "seed-coder": PreTokenizer((_SEED,)),
    "jais-2": PreTokenizer((_JAIS2,)),
    "bloom": PreTokenizer((r" ?[^(\s|.,!?…。，、।۔،)]+",)),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), PreTokenizer(_DEEPSEEK_V3)),
}


_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5  # types of tokens
_NONE = 2**32 - 1  # id of an absent special token
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_NOT_STRIPPED = ("<unk>", "<s>", "<|endoftext|>")  # Phi 3's other special tokens remove the spaces after them


# Texts of the control tokens that end a sequence, a turn or a message. Files of many chat models name only ``eos``,
# so llama.cpp recognises these tokens by their texts.
ENDS = {"<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<｜end▁of▁sentence｜>"}
ENDS |= {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>", "<EOT>", "_<EOT>", "[EOT]"}
ENDS |= {"<end_of_utterance>", "<|eom_id|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<|tool_response>"}
ENDS |= {"[e~["}
# Models with these tokens write several messages a turn, each of which ends with ``<|end|>``.
_ENDS_OF_CHANNELS = ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|calls|>"})


@lru_cache(maxsize=2)  # a target and a draft model
def special_ids(header: Header) -> dict[str, Any]:
    """Returns the special token ids as generation_config.json has them.

    A sequence ends with the tokens that the file names as the end of a sequence, a turn (``eot``) or a message
    (``eom``), and with control tokens of the same texts.
    """
    ends = [special_id(header, role) for role in ("eos", "eot", "eom")]
    if header.metadata.get("tokenizer.ggml.tokens") is not None:
        ends += _Vocabulary.read(header).ends()
    return {
        "eos_token_id": list(dict.fromkeys(i for i in ends if i is not None)),
        "bos_token_id": special_id(header, "bos"),
    }


def special_id(header: Header, role: str) -> Any:
    """Returns the id of a special token by its role, such as ``eos``, as the file stores it; None for no token."""
    stored = header.metadata.get(f"tokenizer.ggml.{role}_token_id")
    return None if stored in (_NONE, -1) else stored


def gguf_tokenizer(header: Header) -> PlainTokenizer:
    """Returns the tokenizer of a GGUF file.

    Raises:
        ModelLoadError: the file has no tokenizer, or one of an unknown kind.
        Exception: its vocabulary is damaged; tokenizers raises no narrower class.
    """
    special_ids(header)  # reads and caches the vocabulary before the weights are read
    vocabulary = _Vocabulary.read(header)
    end = vocabulary.token(header, "eos")
    return PlainTokenizer(_built(header, vocabulary), end, partial(_transformers_tokenizer, header.path))


def token_ids(header: Header) -> dict[str, int] | None:
    """Returns the id of every token, as the tokenizer has it; None if the file has no vocabulary.

    The file's rule for splitting text is not needed.
    """
    if header.array("tokenizer.ggml.tokens") is None:
        return None
    vocabulary = _Vocabulary.read(header)
    byte_level = header.metadata.get("tokenizer.ggml.model") == "gpt2"
    return (vocabulary if byte_level else vocabulary.spelled()).ids()


def _built(header: Header, vocabulary: "_Vocabulary") -> Tokenizer:
    """Returns the file's tokenizer. Raises ModelLoadError for one of an unknown kind."""
    kind = header.metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        return _byte_level(vocabulary, header)
    if kind in ("llama", "gemma4"):  # Gemma 4's has merges
        return _sentencepiece(vocabulary, header)
    raise ModelLoadError(
        f"{header.path} has a tokenizer of the kind {shortened(kind)}; known are 'gpt2', 'llama' and 'gemma4'; pass "
        "tokenizer= with the folder or hub id of the original checkpoint"
    )


def _transformers_tokenizer(path: Path) -> Any:
    """Returns a file's tokenizer as a class of transformers."""
    from transformers import PreTrainedTokenizerFast

    header = Header.read(path)
    vocabulary = _Vocabulary.read(header)
    names = {name: vocabulary.token(header, key) for name, key in _SPECIAL.items()}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_built(header, vocabulary),
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in names.items() if token is not None},
    )
    template = header.metadata.get("tokenizer.chat_template")
    tokenizer.chat_template = template if isinstance(template, str) else None
    return tokenizer


class _Vocabulary:
    """The tokens of a file with their types.

    Attributes:
        tokens: texts by id.
        kinds: types by id.
    """

    def __init__(self, tokens: Sequence[str], kinds: Sequence[int]) -> None:
        self.tokens = tokens
        self.kinds = kinds

    @staticmethod
    def read(header: Header) -> "_Vocabulary":
        """Reads the vocabulary. Raises ModelLoadError if there is none."""
        tokens = header.array("tokenizer.ggml.tokens")
        if not tokens or not all(isinstance(token, str) for token in tokens):
            raise ModelLoadError(f"{header.path} has no vocabulary; pass tokenizer= with the original checkpoint")
        kinds = header.array("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
        if len(kinds) != len(tokens):
            raise ModelLoadError(f"{header.path} has {len(tokens)} tokens, but the types of {len(kinds)}")
        return _Vocabulary(tokens, kinds)

    def ids(self) -> dict[str, int]:
        """Returns the id of every token; rows that only pad the embedding have none."""
        padding = {i for i, k in enumerate(self.kinds) if k == _UNUSED and self.tokens[i] == f"[PAD{i}]"}
        return {token: i for i, token in enumerate(self.tokens) if i not in padding}

    def spelled(self) -> "_Vocabulary":
        """Returns the vocabulary with the spaces of user-defined tokens as SentencePiece spells them.

        llama.cpp stores them as spaces.
        """
        spelled = [
            token.replace(" ", SPACE) if kind == _USER_DEFINED else token
            for token, kind in zip(self.tokens, self.kinds, strict=True)
        ]
        return _Vocabulary(spelled, self.kinds)

    def ends(self) -> list[int]:
        """Returns the ids of control tokens with the text of an end of a sequence, a turn or a message."""
        tokens = self.of_kind(_CONTROL)
        texts = ENDS.intersection(tokens)
        if any(texts >= ends for ends in _ENDS_OF_CHANNELS):
            texts.discard("<|end|>")
        return [
            i
            for i, (token, k) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if k == _CONTROL and token in texts
        ]

    def of_kind(self, *kinds: int) -> list[str]:
        """Returns the texts of the tokens of these types that are not empty."""
        return [token for token, kind in zip(self.tokens, self.kinds, strict=True) if kind in kinds and token]

    def add_to(self, tokenizer: Tokenizer, strips: bool = False, normalized: bool = False) -> None:
        """Adds the tokens that are never split: control and unknown ones as special tokens, and user-defined ones.

        Args:
            tokenizer: has all tokens in its model.
            strips: whether special tokens remove the spaces after them.
            normalized: whether user-defined tokens are searched in the normalized text.
        """
        control = self.of_kind(_UNKNOWN, _CONTROL)
        stripping = {token for token in control if strips and token not in _NOT_STRIPPED}
        tokenizer.add_special_tokens([AddedToken(t, rstrip=t in stripping, normalized=False) for t in control])
        tokenizer.add_tokens([AddedToken(token, normalized=normalized) for token in self.of_kind(_USER_DEFINED)])

    def token(self, header: Header, key: str) -> str | None:
        """Returns the text of a special token by its role, such as ``eos``; None if the file has no such token."""
        i = special_id(header, key)
        if i is None:
            return None
        if not isinstance(i, int) or not 0 <= i < len(self.tokens):
            raise ModelLoadError(f"{header.path} has {key}_token_id = {shortened(i)} of {len(self.tokens)} tokens")
        return self.tokens[i]


def _byte_level(vocabulary: _Vocabulary, header: Header) -> Tokenizer:
    name = header.metadata.get("tokenizer.ggml.pre")
    pre = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if pre is None:
        raise ModelLoadError(
            f"{header.path} splits text by the rule {shortened(name)}, which is not known; pass tokenizer= with the "
            "folder or hub id of the original checkpoint"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in header.array("tokenizer.ggml.merges") or []]
    tokenizer = _with_parts(
        normalizer={"type": "NFC"} if pre.nfc else None,
        pre_tokenizer=splits(pre),
        post_processor=_template(vocabulary, header, pre.bos),
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    )
    tokenizer.model = BPE(vocabulary.ids(), merges, ignore_merges=pre.ignore_merges)
    vocabulary.add_to(tokenizer)
    return tokenizer


def splits(pre: PreTokenizer) -> dict[str, Any]:
    """Returns the pre-tokenizer of a rule, as tokenizer.json has it."""
    splits: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in pre.patterns
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": pre.gpt2}
    return {"type": "Sequence", "pretokenizers": [*splits, byte_level]}


def _sentencepiece(vocabulary: _Vocabulary, header: Header) -> Tokenizer:
    vocabulary = vocabulary.spelled()
    scores = header.array("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(vocabulary.tokens):
        scores = [-float(i) for i in range(len(vocabulary.tokens))]
    stored = header.array("tokenizer.ggml.merges")
    merges = [tuple(merge.split(" ", 1)) for merge in stored] if stored else list(_merges(vocabulary, scores))
    prefix = header.metadata.get("tokenizer.ggml.add_space_prefix", True) is not False
    decoders = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []),
    ]
    tokenizer = _with_parts(
        normalizer={"type": "Sequence", "normalizers": list(_spaces(vocabulary, prefix))},
        pre_tokenizer=None,
        post_processor=_template(vocabulary, header, True),
        decoder={"type": "Sequence", "decoders": decoders},
    )
    unknown = vocabulary.token(header, "unknown")
    tokenizer.model = BPE(vocabulary.ids(), merges, byte_fallback=True, fuse_unk=True, unk_token=unknown)
    vocabulary.add_to(tokenizer, strips=header.metadata.get("general.architecture") == "phi3", normalized=True)
    return tokenizer


def _spaces(vocabulary: _Vocabulary, prefix: bool) -> Iterator[dict[str, Any]]:
    """Yields the normalizers that spell spaces, and the one before a text, as SentencePiece does.

    User-defined tokens are searched in the normalized text, because SentencePiece does not distinguish spaces from
    U+2581. ``tokenizers`` normalizes their texts by the same rules, so these must not put a space before them.
    """
    if prefix:
        yield {"type": "Prepend", "prepend": SPACE}
    yield {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    if prefix and (user_defined := vocabulary.of_kind(_USER_DEFINED)):
        pattern = rf"\A{SPACE}(?=(?:{'|'.join(map(re.escape, user_defined))})\z)"
        yield {"type": "Replace", "pattern": {"Regex": pattern}, "content": ""}


def _merges(vocabulary: _Vocabulary, scores: Sequence[float]) -> Iterator[tuple[str, str]]:
    """Yields the pairs of tokens that SentencePiece merges, in descending order of the result's score.

    Only normal tokens are merged: user-defined ones are split off before.
    """
    pieces = {i: token for i, token in enumerate(vocabulary.tokens) if vocabulary.kinds[i] == _NORMAL}
    texts = set(pieces.values())
    for i in sorted(pieces, key=lambda i: -scores[i]):
        token = pieces[i]
        for at in range(len(token) - 1, 0, -1):
            left, right = token[:at], token[at:]
            if left in texts and right in texts:
                yield left, right


def _template(vocabulary: _Vocabulary, header: Header, bos: bool) -> dict[str, Any] | None:
    """Returns the post-processor that adds special tokens to a text; None if it adds none.

    bos: whether texts begin with the start token by default.
    """
    flags = {"bos": header.metadata.get("tokenizer.ggml.add_bos_token", bos)}
    flags["eos"] = header.metadata.get("tokenizer.ggml.add_eos_token", False)
    names = {key: vocabulary.token(header, key) for key, flag in flags.items() if flag is True}
    special = {
        key: {"id": token, "ids": [header.metadata[f"tokenizer.ggml.{key}_token_id"]], "tokens": [token]}
        for key, token in names.items()
        if token is not None
    }
    if not special:
        return None

    def sequence(name: str, kind: int) -> list[dict[str, Any]]:
        parts: dict[str, dict[str, Any]] = {
            key: {"SpecialToken": {"id": entry["id"], "type_id": kind}} for key, entry in special.items()
        }
        text = {"Sequence": {"id": name, "type_id": kind}}
        return [part for part in (parts.get("bos"), text, parts.get("eos")) if part is not None]

    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": [*sequence("A", 0), *sequence("B", 1)],
        "special_tokens": {entry["id"]: entry for entry in special.values()},
    }


def _with_parts(**parts: Any) -> Tokenizer:
    """Returns a tokenizer with an empty vocabulary and these sections of tokenizer.json."""
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    return Tokenizer.from_str(json.dumps({"version": "1.0", "added_tokens": [], **parts, "model": empty}))
