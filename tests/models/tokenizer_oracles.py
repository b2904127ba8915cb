"""Reference tokenizers, built from the metadata of GGUF files without our code, and strings to compare them on."""

import random
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from gguf import TokenType
from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from foretoken.models.formats.gguf.header import Header

SPACES = (" ", "\N{LOWER ONE EIGHTH BLOCK}")
REPEATED = (*SPACES, "\t", "\n", "\r\n", " \n", "\n ", "\t ", "=", "-", "*", "a", "ha", "0", "é", "한", "🙂")
WORDS = (
    *("a", "Z", "é", "e\u0301", "한국어", "漢字", "かな", "Привет", "שלום", "żółć", "ﬁ", "ǆ", "¼", "ⅷ", "²"),
    *(
        "👩‍👩‍👧",
        "🙂🏽",
        "🇩🇪",
        "🏴\U000e0067\U000e0062\U000e007f",
        "\u200d",
        "\u200b",
        "\ufeff",
        "\ufffd",
        "\x00",
        "\x7f",
    ),
    *("2026", "3.14159", "1000000", "٣٤", "def f(x):", "    return x  # f", "don't", "we'LL", "__init__", "=>", "/**/"),
    *("<s>", "</s>", "<unk>", "<0x0A>", "<0xE2>", "<table>", "<|im_start|>", "<|endoftext|>", "<bos>", "[INST]"),
)
_CHARACTERS = (*range(0xD800), *range(0xE000, 0x11000), *range(0x1F000, 0x1FB00), *range(0xE0000, 0xE0080))


def strings(count: int, seed: int, tokens: Sequence[str]) -> Iterator[str]:
    """Yields strings: runs of up to 200 repetitions, words of many scripts, code, tokens, any characters, mixtures.

    Args:
        count: number of strings.
        seed: of the random choices.
        tokens: pieces of the vocabulary, as text.
    """
    rng = random.Random(seed)
    code = Path(random.__file__).read_text(encoding="utf-8")

    def run() -> str:
        return rng.choice(REPEATED) * rng.randint(1, 200)

    def spaces() -> str:
        return "".join(rng.choice(SPACES) * rng.randint(1, 40) for _ in range(rng.randint(1, 3)))

    def word() -> str:
        return rng.choice(WORDS)

    def token() -> str:
        return rng.choice(tokens)

    def characters() -> str:
        return "".join(map(chr, rng.choices(_CHARACTERS, k=rng.randint(0, 30))))

    def lines() -> str:
        start = rng.randrange(len(code))
        return code[start : start + rng.randrange(200)]

    sources = (run, spaces, word, token, characters, lines)
    for _ in range(count):
        yield "".join(source() for source in rng.choices(sources, k=rng.choice((0, 1, 1, 1, 2, 3, 5, 8))))


def sentencepiece_of(file: Path) -> SentencePieceProcessor:
    """Returns SentencePiece with the pieces, scores and types of a GGUF file."""
    header = Header.read(file)
    tokens, kinds, scores = (header.array(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type", "scores"))
    assert tokens is not None and kinds is not None and scores is not None
    model = bytearray()
    for token, kind, score in zip(tokens, kinds, scores, strict=True):
        text = token.replace(*SPACES) if kind == TokenType.USER_DEFINED else token
        piece = _bytes(1, text.encode()) + _tag(2, 5) + struct.pack("<f", score) + _integer(3, kind)
        model += _bytes(1, piece)
    byte_fallback = any(kind == TokenType.BYTE for kind in kinds)
    model += _bytes(2, _integer(3, 2) + _integer(4, len(tokens)) + _integer(35, byte_fallback))  # trainer_spec: BPE
    prefix = header.metadata.get("tokenizer.ggml.add_space_prefix", True)
    model += _bytes(3, _bytes(1, b"identity") + _integer(3, prefix) + _integer(4, 0))  # normalizer_spec
    return SentencePieceProcessor(model_proto=bytes(model))


def byte_level_of(file: Path) -> Tokenizer:
    """Returns the tokenizer of SmolLM2's tokenizer.json with the tokens and merges of a GGUF file."""
    header = Header.read(file)
    tokens, kinds, merges = (header.array(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type", "merges"))
    assert tokens is not None and kinds is not None and merges is not None
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    digits, bytes_of = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    return tokenizer


def control_tokens(file: Path) -> re.Pattern[str]:
    """Returns a pattern of the unknown and control tokens of a GGUF file, which are plain text to SentencePiece."""
    header = Header.read(file)
    tokens, kinds = (header.array(f"tokenizer.ggml.{key}") or [] for key in ("tokens", "token_type"))
    special = (TokenType.UNKNOWN, TokenType.CONTROL)
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind in special]
    return re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))))


def _bytes(number: int, content: bytes) -> bytes:
    return _tag(number, 2) + _varint(len(content)) + content


def _integer(number: int, value: int) -> bytes:
    return _tag(number, 0) + _varint(value)


def _tag(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    return bytes([*digits, value])
