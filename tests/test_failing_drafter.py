"""A failure planted in any member of a proposer changes no text: in ``LLM``, and in the server."""

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.serve.conftest import PATIENCE, Running, running

from foretoken import LLM, SamplingParams
from foretoken.propose.base import MEMBERS, Proposer
from foretoken.propose.per_request import FallbackProposer, PerRequestProposer
from foretoken.serve.settings import ServerSettings

PROMPTS = ["def read(path):", "a = 1\nb = 1\nc = 1\n", "x", "for i in range(3):\n    print(i)\nfor i in"]
PARAMS = [
    SamplingParams(max_tokens=20, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=0.8, seed=4, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, speculative_method="ngram", speculative_tokens=3),
]


class Failure(Exception):
    """An error of no expected type."""


def broken(proposer: Proposer, member: str) -> None:
    """Makes a member of a proposer raise."""

    def fail(*args: Any) -> Any:
        raise Failure(member)

    method = callable(getattr(Proposer(), member))
    made = {member: fail if method else property(fail, lambda *_: None)}
    proposer.__class__ = type("Broken", (type(proposer),), made)


@pytest.fixture
def llm(tiny_pair: Any) -> LLM:
    config = {"method": "draft_model", "control": {"name": "goodput", "guard": False, "memory": False}}
    options: dict[str, Any] = {"speculative_config": config, "methods": ["ngram"], "isolate_failures": True}
    return LLM(tiny_pair.target, tiny_pair.draft, dtype="float32", max_num_seqs=2, seed=1, **options)


@pytest.fixture(scope="module")
def expected(tiny_pair: Any) -> list[str]:
    plain = LLM(tiny_pair.target, speculative_config={"method": "none"}, dtype="float32", methods=["ngram"], seed=1)
    return [output.outputs[0].text for output in plain.generate(PROMPTS, PARAMS)]


def guarded(llm: LLM, method: str) -> FallbackProposer:
    proposer = llm.proposer_of(method)
    assert isinstance(proposer, FallbackProposer)
    return proposer


@pytest.mark.parametrize("member", MEMBERS)
def test_generate_gives_the_texts_of_plain_decoding(member: str, llm: LLM, expected: list[str]) -> None:
    broken(guarded(llm, "draft_model").inner, member)
    outputs = llm.generate(PROMPTS, PARAMS)
    assert [output.outputs[0].text for output in outputs] == expected
    assert outputs[3].stats.drafted, "the other method drafts"
    assert not llm.engine.busy and not guarded(llm, "ngram").failures
    llm.engine.check_integrity()


def test_the_engine_has_guarded_proposers_alone(llm: LLM) -> None:
    chosen = llm.engine.proposer
    assert isinstance(chosen, PerRequestProposer)
    assert all(isinstance(member, FallbackProposer) for member in chosen.members.values())


@pytest.fixture
def server(llm: LLM) -> Iterator[Running]:
    with running(llm, ServerSettings(allow_admin=True)) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("member", MEMBERS)
def test_the_server_answers_as_without_drafts(member: str, server: Running, expected: list[str]) -> None:
    """Also while clients disconnect, whose sequences the proposer is to forget."""
    broken(guarded(server.worker.llm, "draft_model").inner, member)
    answers: list[str] = [""] * len(PROMPTS)

    def ask(i: int) -> None:
        params = PARAMS[i]
        body = {"prompt": PROMPTS[i], "max_tokens": params.max_tokens, "temperature": params.temperature}
        body |= {"seed": params.seed, "ignore_eos": True, "speculative_method": params.speculative_method}
        body |= {"speculative_tokens": params.speculative_tokens}
        answer = server.post({name: value for name, value in body.items() if value is not None})
        answers[i] = answer.json()["choices"][0]["text"]

    def leave() -> None:
        body = {"prompt": "long", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE) as answer:
            next(answer.iter_lines())

    clients = [threading.Thread(target=ask, args=(i,)) for i in range(len(PROMPTS))]
    clients += [threading.Thread(target=leave) for _ in range(2)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(PATIENCE)
    assert answers == expected
    server.until(server.idle)
    assert server.worker.alive and not server.worker.engine.running


@pytest.mark.slow
def test_a_disabled_method_is_reported_and_enabled_again(server: Running) -> None:
    proposer = guarded(server.worker.llm, "draft_model")
    kind = type(proposer.inner)
    broken(proposer.inner, "observe")
    url, body = f"{server.url}/v1/speculation", {"prompt": "def", "max_tokens": 30, "ignore_eos": True}
    assert server.post(body).status_code == 200 and proposer.disabled
    assert "disabled" in httpx.get(url, timeout=PATIENCE).json()["paused"]
    proposer.inner.__class__ = kind
    assert "disabled" not in str(httpx.patch(url, json={"enabled": True}, timeout=PATIENCE).json()["paused"])
    assert server.post({**body, "speculative_tokens": 3}).json()["metrics"]["speculative_decoding"]["num_draft_tokens"]
