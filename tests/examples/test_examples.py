"""Every example runs on the bundled pair and prints what it promises."""

from pathlib import Path

import pytest
from tests.serve.conftest import running

import batch
import chat
import custom_proposer
import custom_verifier
import openai_client
import plan_speedup
import streaming
import structured_output
from foretoken import LLM
from foretoken.propose import methods

FOLDER = Path(__file__).parents[2] / "examples"


def test_every_example_is_tested():
    tested = "".join(file.read_text(encoding="utf-8") for file in Path(__file__).parent.glob("test_*.py"))
    for file in FOLDER.glob("*.py"):
        assert f"import {file.stem}\n" in tested, file.name


def test_a_chat_goes_on_after_the_first_answer(capsys):
    chat.main()
    printed = capsys.readouterr().out
    assert printed.index("> def read_lines") < printed.index("> def write_lines")


@pytest.mark.slow
def test_a_batch_gives_the_texts_of_single_requests(capsys):
    batch.main()
    assert f"{len(batch.PROMPTS)} of {len(batch.PROMPTS)} texts are the same alone" in capsys.readouterr().out


def test_two_requests_stream_at_once(capsys):
    streaming.main()
    printed = capsys.readouterr().out
    assert "0: finished, length" in printed
    assert "1: finished" in printed


def test_structured_outputs_are_what_was_asked_for(capsys):
    structured_output.main()
    printed = capsys.readouterr().out
    assert "parsed: {'name': " in printed
    assert "regex: " in printed


@pytest.mark.slow
def test_a_proposer_of_ones_own_drafts_and_changes_no_text(capsys, monkeypatch):
    monkeypatch.setattr(methods, "_registered", {})
    custom_proposer.main()
    printed = capsys.readouterr().out
    assert "same text as plain decoding: True" in printed
    assert float(printed.splitlines()[-2].split()[0]) > 1.5


def test_a_verifier_of_ones_own_is_exact_and_its_mistake_is_detected(capsys):
    assert custom_verifier.error(custom_verifier.verify) < 1e-12
    assert custom_verifier.error(custom_verifier.wrong) > 1e-2
    custom_verifier.main()
    assert "with the mistake" in capsys.readouterr().out


@pytest.mark.slow
def test_a_plan_from_python_recommends_something(capsys):
    plan_speedup.main(max_tokens=12, turns=2)
    *rows, recommended = capsys.readouterr().out.splitlines()
    assert len(rows) == 5
    assert recommended.startswith("recommended: ")


@pytest.mark.slow
def test_openais_client_is_served(capsys):
    with running(LLM(speculative_config={"num_speculative_tokens": 4})) as server:
        openai_client.main(f"{server.url}/v1")
    assert len(capsys.readouterr().out.splitlines()) > 3
