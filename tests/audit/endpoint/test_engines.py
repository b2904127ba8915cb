"""Engines in processes of their own, asked like servers."""

import sys
from dataclasses import replace

import httpx
import numpy as np
import pytest
from tests.audit.endpoint.fake import ALPHABET, TARGET, Behaviour, _softmax, serving
from tests.audit.endpoint.tasks import PROMPTS, SIZES, tasked

from foretoken.audit.endpoint import Endpoint, audit_endpoint, engines
from foretoken.audit.endpoint.engines import EngineClient, EnginePair
from foretoken.audit.endpoint.parity import parity
from foretoken.audit.subject import CheckOutcome
from foretoken.bench.peers.protocol import Setup
from foretoken.bench.peers.registry import BOOT
from foretoken.bench.peers.worker import PeerError, PeerWorker
from foretoken.core.errors import InvalidRequest
from foretoken.probe.answers import Failed, Refused, ServerAnswer, TokenPlace
from foretoken.probe.client import Ask
from foretoken.speculation import SpeculativeConfig

ECHO = """
from foretoken.bench.peers.protocol import serve

def load(setup):
    def complete(bodies):
        if any(body["prompt"] == "crash" for body in bodies):
            raise RuntimeError("the engine is dead")
        return [one(body, len(bodies)) for body in bodies]
    return complete, "1.0"

def one(body, together):
    if "top_k" in body:
        return {"error": "no top_k here"}
    choice = {"text": body["prompt"], "finish_reason": "length", "token_ids": [together] * body["max_tokens"]}
    return {"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": body["max_tokens"]}}

serve(load)
"""


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    script = tmp_path_factory.mktemp("engine") / "echo.py"
    script.write_text(ECHO)
    started = PeerWorker([sys.executable, str(script)], Setup("echo", "plain", ""), script.with_suffix(".log"))
    yield started
    started.close()


def client(process) -> EngineClient:
    return EngineClient("echo 1.0", complete=process.complete)


def ask(prompt: str, **options) -> Ask:
    return Ask({"prompt": prompt, "max_tokens": 2} | options, prompt)


def test_requests_at_once_are_one_batch(process):
    replies = client(process).post("completions", [ask(str(i)) for i in range(5)], 3)
    assert [reply.ids for reply in replies] == [(3, 3)] * 3 + [(2, 2)] * 2
    assert [reply.text for reply in replies] == list("01234")


def test_requests_and_tokens_are_counted(process):
    own = client(process)
    own.post("completions", [ask("a"), ask("b")], 1)
    assert (own.spent.requests, own.spent.tokens, own.spent.prompt_tokens) == (2, 4, 2)


def test_a_refusal_concerns_its_request_alone(process):
    good, bad = client(process).post("completions", [ask("a"), ask("b", top_k=3)], 2)
    assert isinstance(good, ServerAnswer) and bad == Refused("400: no top_k here")


def test_an_engine_that_fails_is_no_answer(process):
    replies = client(process).post("completions", [ask("crash"), ask("a")], 2)
    assert all(isinstance(reply, Failed) and "the engine is dead" in reply.why for reply in replies)


def test_there_are_no_chats_and_no_pages(process):
    (reply,) = client(process).post("chat/completions", [ask("a")], 1)
    assert isinstance(reply, Refused) and client(process).get("/metrics") == ""


def through(url: str, **fields):
    """A completer that asks a server."""

    def complete(bodies):
        answers = [httpx.post(f"{url}/v1/completions", json={**body, **fields}) for body in bodies]
        if any(answer.status_code != 200 for answer in answers):
            raise PeerError("it failed")
        return [answer.json() for answer in answers]

    return complete


class Fake:
    version = "1.0"

    def __init__(self, complete) -> None:
        self.complete = complete


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["", "greedy"])
def test_an_audit_of_an_engine(fault):
    with serving(Behaviour(fault)) as url:
        pair = EnginePair("vllm", "table", Fake(through(url, speculative_tokens=0)), Fake(through(url)))
        result = audit_endpoint(Endpoint("vllm 1.0", "table", budget=4000, engines=pair), PROMPTS)
    failed = [check.name for check in result.checks if check.outcome is CheckOutcome.FAILED]
    assert failed == (["greedy parity"] if fault else []), result.checks
    assert result.subject["plain_by"] == "baseline" and result.subject["server"] == "vllm"


class Table:
    """A checkpoint of the fake server's target. shifted: what rounding adds to every other logit."""

    name = "table"

    def __init__(self, shifted: float = 0.0) -> None:
        self.shifted = shifted

    def places(self, text: ServerAnswer):
        before = [text.prompt_ids[-1], *text.ids][: len(text.ids)]
        places = []
        for own, last in zip(text.ids, before, strict=True):
            logits = TARGET[last].copy()
            logits[::2] += self.shifted
            logs = sorted(zip(map(float, np.log(_softmax(logits))), range(len(ALPHABET)), strict=True), reverse=True)
            top = tuple((str(token), value) for value, token in logs)
            places.append(TokenPlace(str(own), dict(top)[str(own)], top))
        return tuple(places)


@pytest.mark.parametrize("fault", ["", "greedy"])
def test_a_checkpoint_explains_divergences_of_a_server_without_log_probabilities(fault):
    with tasked(Behaviour(fault, refused=("logprobs",)), replace(SIZES, parity_tokens=32)) as task:
        assert not task.speculative.top
        verdict, logprobs = parity(replace(task, checkpoint=Table()))
    assert verdict.outcome is (CheckOutcome.FAILED if fault else CheckOutcome.PASSED), verdict.evidence
    assert logprobs.outcome is CheckOutcome.SKIPPED


def test_plain_texts_tell_how_far_a_checkpoint_is_from_the_server():
    with tasked(Behaviour(refused=("logprobs",)), replace(SIZES, parity_tokens=32)) as task:
        verdict, _ = parity(replace(task, checkpoint=Table(shifted=2.0)))
    assert 0.1 < verdict.numbers["noise"] <= 2.0


@pytest.mark.parametrize(
    "name, config, said",
    [
        ("vllm", {"method": "suffix"}, "vllm is audited with draft_model or ngram, not with 'suffix'"),
        ("openvino", {"method": "ngram"}, "openvino is audited with draft_model, not with 'ngram'"),
        ("vllm", {"method": "draft_model"}, "not with 'draft_model'; name one"),
    ],
)
def test_methods_that_an_engine_lacks_are_refused(name, config, said):
    with pytest.raises(InvalidRequest, match=said), engines.started(name, "m", SpeculativeConfig.of(config)):
        pass


def test_an_engine_that_is_not_set_up_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
    with (
        pytest.raises(InvalidRequest, match="vllm is not set up"),
        engines.started("vllm", "m", SpeculativeConfig.of({"method": "ngram"})),
    ):
        pass


def test_workers_need_nothing_but_the_standard_library_to_be_imported():
    folder = BOOT.parent
    assert {name for name in engines.ENGINES if "def load_api(" not in (folder / f"{name}.py").read_text()} == set()
