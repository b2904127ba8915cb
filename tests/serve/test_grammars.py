"""Grammars and bad words of clients who mean no good: they are refused, and requests beside them do not wait."""

import re
import threading
from collections.abc import Iterator

import pytest
from tests.serve.conftest import PATIENCE, Running

from foretoken.engine.grammar_process import GrammarLimits
from foretoken.engine.structured import IsolatedGrammars

pytestmark = pytest.mark.slow

SHORT = {"prompt": "def f(x):\n", "max_tokens": 4, "temperature": 0}
SLOW_TO_COMPILE = {"json": {"type": "integer", "multipleOf": 1234567}}
OVERFLOWING = {"grammar": "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1}' for i in range(20_000)) + '\nr20000: "b"'}
SLOW_TO_FOLLOW = {"grammar": "start: a\na: " + " | ".join(["a a"] * 20) + ' | "x"'}


@pytest.fixture
def limited(server: Running) -> Iterator[Running]:
    """The server, with limits that tests reach soon."""
    llm, limits = server.worker.llm, GrammarLimits(compile_seconds=0.4, mask_seconds=0.2)
    usual, llm.requests.grammars = llm.requests.grammars, IsolatedGrammars(llm.tokenizer, llm.target.vocab_size, limits)
    yield server
    llm.requests.grammars.close()
    llm.requests.grammars = usual


def test_plain_requests_do_not_wait_for_grammars(limited: Running) -> None:
    assert limited.post({**SHORT, "structured_outputs": {"regex": "ab"}}).status_code == 200  # the process is up
    answers: list[int] = []

    def hostile(number: int) -> None:
        body = {**SHORT, "structured_outputs": {"json": {"type": "integer", "multipleOf": 1234567 + number}}}
        answers.append(limited.post(body).status_code)

    threads = [threading.Thread(target=hostile, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    served = 0
    while any(thread.is_alive() for thread in threads):
        assert limited.post(SHORT).status_code == 200
        served += not answers
    assert served, "while all of them were being compiled"
    assert answers == [400] * 2


@pytest.mark.parametrize(
    "wanted, said",
    [
        (SLOW_TO_COMPILE, "cannot be compiled within 0.4 s"),
        (OVERFLOWING, "nested too deeply"),
        (SLOW_TO_FOLLOW, "takes more than 0.2 s to find the next tokens"),
    ],
    ids=["slow to compile", "overflows the stack", "slow to follow"],
)
def test_a_hostile_grammar_is_refused(limited: Running, wanted: dict[str, object], said: str) -> None:
    answer = limited.post({**SHORT, "max_tokens": 200, "structured_outputs": wanted})
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]
    assert limited.post({**SHORT, "structured_outputs": {"regex": "ab"}}).status_code == 200


def test_large_lists_are_served(server: Running) -> None:
    choices = [f"choice {i}" for i in range(100_000)]
    body = {**SHORT, "max_tokens": 30, "guided_choice": choices}
    answer = server.post(body)
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] in choices
    words = [f"x{i}" for i in range(5_000)]
    answer = server.post({**SHORT, "bad_words": [*words, "return"], "max_tokens": 30})
    assert answer.status_code == 200 and "return" not in answer.json()["choices"][0]["text"]


def test_waiting_for_a_grammar_has_an_end(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.serve.worker.COMPILE_PATIENCE", 0.05)
    answered = threading.Event()
    monkeypatch.setattr(server.worker.llm.requests, "restrictions", lambda *_: answered.wait(PATIENCE))
    answer = server.post({**SHORT, "bad_words": ["a"]})
    answered.set()
    assert answer.status_code == 429 and "make them smaller" in answer.json()["error"]["message"]


def test_deep_nesting_inside_of_strings_is_refused(server: Running) -> None:
    """The body itself is not."""
    user = {"role": "user", "content": "x"}
    for more in ({"guided_json": '{"items":' * 500 + "{}" + "}" * 500}, {"guided_json": '{"items":' * 50_000}):
        answer = server.post({"messages": [user], "max_tokens": 2, **more}, "chat/completions")
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400 and re.search("nested too deeply|maximum recursion depth", message)
