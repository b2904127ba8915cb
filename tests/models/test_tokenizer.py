"""Tokenizers equal those of transformers, and reference tokenizers built without our code."""

import io
import json
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tests.models.test_gguf_tokenizer import corpus, written
from tests.models.tokenizer_oracles import SPACES, byte_level_of, control_tokens, sentencepiece_of, strings
from tests.real import real_model
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from foretoken import zoo
from foretoken.engine.stopping import Detokenizer
from foretoken.models.formats.checkpoint import load_tokenizer
from foretoken.models.formats.tokenizer import PlainTokenizer
from foretoken.propose.pieces import Pieces

pytestmark = pytest.mark.slow

TEXTS = [
    "",
    "def f(x):\n    return x",
    "żółć 漢字 🙂",
    "<|endoftext|>import os<|endoftext|>",
    " a  b\t\r\n",
    "\x00\ud7ff",
]


@pytest.fixture(scope="module")
def both() -> tuple[Any, Any]:
    path = zoo.path("target")
    plain = load_tokenizer(path)
    assert isinstance(plain, PlainTokenizer)
    return plain, PreTrainedTokenizerFast.from_pretrained(path)


@pytest.mark.parametrize("text", TEXTS)
def test_encodes_and_decodes_as_transformers_does(both: tuple[Any, Any], text: str) -> None:
    plain, full = both
    ids = plain.encode(text)
    assert ids == full.encode(text) == plain(text)["input_ids"] == full(text)["input_ids"]
    assert plain.encode(text, add_special_tokens=False) == full.encode(text, add_special_tokens=False)
    for skip in (True, False):
        assert plain.decode(ids, skip_special_tokens=skip) == full.decode(ids, skip_special_tokens=skip)
    for at in range(len(ids)):  # unfinished characters
        assert plain.decode(ids[: at + 1]) == full.decode(ids[: at + 1])


PIECES = [
    *TEXTS,
    "a",
    "  ",
    "\n",
    "é",
    "\u0301",
    "🙂🏽",
    "\u200d",
    "e\u0301",
    "日本",
    "_",
    "123",
    "\r\n",
    "'s",
    "|>",
    "<|endoftext",
]


@pytest.mark.parametrize("role", ["target", "draft"])
def test_long_texts_have_the_same_ids(role: str) -> None:
    """Long texts are encoded without the GIL: the ids are those of ``Tokenizer.encode`` on the whole text."""
    plain = load_tokenizer(zoo.path(role))
    whole = Tokenizer.from_file(str(zoo.path(role) / "tokenizer.json"))
    for seed in range(20):
        rng = random.Random(seed)
        text = "".join(rng.choices(PIECES, k=rng.randint(1, 40)) * rng.randint(1, 400))
        for special in (True, False):
            ids = whole.encode(text, add_special_tokens=special).ids
            assert plain.encode(text, special) == plain(text, add_special_tokens=special)["input_ids"] == ids


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    plain = load_tokenizer(zoo.path("target"))
    text = "".join(f"def f{i}(x): return x + {i}\n" for i in range(60_000))
    gaps, done = [], threading.Event()

    def watch() -> None:
        last = time.process_time()  # other processes may take the cores meanwhile
        while not done.is_set():
            time.sleep(0.002)
            gaps.append(time.process_time() - last)
            last += gaps[-1]

    watching = threading.Thread(target=watch)
    watching.start()
    began = time.process_time()
    plain.encode(text)
    seconds = time.process_time() - began
    done.set()
    watching.join()
    assert max(gaps) < seconds / 2, (max(gaps), seconds)


def test_everything_else_is_delegated_to_transformers(both: tuple[Any, Any]) -> None:
    plain, full = both
    assert plain.get_vocab() == full.get_vocab() and len(plain) == len(full)
    assert (plain.eos_token, plain.eos_token_id) == (full.eos_token, full.eos_token_id)
    assert plain(["a", "def f"], padding=True)["input_ids"] == full(["a", "def f"], padding=True)["input_ids"]
    assert plain.convert_ids_to_tokens([5, 6]) == full.convert_ids_to_tokens([5, 6])
    assert plain.chat_template == full.chat_template is not None
    with pytest.raises(AttributeError):
        plain.no_such_thing  # noqa: B018


def test_a_tokenizer_with_more_settings_is_left_to_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(zoo.path("target"), folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"clean_up_tokenization_spaces": True}))
    assert isinstance(load_tokenizer(folder), PreTrainedTokenizerFast)


def test_the_bundled_pair_starts_without_the_packages_of_other_checkpoints() -> None:
    run = "import sys; from foretoken import LLM; LLM().generate('def')"
    program = f"{run}; print([name for name in ('transformers', 'gguf') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", done.stderr


COUNT = 10_000  # strings for each tokenizer
USER_DEFINED = ["▁▁", "▁▁▁▁", "▁▁▁▁▁▁▁", "\t\t", "<think>", "</think>", "ab", "▁a"]
BPE: dict[str, dict[str, Any]] = {
    "llama": {},
    "without a prefix": {"add_dummy_prefix": False},
    "user-defined": {"user_defined_symbols": USER_DEFINED},
    "user-defined without a prefix": {"user_defined_symbols": USER_DEFINED, "add_dummy_prefix": False},
    "unknown characters": {"byte_fallback": False},
    "pieces across words": {"split_by_whitespace": False, "user_defined_symbols": USER_DEFINED},
}


@cache
def trained(name: str) -> SentencePieceProcessor:
    """Returns a trained BPE with the settings of ``BPE`` of this name, else those of Llama."""
    settings = {
        "byte_fallback": True,
        "character_coverage": 0.99,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
    } | BPE[name]
    result = io.BytesIO()
    lines = [line for text in corpus() for line in text.splitlines() if line]
    runs = [character * length for character in (" ", "=", "\t", "a", "ab", " \t") for length in range(1, 40)]
    SentencePieceTrainer.train(
        sentence_iterator=iter([*lines, *(f"x{run}y" for run in runs)]),
        model_writer=result,
        model_type="bpe",
        vocab_size=1500,
        minloglevel=2,
        **settings,
    )
    return SentencePieceProcessor(model_proto=result.getvalue())


def as_gguf(original: SentencePieceProcessor, name: str, path: Path) -> Path:
    """Writes a trained tokenizer as llama.cpp's converter does."""
    ids = range(original.get_piece_size())
    kinds: list[int] = [TokenType.BYTE if original.is_byte(i) else TokenType.NORMAL for i in ids]
    tokens = [original.id_to_piece(i) for i in ids]
    kinds[:3] = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    for i in map(original.piece_to_id, BPE[name].get("user_defined_symbols", ())):
        tokens[i], kinds[i] = tokens[i].replace(SPACES[1], " "), TokenType.USER_DEFINED
    return written(
        path,
        "llama",
        tokens,
        kinds,
        scores=[original.get_score(i) for i in ids],
        add_space_prefix=BPE[name].get("add_dummy_prefix", True),
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
    )


def streamed(tokenizer: Any, ids: list[int]) -> str:
    """Returns the text of ids that are decoded one by one."""
    detokenizer = Detokenizer(tokenizer, [], skip_special_tokens=False)
    return "".join([*(detokenizer.push(token) for token in ids), detokenizer.flush()])


def check_equal(
    file: Path, expected: Callable[[str], list[int]], decoded: Callable[[list[int]], str], skipped: set[str] | None
) -> None:
    """Compares ids and texts of ``COUNT`` strings.

    Args:
        file: the GGUF file.
        expected: the reference's ids.
        decoded: the reference's text of ids.
        skipped: texts that are not compared; if not None, texts with control tokens as well.
    """
    ours, control = load_tokenizer(file), control_tokens(file)
    vocabulary = [token.replace(SPACES[1], " ") for token in ours.get_vocab()]
    compared = 0
    for text in strings(COUNT * 6 // 5, seed=1, tokens=vocabulary):
        if skipped is not None and (control.search(text) or text.replace(*reversed(SPACES)) in skipped):
            continue
        ids = expected(text)
        assert ours.encode(text, add_special_tokens=False) == ids, text
        assert ours.decode(ids) == decoded(ids), text
        if compared % 4 == 0 and len(ids) < 50:
            assert streamed(ours, ids) == decoded(ids), text
        if compared % 50 == 0:
            assert ours.full.encode(text, add_special_tokens=False) == ids, text
        compared += 1
    assert compared >= COUNT


@pytest.mark.parametrize("name", BPE)
def test_trained_sentencepiece_tokenizers_are_equal(name: str, tmp_path: Path) -> None:
    original = trained(name)
    file = as_gguf(original, name, tmp_path / "model.gguf")
    # A text that is one user-defined token gets no space before it, as with llama.cpp and transformers.
    prefix = BPE[name].get("add_dummy_prefix", True)
    alone = (
        {token.replace(*reversed(SPACES)) for token in BPE[name].get("user_defined_symbols", ())} if prefix else set()
    )
    check_equal(file, original.encode, _without_unknown(original), alone)


def _without_unknown(original: SentencePieceProcessor) -> Callable[[list[int]], str]:
    """Returns SentencePiece's decoder with the piece's name for an unknown character, as transformers decodes it."""
    return lambda ids: original.decode(ids).replace(" ⁇ ", "<unk>") if 0 in ids else original.decode(ids)


@pytest.mark.real
def test_gemma_equals_sentencepiece() -> None:
    file = real_model("gemma3")
    original = sentencepiece_of(file)
    assert load_tokenizer(file).encode(" " * 40, add_special_tokens=False) == [167, 145]
    check_equal(file, original.encode, original.decode, set())


@pytest.mark.real
def test_smollm2_equals_its_tokenizer_json() -> None:
    file = real_model("smollm2")
    original = byte_level_of(file)
    check_equal(file, lambda text: original.encode(text).ids, lambda ids: original.decode(ids, False), None)


@pytest.mark.parametrize("name", ["llama", "user-defined without a prefix"])
def test_any_ids_decode_as_sentencepiece_decodes_them(name: str, tmp_path: Path) -> None:
    """Also bytes that are not UTF-8, which a model may generate."""
    original, rng = trained(name), random.Random(3)
    ours = load_tokenizer(as_gguf(original, name, tmp_path / "model.gguf"))
    of_bytes = [original.piece_to_id(f"<0x{byte:02X}>") for byte in range(256) if byte != ord(" ")]
    whole = [i for i in range(3, original.get_piece_size()) if not original.is_byte(i)]
    lead = original.encode("漢🙂é", add_bos=False)
    for _ in range(3000):
        ids = [
            token
            for _ in range(rng.randint(0, 8))
            for token in rng.choice((rng.choices(of_bytes, k=3), lead, [rng.choice(whole)]))
        ]
        assert ours.decode(ids) == original.decode(ids) == streamed(ours, ids), ids


def test_user_defined_tokens_have_the_bytes_of_their_text(tmp_path: Path) -> None:
    name = "user-defined"
    original = trained(name)
    pieces = Pieces(load_tokenizer(as_gguf(original, name, tmp_path / "model.gguf")))
    assert [pieces.piece(original.piece_to_id(token)) for token in ("▁▁", "<think>", "▁a")] == [
        b"  ",
        b"<think>",
        b" a",
    ]
