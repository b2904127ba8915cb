"""/v1/speculation: what it tells, who may change it, and that no change shows in a text."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.serve.conftest import PATIENCE, Running, chunks_of, running
from tests.serve.test_errors import error_of
from tests.serve.test_keys import bearer, made

from foretoken import LLM, zoo
from foretoken.control.fixed import Fixed
from foretoken.control.limited import Limited
from foretoken.serve.errors import ServerUnavailable
from foretoken.serve.settings import ServerSettings

pytestmark = pytest.mark.slow

BODY = {"prompt": "def read_lines(path):\n", "max_tokens": 60, "ignore_eos": True}
RESET = {"enabled": True, "method": "draft_model", "max_draft_tokens": None}


@pytest.fixture
def open_server(spare: LLM) -> Iterator[Running]:
    with running(spare, ServerSettings(allow_admin=True)) as found:
        yield found
        change(found, RESET)


def change(server: Running, body: Any, **options: Any) -> httpx.Response:
    return httpx.patch(f"{server.url}/v1/speculation", json=body, timeout=PATIENCE, **options)


def state(server: Running) -> dict[str, Any]:
    return dict(httpx.get(f"{server.url}/v1/speculation", timeout=PATIENCE).json())


def text(server: Running, **more: Any) -> tuple[str, dict[str, Any]]:
    answer = server.post({**BODY, **more}).json()
    return answer["choices"][0]["text"], answer["metrics"]["speculative_decoding"]


def test_the_state_holds_method_controller_and_acceptance(open_server: Running) -> None:
    text(open_server, temperature=0)
    found = state(open_server)
    assert found["object"] == "speculation" and found["enabled"] and found["method"] == "draft_model"
    assert found["methods"] == ["draft_model", "prediction", "ngram"] and found["max_draft_tokens"] is None
    assert found["controller"]["name"] == "fixed" and found["controller"]["max_tokens"] == 4
    accepted = found["acceptance"]["draft_model"]
    assert accepted["num_drafts"] > 0 and accepted["mean_acceptance_length"] >= 1
    assert len(accepted["per_position"]) == 4 and all(0 <= share <= 1 for share in accepted["conditional"])


def test_an_order_that_came_too_late_is_not_carried_out(open_server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, done, free = open_server.worker, list[str](), threading.Event()

    async def orders() -> None:
        holding = asyncio.create_task(worker.between_steps(lambda: free.wait(PATIENCE)))
        await asyncio.sleep(0.05)
        with monkeypatch.context() as patched:
            patched.setattr("foretoken.serve.worker.ORDER_PATIENCE", 0.05)
            with pytest.raises(ServerUnavailable, match="did not answer within"):
                await worker.between_steps(lambda: done.append("late"))
        free.set()
        await holding
        await worker.between_steps(lambda: done.append("next"))

    asyncio.run(orders())
    assert done == ["next"]


def test_the_state_of_a_measuring_controller(noisy: Path) -> None:
    with running(LLM(zoo.path("draft"), noisy, dtype="float32", max_num_seqs=4, isolate_failures=True)) as server:
        text(server, temperature=0)
        found = state(server)
    assert found["controller"]["name"] == "goodput" and found["controller"]["max_tokens"] == 16
    assert found["controller"]["balance_seconds"] is not None
    (kind,) = found["controller"]["acceptance"]
    assert kind["temperature"] == "zero" and len(kind["accepted"]) == 16
    assert found["costs"]["pass_seconds"] and found["costs"]["plain_step_seconds"] and found["costs"]["level"] > 0
    assert found["paused"] is None or "measured" in found["paused"] or "lost" in found["paused"]
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("more", [{"temperature": 0}, {"seed": 5}, {"seed": 7, "temperature": 0.7, "top_p": 0.9}])
def test_no_change_shows_in_a_text(open_server: Running, more: dict[str, Any]) -> None:
    """Before, after, and in the middle of it."""
    before, record = text(open_server, **more)
    assert record["num_draft_tokens"]
    for wanted, drafts in (({"enabled": False}, 0), ({"enabled": True, "method": "ngram"}, None), (RESET, 4)):
        assert change(open_server, wanted).status_code == 200
        after, record = text(open_server, **more)
        assert after == before
        assert drafts is None or record["num_spec_steps"] == 0 or max(map(int, record_lengths(record))) <= drafts
        assert drafts != 0 or record["num_draft_tokens"] == 0
    long = {**BODY, **more, "max_tokens": 160, "stream": True}
    whole = open_server.post({**long, "stream": False}).json()["choices"][0]["text"]
    changes: list[dict[str, Any]] = [
        {"method": "ngram"},
        {"enabled": False},
        {"enabled": True, "max_draft_tokens": 1},
        {"method": "prediction"},
        {"max_draft_tokens": 9},
        RESET,
    ]
    done = threading.Event()

    def switch() -> None:
        while not done.is_set():
            for wanted in changes:
                assert change(open_server, wanted).status_code == 200

    switching = threading.Thread(target=switch)
    with httpx.stream("POST", f"{open_server.url}/v1/completions", json=long, timeout=PATIENCE) as answer:
        switching.start()
        read = [chunk["choices"] for chunk in chunks_of(answer.iter_lines())]
    done.set()
    switching.join(PATIENCE)
    assert "".join(choice["text"] for choices in read for choice in choices) == whole


def record_lengths(record: dict[str, Any]) -> list[str]:
    return list(record["acceptance_histogram_by_draft_length"])


def test_a_bound_holds_whatever_requests_ask_for(open_server: Running) -> None:
    assert change(open_server, {"max_draft_tokens": 2}).json()["max_draft_tokens"] == 2
    assert set(record_lengths(text(open_server, speculative_tokens=7)[1])) <= {"1", "2"}
    assert change(open_server, {"max_draft_tokens": None}).json()["max_draft_tokens"] is None
    assert "7" in record_lengths(text(open_server, speculative_tokens=7, temperature=0)[1])


def test_switching_off_and_on(open_server: Running) -> None:
    off = change(open_server, {"enabled": False}).json()
    assert off["paused"] == "switched off" and off["enabled"] is False
    assert text(open_server)[1]["num_draft_tokens"] == 0
    on = change(open_server, {"enabled": True, "method": "ngram"}).json()
    assert on["method"] == "ngram" and on["methods"][0] == "ngram" and on["paused"] is None
    served = httpx.get(f"{open_server.url}/v1/models").json()["data"][0]["speculation"]
    assert served["default"] == "ngram"
    assert text(open_server, speculative_method="draft_model", temperature=0)[1]["num_draft_tokens"] > 0


def test_running_requests_keep_their_method(open_server: Running) -> None:
    with open_server.streaming({**BODY, "max_tokens": 3000}):
        change(open_server, {"method": "ngram"})
        (sequence,) = open_server.worker.engine.running.values()
        assert open_server.worker.llm.method_of(sequence.context) == "draft_model"
    open_server.until(open_server.idle)


def test_wrong_changes_change_nothing(open_server: Running) -> None:
    for wanted, words in (
        ({"method": "telepathy"}, "one of those that are loaded"),
        ({"max_draft_tokens": 0}, "max_draft_tokens"),
        ({"max_draft_tokens": "x"}, "max_draft_tokens"),
        ({"enable": False}, "unknown field(s): enable"),
        ([1], "JSON object"),
    ):
        assert words in error_of(change(open_server, wanted), 400)["message"]
    assert error_of(change(open_server, {"model": "x"}), 404)["code"] == "model_not_found"
    page = httpx.post(
        f"{open_server.url}/v1/speculation", content='{"enabled": false}', headers={"Content-Type": "text/plain"}
    )
    assert page.status_code == 400, "what a page of another origin may send without asking"
    found = state(open_server)
    assert found["enabled"] and found["method"] == "draft_model" and found["max_draft_tokens"] is None


def test_changes_need_the_admin_scope(spare: LLM, tmp_path: Path) -> None:
    with running(spare) as server:
        assert httpx.get(f"{server.url}/v1/speculation").status_code == 200
        assert error_of(change(server, {"enabled": False}), 403)["code"] == "admin_not_allowed"
        assert error_of(httpx.post(f"{server.url}/v1/speculation/", json={}), 403)["code"] == "admin_not_allowed"
    file = tmp_path / "keys.json"
    keys = {scope: made(file, scope, scopes=(scope,)) for scope in ("generate", "metrics", "admin")}
    with running(spare, ServerSettings(key_file=file, api_keys=("plain",))) as server:
        refused = {scope: change(server, {}, headers=bearer(key)).status_code for scope, key in keys.items()}
        assert refused == {"generate": 403, "metrics": 403, "admin": 200}
        assert change(server, {}, headers=bearer("plain")).status_code == 403
        assert httpx.get(f"{server.url}/v1/speculation", headers=bearer(keys["metrics"])).status_code == 200
        assert httpx.get(f"{server.url}/v1/speculation", headers=bearer(keys["generate"])).status_code == 403


def test_limited_passes_on_what_it_does_not_bound() -> None:
    bounded = Limited(Fixed(5))
    assert bounded.budgets([], []) == [] and bounded.pause is None and bounded.describe()["max_tokens"] == 5
    bounded.limit = 0
    assert bounded.pause == "switched off"


def test_a_server_without_a_drafter_drafts_once_it_has_a_method() -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    config = {"method": "none"}
    llm = LLM(zoo.path("draft"), speculative_config=config, methods=[ngram], dtype="float32", isolate_failures=True)
    with running(llm, ServerSettings(allow_admin=True)) as server:
        repeated = {"prompt": "a = 1\nb = 1\n" * 6, "temperature": 0}
        before, record = text(server, **repeated)
        assert record["num_draft_tokens"] == 0 and state(server)["controller"]["max_tokens"] == 0
        named, record = text(server, **repeated, speculative_method="ngram")
        assert record["num_draft_tokens"] > 0 and record["num_spec_tokens"] == 3 and named == before
        changed = change(server, {"method": "ngram"}).json()
        assert changed["enabled"] and changed["method"] == "ngram" and changed["controller"]["max_tokens"] == 3
        after, record = text(server, **repeated)
        assert record["num_draft_tokens"] > 0 and after == before
        change(server, {"method": "none"})
        assert text(server, **repeated)[1]["num_draft_tokens"] == 0


def test_an_adapted_draft_is_saved_while_serving(tmp_path: Path) -> None:
    llm = LLM(zoo.path("draft"), zoo.path("draft"), adapt={"share": 0.5})
    with running(llm, ServerSettings(allow_admin=True)) as learning:
        saved = learning.post({"path": str(tmp_path / "draft")}, "save_draft")
        assert saved.json() == {"object": "draft", "path": str(tmp_path / "draft"), "updates": 0}
        assert LLM(zoo.path("draft"), tmp_path / "draft").generate("x")[0].outputs[0].token_ids
        assert "exists" in error_of(learning.post({"path": str(tmp_path / "draft")}, "save_draft"), 400)["message"]
        assert learning.post({"path": str(tmp_path / "draft"), "force": True}, "save_draft").status_code == 200


def test_a_draft_that_does_not_learn_is_not_saved(server: Running, open_server: Running, tmp_path: Path) -> None:
    body = {"path": str(tmp_path / "draft")}
    assert "adapt=True" in error_of(open_server.post(body, "save_draft"), 400)["message"]
    assert server.post(body, "save_draft").status_code == 403  # no administrator
