"""The tokenizer that does without transformers says what transformers' own says."""

from __future__ import annotations

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
from foretoken.models.checkpoint import load_tokenizer
from foretoken.models.tokenizer import PlainTokenizer

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
    ours = load_tokenizer(path)
    assert isinstance(ours, PlainTokenizer)
    return ours, PreTrainedTokenizerFast.from_pretrained(path)


@pytest.mark.parametrize("text", TEXTS)
def test_encodes_and_decodes_as_transformers_does(both: tuple[Any, Any], text: str) -> None:
    ours, theirs = both
    ids = ours.encode(text)
    assert ids == theirs.encode(text) == ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    for at in range(len(ids)):  # unfinished characters
        assert ours.decode(ids[: at + 1]) == theirs.decode(ids[: at + 1])


PIECES = [
    *TEXTS, "a", "  ", "\n", "é", "\u0301", "🙂🏽", "\u200d", "e\u0301", "日本", "_", "123", "\r\n", "'s", "|>",
    "<|endoftext",
]  # fmt: skip


@pytest.mark.parametrize("role", ["target", "draft"])
def test_long_texts_have_the_ids_of_the_whole(role: str) -> None:
    """Long texts are encoded without the GIL: the ids are those of ``Tokenizer.encode`` on the whole text."""
    ours = load_tokenizer(zoo.path(role))
    whole = Tokenizer.from_file(str(zoo.path(role) / "tokenizer.json"))
    for seed in range(20):
        rng = random.Random(seed)
        text = "".join(rng.choices(PIECES, k=rng.randint(1, 40)) * rng.randint(1, 400))
        for special in (True, False):
            ids = whole.encode(text, add_special_tokens=special).ids
            assert ours.encode(text, special) == ours(text, add_special_tokens=special)["input_ids"] == ids


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    ours = load_tokenizer(zoo.path("target"))
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
    ours.encode(text)
    seconds = time.perf_counter() - began
    done.set()
    watching.join()
    assert max(gaps) < seconds / 2, (max(gaps), seconds)


def test_the_rest_is_transformers_own(both: tuple[Any, Any]) -> None:
    ours, theirs = both
    assert ours.get_vocab() == theirs.get_vocab() and len(ours) == len(theirs)
    assert (ours.eos_token, ours.eos_token_id) == (theirs.eos_token, theirs.eos_token_id)
    assert ours(["a", "def f"], padding=True)["input_ids"] == theirs(["a", "def f"], padding=True)["input_ids"]
    assert ours.convert_ids_to_tokens([5, 6]) == theirs.convert_ids_to_tokens([5, 6])
    assert ours.chat_template == theirs.chat_template is not None
    with pytest.raises(AttributeError):
        ours.no_such_thing  # noqa: B018


def test_a_tokenizer_with_more_to_say_is_left_to_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(zoo.path("target"), folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"clean_up_tokenization_spaces": True}))
    assert isinstance(load_tokenizer(folder), PreTrainedTokenizerFast)


def test_the_bundled_pair_starts_without_transformers() -> None:
    program = "import sys; from foretoken import LLM; LLM().generate('def'); print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False", done.stderr
