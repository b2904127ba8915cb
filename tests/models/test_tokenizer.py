"""The tokenizer without transformers gives the same results as transformers' own."""

import json
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from foretoken import zoo
from foretoken.models.formats.checkpoint import load_tokenizer
from foretoken.models.formats.tokenizer import PlainTokenizer

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
        last = time.perf_counter()
        while not done.is_set():
            time.sleep(0.002)
            gaps.append(time.perf_counter() - last)
            last += gaps[-1]

    watching = threading.Thread(target=watch)
    watching.start()
    began = time.perf_counter()
    plain.encode(text)
    seconds = time.perf_counter() - began
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
