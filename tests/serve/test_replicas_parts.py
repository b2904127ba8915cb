"""Parts of the front, without Ray: what it reads of a request, whom it asks, how a stream goes on."""

import asyncio
import copy
import json
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.core import CounterMetricFamily
from starlette.types import Message
from tests.serve.test_keys import bearer, made
from tests.serve.test_replicas_replay import completion, texts

from foretoken import LLM, SamplingParams
from foretoken.core.errors import InvalidRequest
from foretoken.serve.json_body import read_object
from foretoken.serve.metrics import replica_metrics
from foretoken.serve.replicas import ReplicaScale, share
from foretoken.serve.replicas.forwarding import (
    BLOCK,
    BLOCKS,
    Forwarded,
    PrefilledBlocks,
    ReplicaLoad,
    ReplicaLost,
    prefix_hashes,
    ranked,
    repeatable,
)
from foretoken.serve.replicas.front import LOSSES, Front, create_front
from foretoken.serve.replicas.replica import Replica, ReplicaConfig, replica_seed
from foretoken.serve.settings import ServerSettings

SYSTEM = "You are brief. " * 100


@pytest.mark.parametrize(
    "body, same",
    [
        ({"temperature": 0}, True),
        ({"seed": 0}, True),
        ({"seed": 3, "exactness": "trajectory"}, True),
        ({}, False),
        ({"seed": 3, "exactness": "distribution"}, False),
        ({"temperature": 0, "exactness": "lossy-typical"}, False),
        ({"temperature": 0, "tools": [{}]}, False),
        ({"seed": 3, "return_steps": True}, False),
        ({"seed": 3, "logprobs": 0}, False),
        ({"seed": 3, "logprobs": True}, False),
        ({"seed": 3, "logprobs": False}, True),
        ({"temperature": 0.5}, False),
        ({"temperature": 0, "exactness": "distribution"}, True),
    ],
)
def test_which_streams_can_be_told_again(body: dict[str, Any], same: bool) -> None:
    assert repeatable(body) == same


def test_prompts_of_another_scope_have_no_beginning_in_common() -> None:
    body, keys = {"prompt": SYSTEM}, ("k", "l")

    def sent(key: str, shared: bool = False, **extra: Any) -> tuple[int, ...]:
        replicas = Scripted(WHOLE)
        settings = ServerSettings(api_keys=keys, share_cache_across_keys=shared)
        asked(replicas, {**body, **extra}, settings, {"Authorization": f"Bearer {key}"})
        return replicas.asked[0].prefix_hashes

    assert sent("k") == sent("k") != () and not set(sent("k")) & set(sent("l"))
    assert sent("k", True) == sent("l", True) == prefix_hashes(body)
    assert not set(sent("k")) & set(sent("k", cache_salt="s")) and sent("k", cache_salt=["s"]) == sent("k")
    assert not set(prefix_hashes(body, "s")) & set(prefix_hashes(body, "t"))
    assert not set(prefix_hashes({**body, "model": "adapter"})) & set(prefix_hashes(body))


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"3", b"\xff", b"[" * 100_000])
def test_bodies_that_say_nothing(content: bytes) -> None:
    assert asyncio.run(read_object(content)) == {} and prefix_hashes({}) == ()


def test_prompts_that_begin_alike() -> None:
    one, two = prefix_hashes({"prompt": SYSTEM + "one" * 100}), prefix_hashes({"prompt": SYSTEM + "two" * 100})
    common = sum(a == b for a, b in zip(one, two, strict=True))
    assert common == len(SYSTEM) // BLOCK < len(one)
    assert prefix_hashes({"prompt": [SYSTEM + "one" * 100, "x"]}) == one
    assert prefix_hashes({"prompt": "x" * (BLOCK - 1)}) == () and len(prefix_hashes({"prompt": "x" * 10**6})) == BLOCKS
    ids = list(range(500))
    assert prefix_hashes({"prompt": ids}) == prefix_hashes({"prompt": [ids]}) != ()
    chats = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}] for text in ("a", "b")]
    first, second = (prefix_hashes({"messages": chat}) for chat in chats)
    assert first[:4] == second[:4] != prefix_hashes({"messages": chats[0], "tools": [{"type": "function"}]})[:4]
    for name, last in (("input", "instructions"), ("messages", "system")):
        first, second = (prefix_hashes({name: [{"content": text}], last: SYSTEM}) for text in ("a", "b"))
        assert first[:4] == second[:4] != ()


def test_beginnings_are_remembered_by_reader() -> None:
    seen = PrefilledBlocks(remembered=4)
    seen.note((1, 2, 3), "a")
    seen.note((1, 2), "b")
    assert [seen.known((1, 2, 3, 4), name) for name in "abc"] == [3, 2, 0]
    seen.note((7, 8), "c")  # five blocks are one too many: the one not read for longest goes
    assert seen.known((1, 2, 3), "a") == 2 and seen.known((7, 8), "c") == 2
    seen.forget("a")
    assert seen.known((1, 2), "a") == 0 and seen.known((1, 2), "b") == 2


def test_replicas_are_ranked_by_load_and_prefix_affinity() -> None:
    assert ranked({"a": 4, "b": 0}, {"a": 5, "b": 0}, slack=4) == ["a", "b"]
    assert ranked({"a": 5, "b": 0}, {"a": 5, "b": 0}, slack=4) == ["b", "a"]
    assert ranked({"a": 2, "b": 1}, {"a": 0, "b": 0}, slack=4) == ["b", "a"]
    assert ranked({"a": 3, "b": 3, "c": 9}, {"a": 1, "b": 2, "c": 7}, slack=4) == ["b", "a", "c"]
    firsts = Counter(ranked({"a": 0, "b": 0}, {"a": 0, "b": 0}, slack=4)[0] for _ in range(200))
    assert min(firsts["a"], firsts["b"]) > 50


def test_a_load_counts_the_requests_of_each_replica() -> None:
    ledger = ReplicaLoad()
    ledger.add("a", "1")
    ledger.add("a", "2")
    ledger.remove("a", "1")
    ledger.remove("a", "1")
    assert ledger.load("a") == 1 and ledger.load("b") == 0
    ledger.forget("a")
    assert ledger.load("a") == 0


# the front before replicas that are lost as planned


class Scripted:
    """Replicas that answer by a script, one entry for each time one is asked; an exception ends an answer."""

    def __init__(self, *answers: Sequence[Any]) -> None:
        self.answers, self.asked, self.closed = list(answers), [], 0

    async def respond(self, request: Forwarded) -> AsyncGenerator[Message, None]:
        self.asked.append(request)
        name = f"r{len(self.asked)}"
        try:
            for part in self.answers.pop(0):
                if isinstance(part, Exception):
                    raise part
                if part is None:
                    await asyncio.Event().wait()
                yield {**part, "replica": name}
        finally:
            self.closed += 1

    async def metrics(self) -> list[tuple[str, Any]]:
        return [("r1", [])] if self.answers else []


def start(status: int = 200, kind: str = "text/event-stream; charset=utf-8") -> Message:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind.encode())]}


def part(body: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


WHOLE = [start(kind="application/json"), part(b'{"id":"cmpl-1"}', False)]
LOST = ReplicaLost("it died")
END = part(b"data: [DONE]\n\n", False)


def asked(
    replicas: Scripted,
    body: dict[str, Any],
    settings: ServerSettings | None = None,
    headers: dict[str, str] | None = None,
    path: str = "/v1/completions",
) -> tuple[httpx.Response, Front]:
    settings = settings or ServerSettings()
    front = Front(replicas, settings)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(create_front(front, settings), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            return await client.post(path, json=body, headers=headers)

    answer = asyncio.run(ask())
    assert not front.busy and replicas.closed == len(replicas.asked)
    return answer, front


def test_an_answer_passes_as_it_is() -> None:
    replicas = Scripted(WHOLE)
    answer, front = asked(replicas, {"prompt": "x"})
    assert answer.content == b'{"id":"cmpl-1"}' and answer.headers["x-foretoken-replica"] == "r1"
    assert json.loads(replicas.asked[0].body) == {"prompt": "x"} and not any(front.failovers.values())


@pytest.mark.parametrize("lost", [[LOST], [start(kind="application/json"), LOST], [WHOLE[0], part(b'{"id"'), LOST]])
def test_nothing_sent_is_asked_again(lost: list[Any]) -> None:
    answer, front = asked(Scripted(lost, [LOST], WHOLE), {"prompt": "x"})
    assert answer.status_code == 200 and answer.content == b'{"id":"cmpl-1"}'
    assert front.failovers["retried"] == 1


def test_the_lost_are_avoided() -> None:
    replicas = Scripted([start(), LOST], [ReplicaLost("x", "b")], [start(), part(completion(0, "a", "stop")), END])
    asked(replicas, {"prompt": "x", "stream": True})
    assert [request.avoid for request in replicas.asked] == [frozenset(), {"r1"}, {"r1", "b"}]


def test_a_request_that_ends_replicas_is_given_up() -> None:
    answer, front = asked(Scripted(*[[LOST]] * 9), {"prompt": "x"})
    assert answer.status_code == 503 and f"{LOSSES} replicas were lost" in answer.json()["error"]["message"]
    assert front.failovers["broken"] == 1


BEGUN = [start(), part(completion(0, "de")), LOST]
AGAIN = [start(), part(completion(0, "d", name="z")), part(completion(0, "ef", "stop", name="z")), END]


def test_a_stream_goes_on() -> None:
    answer, front = asked(Scripted(BEGUN, AGAIN), {"prompt": "x", "stream": True, "seed": 1})
    assert answer.content == completion(0, "de") + completion(0, "f", "stop") + b"data: [DONE]\n\n"
    assert front.failovers["replayed"] == 1


def test_a_stream_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.serve.replicas.front.RETRY_SECONDS", 0)
    full = [start(429, "application/json"), part(b"{}", False)]
    answer, _ = asked(Scripted(BEGUN, full, full, AGAIN), {"prompt": "x", "stream": True, "temperature": 0})
    assert answer.content.endswith(b"data: [DONE]\n\n") and b"{}" not in answer.content


@pytest.mark.parametrize(
    "body, again, words",
    [({}, [], "with a seed"), ({"seed": 1}, [[start(), part(completion(0, "xy")), END]], "another text")],
)
def test_a_stream_that_cannot_go_on_says_so(body: dict[str, Any], again: list[Any], words: str) -> None:
    answer, front = asked(Scripted(BEGUN, *again), {"prompt": "x", "stream": True, **body})
    *_, last, rest = answer.content.split(b"\n\n")
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert rest == b"" and error["type"] == "server_error" and words in error["message"]
    assert b"[DONE]" not in answer.content and front.failovers["broken"] == 1


@pytest.mark.parametrize("path, kind", [("/v1/messages", "overloaded_error"), ("/v1/responses", "unavailable")])
def test_other_streams_end_with_an_error_of_their_own_format(path: str, kind: str) -> None:
    begun = [start(), part(b'event: x\ndata: {"type":"x"}\n\n'), LOST]
    answer, front = asked(Scripted(begun, AGAIN), {"stream": True, "seed": 1, "temperature": 0}, path=path)
    *_, last, rest = answer.content.split(b"\n\n")
    name, data = last.split(b"\n")
    error = json.loads(data.removeprefix(b"data: "))
    assert name == b"event: error" and rest == b"" and error["type"] == "error" and front.failovers["broken"] == 1
    assert error["error"]["type"] == kind if "error" in error else error["code"] == kind


def test_identifiers_reach_the_replica() -> None:
    for headers in ({}, {"X-Request-Id": "mine"}):
        replicas = Scripted(WHOLE)
        answer, _ = asked(replicas, {"prompt": "x"}, headers=headers)
        passed = [value for name, value in replicas.asked[0].scope["headers"] if name == b"x-request-id"]
        assert passed == [answer.headers["x-request-id"].encode()]
        assert answer.headers["x-request-id"] == headers.get("X-Request-Id", answer.headers["x-request-id"])


def test_a_slow_replica_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.serve.replicas.front.GRACE", 0.05)
    quick = ServerSettings(timeout=0.05)
    assert asked(Scripted([None]), {"prompt": "x"}, quick)[0].json()["error"]["code"] == "timeout"
    begins = ServerSettings(timeout=2.0)  # time for the first part, however busy the machine is
    answer, _ = asked(Scripted([start(), part(completion(0, "a")), None]), {"stream": True}, begins)
    assert answer.content.startswith(completion(0, "a")) and b'"code":"timeout"' in answer.content


def test_the_front_checks_keys_sizes_and_concurrency() -> None:
    replicas = Scripted()
    assert asked(replicas, {"prompt": "x"}, ServerSettings(api_keys=("k",)))[0].status_code == 401
    assert asked(replicas, {"prompt": "x" * 99}, ServerSettings(max_body=20))[0].status_code == 413
    assert asked(replicas, {"prompt": "x"}, ServerSettings(max_concurrency=0))[0].status_code == 429
    assert not replicas.asked


def test_draining_and_abandoning() -> None:
    replicas = Scripted([start(), part(completion(0, "a")), None], WHOLE)
    front = Front(replicas, ServerSettings())
    transport = httpx.ASGITransport(create_front(front, ServerSettings()))

    async def use() -> None:
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            running = asyncio.create_task(client.post("/v1/completions", json={"stream": True}))
            while not front.busy:
                await asyncio.sleep(0.01)
            assert (await client.get("/health")).status_code == 200
            front.draining = True
            assert (await client.get("/health")).status_code == 503
            assert (await client.post("/v1/completions", json={})).status_code == 503
            assert (await client.get("/v1/models")).status_code == 200
            front.abandon()
            assert b'"code":"unavailable"' in (await running).content
            front.draining = False
            assert (await client.get("/health")).json()["error"]["message"] == "no replica is running"

    asyncio.run(use())
    assert not front.busy


def test_one_page_of_metrics() -> None:
    families = {}
    for name, count in (("a", 1), ("b", 2)):
        family = CounterMetricFamily("foretoken:steps", "Steps.", labels=["model_name"])
        family.add_metric(["m"], count)
        families[name] = [family]
    page = replica_metrics(families, Counter(retried=3)).render().body.decode()
    assert page.count("# TYPE foretoken:steps_total counter") == 1
    assert 'foretoken:steps_total{model_name="m",replica="b"} 2.0' in page
    assert "foretoken:replicas 2.0" in page and 'foretoken:failovers_total{outcome="retried"} 3.0' in page


# one replica, in this process


@pytest.mark.slow
def test_a_replica_answers_as_a_server_does(spare: LLM) -> None:
    """Whole, streamed, cancelled; and once its engine is dead, nothing it says of that gets out."""
    options = {"dtype": "float32", "max_num_seqs": 4, "seed": 5}
    settings = ServerSettings(api_keys=("k",))
    config = ReplicaConfig(
        model=spare.model, draft_model=spare.draft_model, options=options, settings=settings, created=7
    )
    replica = Replica(config, "here")
    asking = {"prompt": "x = ", "max_tokens": 12, "temperature": 0}

    def forwarded(
        path: str = "/v1/completions", method: str = "POST", body: dict[str, Any] = asking, **more: Any
    ) -> Forwarded:
        headers = [(b"authorization", b"Bearer k"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": headers}
        return Forwarded(scope, json.dumps({**body, **more}).encode())

    async def whole(request: Forwarded) -> tuple[int, bytes]:
        messages = [message async for message in replica.respond(request)]
        assert {message["replica"] for message in messages} == {"here"}
        return messages[0]["status"], b"".join(message.get("body", b"") for message in messages)

    async def use() -> None:
        status, body = await whole(forwarded())
        wanted = spare.generate("x = ", SamplingParams(temperature=0, max_tokens=12))[0].outputs[0].text
        assert status == 200 and json.loads(body)["choices"][0]["text"] == wanted
        assert texts((await whole(forwarded(stream=True)))[1].split(b"\0"))[0] == wanted
        assert json.loads((await whole(forwarded("/v1/models", "GET")))[1])["data"][0]["created"] == 7
        assert (await whole(forwarded(temperature=-1)))[0] == 400
        messages = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
        others: dict[str, dict[str, Any]] = {
            "/v1/chat/completions": messages,
            "/v1/responses": {"input": "x", "max_output_tokens": 4},
            "/v1/messages": messages,
            "/v1/messages/count_tokens": messages,
            "/tokenize": {"prompt": "x"},
            "/detokenize": {"tokens": [1]},
        }
        for path, body in others.items():
            assert (await whole(forwarded(path, body=body)))[0] == 200
        long = replica.respond(forwarded(stream=True, max_tokens=4000, ignore_eos=True))
        assert (await anext(long))["status"] == 200
        assert replica.worker.busy
        await long.aclose()
        assert not replica.worker.busy
        name, families = await replica.metrics()
        assert name == "here" and any(family.name == "foretoken:steps" for family in families)
        replica.worker.dead = ReplicaLost("planted")
        for dead in (whole(forwarded()), replica.metrics(), replica.check_health()):
            with pytest.raises(ReplicaLost) as caught:
                await dead
            assert caught.value.replica == "here" == copy.copy(caught.value).replica

    asyncio.run(use())
    replica.worker.close()


def test_replicas_draw_other_numbers() -> None:
    assert len({replica_seed(seed, name) for seed in (0, 1) for name in "ab"}) == 4
    assert replica_seed(3, "a") == replica_seed(3, "a")


@pytest.mark.parametrize(
    "nodes, count, each",
    [
        ([2.0], 4, 0.5),
        ([1.0, 1.0], 4, 0.5),
        ([8.0, 2.0], 2, 4.0),
        ([4.0, 4.0, 4.0], 4, 2.0),
        ([16.0], 3, 5.0),
        ([2.0], 3, 0.6666),
        ([3.0, 0.0], 1, 3.0),
        ([2.0], 1, 2.0),
    ],
)
def test_a_fair_share_of_cores(nodes: list[float], count: int, each: float) -> None:
    assert share(nodes, count) == each
    with pytest.raises(InvalidRequest, match="no cores"):
        share([], count)


@pytest.mark.parametrize("wrong", [{"max_replicas": 1}, {"cpus": 0.0}])
def test_scales_that_are_none(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        ReplicaScale(replicas=2, **wrong)


def test_a_replica_tells_and_changes_its_speculation(spare: LLM) -> None:
    options = {"dtype": "float32", "max_num_seqs": 4, "speculative_config": {"num_speculative_tokens": 2}}
    replica = Replica(ReplicaConfig(options=options, settings=ServerSettings(api_keys=("k",))), "here")
    front = Front(Alone(replica), ServerSettings(api_keys=("k",), allow_admin=True))
    app = create_front(front, ServerSettings(api_keys=("k",), allow_admin=True))

    async def use() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://front", headers=bearer("k")) as client:
            found = (await client.get("/v1/speculation")).json()
            assert found["enabled"] and found["replicas"]["here"]["controller"]["max_tokens"] == 2
            assert (await client.patch("/v1/speculation", json={"enabled": False})).json()["paused"] == "switched off"
            wrong = await client.patch("/v1/speculation", json={"method": "x"})
            assert wrong.status_code == 400 and "loaded" in wrong.json()["error"]["message"]
            answer = await client.post("/v1/completions", json={"prompt": "x = ", "max_tokens": 12})
            assert answer.json()["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
            assert (await client.get("/v1/speculation", headers=bearer("no"))).status_code == 401

    try:
        asyncio.run(use())
    finally:
        replica.worker.close()


def test_keys_of_a_file_hold_before_replicas(tiny_pair: Any, tmp_path: Path) -> None:
    """The front knows the file; a replica trusts what it says of a key, and tells what a request used."""
    file = tmp_path / "keys.json"
    limited = made(file, "limited", tokens_per_minute=50, models=("tiny",))
    other = made(file, "other", models=("none",))
    settings = ServerSettings(model_names=("tiny",), key_file=file)
    options = {"dtype": "float32", "max_num_seqs": 4}
    models = {"model": str(tiny_pair.target), "draft_model": str(tiny_pair.draft)}
    replica = Replica(ReplicaConfig(**models, options=options, settings=settings), "here")
    app = create_front(Front(Alone(replica), settings), settings)
    body = {"prompt": [5, 6, 7], "max_tokens": 60, "ignore_eos": True}

    async def use() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:

            async def status(key: str, **more: Any) -> int:
                return (await client.post("/v1/completions", json={**body, **more}, headers=bearer(key))).status_code

            assert (await client.get("/v1/models", headers=bearer(limited))).json()["data"][0]["id"] == "tiny"
            assert (await client.get("/v1/models", headers=bearer(other))).json()["data"] == []
            assert await status("ft-wrong") == 401 and await status(other) == 404
            assert await status(limited, stream=True) == 200
            assert await status(limited) == 429, "63 tokens of 50 were used, as the replica told"

    try:
        asyncio.run(use())
    finally:
        replica.worker.close()


class Alone:
    """One replica in this process, as the front sees replicas."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    async def respond(self, request: Forwarded) -> AsyncGenerator[Message, None]:
        async for message in self._replica.respond(request):
            yield message

    async def metrics(self) -> Sequence[tuple[str, Any]]:
        return [await self._replica.metrics()]

    async def speculation(self, body: bytes | None) -> Sequence[tuple[str, int, dict[str, Any]]]:
        return [await self._replica.speculation(body)]
