"""The tokenizer that does without transformers says what transformers' own says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
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
