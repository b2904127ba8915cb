"""Drafting in a thread, a process and a Ray actor through the configuration, and the messages in between."""

import json
import subprocess
from typing import Any

import pytest
import torch

from foretoken import LLM, SamplingParams
from foretoken.core.context import Context, Exactness
from foretoken.core.draft import Draft, PointMass, Sampled, TopPlusSampled, WithoutReplacement
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams
from foretoken.propose.per_request import FallbackProposer
from foretoken.propose.remote import Remote, RemoteConfig
from foretoken.propose.remote_wire import (
    Commit,
    DraftReply,
    EngineMessage,
    OpenSession,
    WorkerError,
    WorkerReady,
    decode,
    encode,
)

PROMPTS = ["def greet(name):\n", "class Ün", "for i in range(10):\n    print("]
PARAMS = {
    "greedy": SamplingParams(max_tokens=14, temperature=0.0),
    "drawn": SamplingParams(max_tokens=14, seed=5, exactness="distribution", top_p=0.9),
    "seeded": SamplingParams(max_tokens=14, seed=5),
}


def member(tiny_pair: Any) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(tiny_pair.draft)}


def opened(tiny_pair: Any, config: dict[str, Any]) -> LLM:
    return LLM(tiny_pair.target, speculative_config=config | {"num_speculative_tokens": 3}, dtype="float32")


def remote_llm(tiny_pair: Any, **keys: Any) -> LLM:
    return opened(tiny_pair, {"method": "remote", "member": member(tiny_pair), **keys})


def remote_of(llm: LLM) -> Remote:
    proposer = llm.engine.proposer
    assert isinstance(proposer, FallbackProposer) and isinstance(proposer.inner, Remote)
    return proposer.inner


def texts(llm: LLM) -> dict[str, list[tuple[int, ...]]]:
    return {name: [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)] for name, params in PARAMS.items()}


def accepted(llm: LLM) -> list[Any]:
    return [o.outputs[0].stats.accepted_per_position for o in llm.generate(PROMPTS, PARAMS["drawn"])]


@pytest.fixture(scope="module")
def one_worker(tiny_pair: Any) -> tuple[dict[str, list[tuple[int, ...]]], list[Any]]:
    llm = opened(tiny_pair, member(tiny_pair))
    return texts(llm), accepted(llm)


def test_a_thread_gives_the_text_of_one_worker(tiny_pair: Any, one_worker: Any) -> None:
    llm = remote_llm(tiny_pair, transport="thread", ahead=2, threads=1)
    assert (texts(llm), accepted(llm)) == one_worker
    assert remote_of(llm).drafts_needed > 0
    remote_of(llm).close()


@pytest.mark.parametrize("method", ["vocabulary", "ngram", "suffix"])
@pytest.mark.slow
def test_other_methods_draft_the_same_remotely(tiny_pair: Any, method: str) -> None:
    own = {"method": method} | ({"model": str(tiny_pair.draft)} if method == "vocabulary" else {})
    there = opened(tiny_pair, {"method": "remote", "member": own, "transport": "thread"})
    here = opened(tiny_pair, own)
    assert (texts(there), accepted(there)) == (texts(here), accepted(here))
    remote_of(there).close()


def test_a_mixture_may_have_a_remote_member(tiny_pair: Any, one_worker: Any) -> None:
    own = {"method": "remote", "member": member(tiny_pair), "transport": "thread"}
    llm = opened(tiny_pair, {"method": "mixture", "members": [{"method": "suffix"}, own]})
    result = texts(llm)
    assert {name: result[name] for name in ("greedy", "seeded")} == {
        name: one_worker[0][name] for name in ("greedy", "seeded")
    }


@pytest.mark.slow
def test_a_process_gives_the_text_of_one_worker_and_may_die(tiny_pair, one_worker, caplog):
    llm = remote_llm(tiny_pair)
    assert (texts(llm), accepted(llm)) == one_worker
    endpoint = remote_of(llm).endpoint
    process = endpoint.worker
    assert isinstance(process, subprocess.Popen) and process.poll() is None
    pieces = llm.stream(PROMPTS[0], SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True))
    next(pieces)
    process.kill()
    process.wait()
    assert next(reversed(list(pieces))).output is not None
    assert caplog.text.count("continues without drafts") == 1
    assert texts(llm)["greedy"] == one_worker[0]["greedy"]
    llm.engine.check_integrity()
    endpoint.close()
    endpoint.close()


@pytest.mark.usefixtures("preloaded_python")
@pytest.mark.slow
def test_a_worker_ends_with_its_engine(tiny_pair: Any) -> None:
    llm = remote_llm(tiny_pair)
    process = remote_of(llm).endpoint.worker
    assert process.poll() is None
    remote_of(llm).close()
    assert process.poll() is not None


@pytest.mark.slow
def test_a_ray_actor_gives_the_text_of_one_worker_and_may_die(tiny_pair, one_worker, caplog):
    ray = pytest.importorskip("ray")
    try:
        llm = remote_llm(tiny_pair, transport="ray", ahead=2)
        assert (texts(llm), accepted(llm)) == one_worker
        ray.kill(remote_of(llm).endpoint.worker)
        assert texts(llm) == one_worker[0] | {"drawn": texts(llm)["drawn"]}
        assert caplog.text.count("continues without drafts") == 1
    finally:
        ray.shutdown()


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({}, "needs a 'member'"),
        ({"member": {"method": "ngram", "num_speculative_tokens": 3}}, "num_speculative_tokens belongs beside"),
        ({"member": {"method": "ngram"}, "transport": "post"}, "process, thread, ray"),
        ({"member": {"method": "ngram"}, "address": "auto"}, "for transport 'ray'"),
        ({"member": {"method": "ngram"}, "ahead": -1}, "ahead must be an integer"),
        ({"member": {"method": "ngram"}, "threads": 0}, "threads must be an integer"),
        ({"member": {"method": "ngram"}, "timeout": "long"}, "timeout must be a number"),
    ],
)
def test_bad_configurations_are_refused(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        RemoteConfig(**keys)


@pytest.mark.parametrize(
    ("own", "error", "says"),
    [
        ({"method": "draft_model", "model": "/nowhere"}, ModelLoadError, "nowhere"),
        ({"method": "draft_model"}, InvalidRequest, "needs a draft"),
        ({"method": "guess"}, InvalidRequest, "'guess' is not known"),
        ({"method": "recycling"}, InvalidRequest, "learns from the target's rows"),
        ({"method": "none"}, InvalidRequest, "drafts nothing"),
        ({"method": "medusa", "model": "ZOO"}, InvalidRequest, "needs the target itself"),
    ],
)
def test_loading_errors_of_a_worker_are_raised_in_the_engine(tiny_pair, own, error, says):
    from foretoken import zoo

    if own.get("model") == "ZOO":
        own = own | {"model": str(zoo.path("medusa"))}
    with pytest.raises(error, match=says):
        opened(tiny_pair, {"method": "remote", "member": own, "transport": "thread"})


def test_models_of_its_own_and_live_targets_are_refused(tiny_pair: Any) -> None:
    with pytest.raises(InvalidRequest, match="name it in its 'member'"):
        remote_llm(tiny_pair, model=str(tiny_pair.draft))


def test_messages_are_decoded_unchanged() -> None:
    law = SamplingLaw(temperature=0.1 + 0.2, top_k=3, logit_bias=((4, -0.3),), bad_words=((1, 2), (3,)), end_ids=(5,))
    context = Context(9, [1, 2, 3], 2, law, Streams(2**127 + 5), Exactness.TRAJECTORY, prediction=(7, 8), source=(6,))
    opening = OpenSession.of(4, context)
    assert opening is not None
    commits = Commit(4, (5, 6), 3, (0,), "stop"), Commit(4, (7,), 0), Commit(4, (), 2, requested=True)
    message = EngineMessage((1, 2), (opening,), commits)
    back = decode(encode(message))
    assert (back.closed, back.committed) == (message.closed, message.committed)
    counterpart = back.opened[0].context()
    assert (counterpart.id, counterpart.tokens, counterpart.prompt_length, counterpart.law) == (4, [1, 2, 3], 2, law)
    assert (counterpart.streams, counterpart.exactness, counterpart.prediction, counterpart.source) == (
        context.streams,
        context.exactness,
        context.prediction,
        context.source,
    )
    assert decode(encode(WorkerReady(True, False))) == WorkerReady(True, False)
    assert decode(encode(WorkerError("ValueError", "ü"))) == WorkerError("ValueError", "ü")
    json.loads(encode(WorkerReady(True, False))[8:])


@pytest.mark.parametrize("kind", [None, Sampled, WithoutReplacement, TopPlusSampled])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_drafts_are_decoded_bit_by_bit(kind: Any, dtype: torch.dtype) -> None:
    rows = torch.tensor([[0.1, 0.2, 0.7], [1 / 3, 1 / 3, 1 / 3], [0.0, 0.0, 1.0]], dtype=dtype)
    scores = (-0.1, -1 / 3, -2.0)
    draft = Draft((2, 0, 2), (-1, -1, 0), PointMass() if kind is None else kind(rows), scores)
    (back,) = decode(encode((DraftReply(3, 5, (4,), 3, draft),)))
    assert (back.session_id, back.length, back.assumed, back.budget) == (3, 5, (4,), 3)
    assert (back.draft.ids, back.draft.parents, type(back.draft.law)) == (draft.ids, draft.parents, type(draft.law))
    assert back.draft.scores == scores
    if kind is not None:
        assert torch.equal(back.draft.law.probs, rows) and back.draft.law.probs.dtype == dtype
    (empty,) = decode(encode((DraftReply(3, 5, (), 3, Draft.empty()),)))
    assert not len(empty.draft)
