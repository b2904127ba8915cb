"""Tokenizers of GGUF files equal the ones that the files were made from, on thousands of texts."""

import io
import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf import TokenType
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from foretoken import zoo
from foretoken.core.errors import ModelLoadError
from foretoken.models.formats.checkpoint import eos_ids, load_generation_settings, load_tokenizer
from foretoken.models.formats.gguf.tokenizer import PRE_TOKENIZERS
from foretoken.models.formats.tokenizer import PlainTokenizer

from .gguf_files import finish

PIECES = [
    "a",
    "Z",
    "  ",
    "    ",
    "\n",
    "\r\n",
    "\t",
    " \n ",
    "é",
    "e\u0301",
    "한국어",
    "漢字",
    "かな",
    "żółć",
    "Ünï",
    "🙂🏽",
    "👩‍👩‍👧",
    "\u200b",
    "0",
    "12",
    "2026",
    "3.14",
    "'s",
    "'LL",
    "don't",
    "_",
    "__init__",
    "=>",
    "!=",
    "/**/",
    "def f(x):",
    "    return x",
    "<s>",
    "</s>",
    "<|end|>",
    "<think>",
    "▁",
    "<0x0A>",
    "\x00",
    "\ufeff",
    "Привет",
    "שלום",
    "؟",
    "²",
    "ⅷ",
    "ﬁ",
    "Å",
    "Å",
    "ǆ",
    "¼",
]
TEMPLATE = "{% for m in messages %}<|end|>{{ m['content'] }}{% endfor %}"
SPECIAL = {"<|begin|>": TokenType.CONTROL, "<|end|>": TokenType.CONTROL, "<think>": TokenType.USER_DEFINED}


@cache
def corpus() -> tuple[str, ...]:
    """Returns text to train tokenizers with: source code of the standard library, and Unicode."""
    generator = random.Random(1)
    code = [Path(module.__file__).read_text(encoding="utf-8") for module in (json.decoder, random, pytest)]
    mixed = ["".join(generator.choices(PIECES, k=30)) for _ in range(2000)]
    return (*code, *mixed)


@cache
def texts() -> tuple[str, ...]:
    """Returns 1500 texts: lines and cuts of code, mixtures of words and spaces, and random characters."""
    generator = random.Random(2)
    source = Path(random.__file__).read_text(encoding="utf-8")
    cuts = [source[at : at + generator.randrange(200)] for at in generator.sample(range(len(source)), 500)]
    mixed = ["".join(generator.choices(PIECES, k=generator.randrange(12))) for _ in range(500)]
    points = [*range(0xD800), *range(0xE000, 0x11000), *range(0x1F000, 0x1FA00)]
    wild = ["".join(map(chr, generator.choices(points, k=generator.randrange(30)))) for _ in range(500)]
    return (*cuts, *mixed, *wild)


def written(path: Path, model: str, tokens: Sequence[str], kinds: Sequence[int], **settings: Any) -> Path:
    """Writes a GGUF file with a tokenizer and no tensors.

    Args:
        path: the file.
        model: kind of the tokenizer.
        tokens: the vocabulary.
        kinds: type of each token.
        settings: further keys of ``tokenizer.ggml``.
    """
    writer = gguf.GGUFWriter(path, settings.pop("architecture", "llama"))
    writer.add_tokenizer_model(model)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(kinds))
    writer.add_chat_template(TEMPLATE)
    for key, value in settings.items():
        name = f"tokenizer.ggml.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_string(name, value)
    finish(writer)
    return path


def of_byte_level(path: Path, tokenizer: Tokenizer, pre: str, **settings: Any) -> Path:
    """Writes a byte-level tokenizer as llama.cpp's converter does."""
    model = json.loads(tokenizer.to_str())["model"]
    by_id = {i: token for token, i in tokenizer.get_vocab().items()}
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(max(by_id) + 9)]
    kinds = [
        TokenType.UNUSED if i not in by_id else SPECIAL.get(token, TokenType.NORMAL) for i, token in enumerate(tokens)
    ]
    merges = [" ".join(merge) for merge in model["merges"]]
    return written(path, "gpt2", tokens, kinds, pre=pre, merges=merges, **settings)


@cache
def byte_level(pre: str) -> Tokenizer:
    """Returns a trained byte-level tokenizer that splits text by a rule of llama.cpp's."""
    rule = PRE_TOKENIZERS[pre]
    tokenizer = Tokenizer(models.BPE(ignore_merges=rule.ignore_merges))
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.gpt2)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, last])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in ("<|begin|>", "<|end|>")])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


def check_equal(ours: Any, original: Any, every: int = 1) -> None:
    """Compares ids, texts and vocabularies. every: step through the texts."""
    assert ours.get_vocab() == original.get_vocab()
    for text in texts()[::every]:
        ids = ours.encode(text)
        assert ids == original.encode(text), text
        assert ours.encode(text, add_special_tokens=False) == original.encode(text, add_special_tokens=False), text
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == original.decode(ids, skip_special_tokens=skip), text


@pytest.mark.parametrize("pre", sorted({rule: name for name, rule in PRE_TOKENIZERS.items()}.values()))
@pytest.mark.slow
def test_byte_level_tokenizers_are_equal(pre: str, tmp_path: Path) -> None:
    original = Tokenizer.from_str(byte_level(pre).to_str())
    begin, end = (original.token_to_id(token) for token in ("<|begin|>", "<|end|>"))
    original.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A <|begin|>:1 $B:1", special_tokens=[("<|begin|>", begin)]
    )
    ids = {"bos_token_id": begin, "eos_token_id": end, "padding_token_id": end}
    file = of_byte_level(tmp_path / "model.gguf", original, pre, add_bos_token=True, **ids)
    full = PreTrainedTokenizerFast(tokenizer_object=original, bos_token="<|begin|>", eos_token="<|end|>")
    ours = load_tokenizer(file)
    check_equal(ours, full)
    assert (ours.eos_token, ours.eos_token_id, ours.bos_token_id) == ("<|end|>", end, begin)
    messages = [{"role": "user", "content": "hello"}]
    assert ours.apply_chat_template(messages, tokenize=False) == "<|end|>hello"


def test_the_bundled_tokenizer_is_equal(tmp_path: Path) -> None:
    original = load_tokenizer(zoo.path("target"))
    fast = Tokenizer.from_file(str(zoo.path("target") / "tokenizer.json"))
    ours = load_tokenizer(of_byte_level(tmp_path / "model.gguf", fast, "gpt-2", eos_token_id=0))
    assert isinstance(ours, PlainTokenizer)
    check_equal(ours, original)


def sentencepiece(prefix: bool) -> Any:
    """Returns a trained SentencePiece BPE with bytes to fall back to, without normalization, as Llama's and Gemma's."""
    result = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=(line for text in corpus() for line in text.splitlines() if line),
        model_writer=result,
        model_type="bpe",
        vocab_size=1500,
        byte_fallback=True,
        character_coverage=0.99,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        add_dummy_prefix=prefix,
        user_defined_symbols=[] if prefix else ["▁▁", "▁▁▁▁"],
        minloglevel=2,
    )
    return SentencePieceProcessor(model_proto=result.getvalue())


def pieces(original: SentencePieceProcessor) -> tuple[list[str], list[int]]:
    """Returns the tokens and their kinds."""
    ids = range(original.get_piece_size())
    kinds: list[int] = [TokenType.BYTE if original.is_byte(i) else TokenType.NORMAL for i in ids]
    kinds[:3] = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    return [original.id_to_piece(i) for i in ids], kinds


@pytest.mark.parametrize("architecture, prefix", [("llama", True), ("gemma2", False)])
def test_sentencepiece_tokenizers_are_equal(architecture: str, prefix: bool, tmp_path: Path) -> None:
    original = sentencepiece(prefix)
    tokens, kinds = pieces(original)
    for i, token in enumerate(tokens):
        if not prefix and token in ("▁▁", "▁▁▁▁"):  # llama.cpp's converter writes their spaces as spaces
            tokens[i], kinds[i] = token.replace("▁", " "), TokenType.USER_DEFINED
    file = written(
        tmp_path / "model.gguf",
        "llama",
        tokens,
        kinds,
        architecture=architecture,
        scores=[original.get_score(i) for i in range(len(tokens))],
        add_space_prefix=prefix,
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
    )
    ours = load_tokenizer(file)
    for text in texts():
        if "<s>" in text or "</s>" in text:  # plain text to SentencePiece itself
            continue
        expected = original.encode(text)
        assert ours.encode(text) == [1, *expected], text
        assert ours.encode(text, add_special_tokens=False) == expected, text
        assert ours.decode(expected) == original.decode(expected), text


def test_gemma_4_stores_the_merges_of_its_sentencepiece_tokenizer(tmp_path: Path) -> None:
    tokens, kinds = pieces(sentencepiece(False))
    special = {"add_space_prefix": False, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    plain = load_tokenizer(written(tmp_path / "gemma2.gguf", "llama", tokens, kinds, architecture="gemma2", **special))
    merges = json.loads(plain.backend_tokenizer.to_str())["model"]["merges"]
    file = written(
        tmp_path / "gemma4.gguf",
        "gemma4",
        tokens,
        kinds,
        architecture="gemma4",
        merges=[" ".join(merge) for merge in merges],
        **special,
    )
    check_equal(load_tokenizer(file), plain)


def test_texts_end_with_the_tokens_that_the_file_names(tmp_path: Path) -> None:
    ends = {"eos_token_id": 1, "eot_token_id": 2, "eom_token_id": 1}
    file = written(tmp_path / "model.gguf", "gpt2", ["a", "b", "c"], [1, 1, 1], pre="gpt-2", merges=["a b"], **ends)
    (settings,) = load_generation_settings(file)
    assert settings.eos_token_id == [1, 2] and settings.bos_token_id is None


@pytest.mark.parametrize(
    "tokens, kinds, ends",
    [
        (["<eos>", "<end_of_turn>"], "ec", ["<eos>", "<end_of_turn>"]),
        (
            ["</s>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>"],
            "eccc",
            ["</s>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>"],
        ),
        (["<eos>", "</s>", "<end_of_turn>"], "euu", ["<eos>"]),  # tags of HTML in Gemma's vocabulary
        (["<|endoftext|>", "<|end|>"], "ec", ["<|endoftext|>", "<|end|>"]),  # Phi 3
        (["<|return|>", "<|end|>", "<|call|>"], "ecc", ["<|return|>", "<|call|>"]),  # gpt-oss
        (["<|flush|>", "<|end|>", "<|calls|>"], "ecc", ["<|flush|>", "<|calls|>"]),
        (["<eos>", "<bos>", "<unused0>", "<start_of_turn>"], "eccc", ["<eos>"]),
    ],
)
def test_texts_end_with_control_tokens_that_end_a_turn(tokens, kinds, ends, tmp_path):
    """kinds: e the file's eos, c a control token, u a user-defined one."""
    of = {"e": TokenType.CONTROL, "c": TokenType.CONTROL, "u": TokenType.USER_DEFINED}
    settings: dict[str, Any] = {"pre": "gpt-2", "merges": ["a b"], "eos_token_id": 3}
    words = ["a", "b", "ab", *tokens]
    file = written(tmp_path / "model.gguf", "gpt2", words, [1, 1, 1, *(of[kind] for kind in kinds)], **settings)
    (found,) = load_generation_settings(file)
    assert [words[i] for i in found.eos_token_id] == ends
    assert [words[i] for i in eos_ids(file, load_tokenizer(file), len(words))] == sorted(ends, key=words.index)


def test_ids_outside_the_vocabulary_count_as_absent(tmp_path: Path) -> None:
    none = {f"{role}_token_id": 2**32 - 1 for role in ("bos", "eos", "eot", "eom", "unknown", "padding")}
    settings: dict[str, Any] = {"pre": "gpt-2", "merges": ["a b"], "add_bos_token": True, "add_eos_token": True}
    file = written(tmp_path / "model.gguf", "gpt2", ["a", "b", "ab"], [1, 1, 1], **settings, **none)
    (found,) = load_generation_settings(file)
    ours = load_tokenizer(file)
    assert found.eos_token_id == [] and found.bos_token_id is None
    assert ours.eos_token_id is None and ours.bos_token_id is None and eos_ids(file, ours, 3) == []
    assert ours.encode("ab") == [2]


@pytest.mark.parametrize(
    "model, settings, message",
    [
        ("gpt2", {"pre": "unheard-of", "merges": ["a b"]}, "'unheard-of'.*tokenizer="),
        ("gpt2", {"merges": ["a b"]}, "None.*tokenizer="),
        ("bert", {}, "'bert'.*tokenizer="),
        ("t5", {}, "'t5'.*tokenizer="),
        ("gpt2", {"pre": "gpt-2", "merges": ["a x"]}, "no tokenizer loads"),
        ("gpt2", {"pre": "gpt-2", "merges": ["ab"]}, "no tokenizer loads"),
        ("llama", {"eos_token_id": 3, "scores": [0.0, 0.0, 0.0]}, "eos_token_id = 3 of 3 tokens"),
    ],
)
def test_damaged_vocabularies_and_unknown_kinds_are_refused(model, settings, message, tmp_path):
    file = written(tmp_path / "model.gguf", model, ["a", "b", "ab"], [1, 1, 1], **settings)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_tokenizer(file)
    assert "tokenizer.json" not in str(caught.value) and str(file) in str(caught.value)


@pytest.mark.parametrize("architecture, spaces", [("phi3", 1), ("llama", 3)])
def test_special_tokens_of_phi_3_take_the_spaces_behind_them(architecture: str, spaces: int, tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "▁", "x", "<|end|>"]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.NORMAL, TokenType.NORMAL, TokenType.CONTROL]
    settings = {"scores": [0.0] * 5, "bos_token_id": 1, "unknown_token_id": 0, "architecture": architecture}
    ours = load_tokenizer(written(tmp_path / "model.gguf", "llama", tokens, kinds, **settings))
    assert ours.encode("<|end|>  x", add_special_tokens=False) == [4, *[2] * spaces, 3]
    assert ours.encode("<s>x", add_special_tokens=False) == [1, 2, 3]
