"""Several models behind one address: who answers, who is listed, and what is refused."""

import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.models.adapters import ATTENTION, save_adapter
from tests.serve.conftest import PATIENCE, Running, in_thread, served
from tests.serve.test_errors import error_of
from tests.serve.test_keys import bearer, made

from foretoken import LLM, SamplingParams
from foretoken.cli.serve_engines import read_models
from foretoken.core.errors import InvalidRequest
from foretoken.serve.app import create_model_group
from foretoken.serve.server import Server
from foretoken.serve.settings import ServerSettings
from foretoken.serve.worker import Worker

pytestmark = pytest.mark.slow

BODY = {"prompt": "x = ", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def small(tiny_pair: Any) -> LLM:
    return LLM(str(tiny_pair.target), str(tiny_pair.draft), dtype="float32", max_num_seqs=4, isolate_failures=True)


@pytest.fixture(scope="module")
def texts(spare: LLM, small: LLM) -> dict[str, str]:
    """The texts of each model by itself, taken before the server has it: an engine belongs to one thread."""
    params = SamplingParams(max_tokens=8, temperature=0)
    own = {llm: llm.generate("x = ", params)[0].outputs[0].text for llm in (spare, small)}
    return {"stdlib": own[spare], "usual": own[spare], "tiny": own[small]}


@pytest.fixture(scope="module")
def several(spare, small, texts, tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys.json"
    settings = ServerSettings(
        model_names=("stdlib", "usual", "tiny"), key_file=keys, api_keys=("k",), allow_admin=True, stored_responses=4
    )
    key = made(keys, "one", models=("tiny",))
    each = [replace(settings, model_names=names) for names in (("stdlib", "usual"), ("tiny",))]
    workers = [Worker(spare), Worker(small)]
    app = create_model_group(workers, each, settings)
    with in_thread(Server(app, workers, drain_timeout=PATIENCE)) as url:
        yield Running(url, workers[0], app), key


@pytest.fixture
def client(several: tuple[Running, str]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{several[0].url}/v1", api_key="k", max_retries=0) as found:
        yield found


def test_each_name_is_answered_by_its_model(client: openai.OpenAI, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        answer = client.completions.create(model=name, **BODY)
        assert answer.model == name and answer.choices[0].text == text
        chunks = client.completions.create(model=name, stream=True, **BODY)
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == answer.choices[0].text


def test_models_are_listed_and_others_are_not_found(several: tuple[Running, str], client: openai.OpenAI) -> None:
    server, _ = several
    assert [model.id for model in client.models.list()] == ["stdlib", "usual", "tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    for call in (
        lambda: client.completions.create(model="gpt", prompt="x"),
        lambda: client.chat.completions.create(model="gpt", messages=[]),
        lambda: client.models.retrieve("gpt"),
    ):
        with pytest.raises(openai.NotFoundError, match="'gpt' is not served here; GET /v1/models lists") as refused:
            call()
        assert refused.value.code == "model_not_found"
    assert server.post(BODY, headers=bearer("k")).json()["model"] == "stdlib"
    messages = {"model": "gpt", "max_tokens": 2, "messages": [{"role": "user", "content": "x"}]}
    assert server.post(messages, "messages", headers=bearer("k")).json()["error"]["type"] == "not_found_error"


def test_adapters_are_for_the_model_that_they_name(several, tiny_pair, tmp_path):
    (server, limited), adapter = several, str(save_adapter(tmp_path / "own", tiny_pair.target, ATTENTION))
    wanted = {"lora_name": "own", "lora_path": adapter, "model": "tiny"}
    assert server.post(wanted, "load_lora_adapter", headers=bearer(limited)).status_code == 403
    for name in ("stdlib", "usual"):
        taken = server.post({**wanted, "lora_name": name}, "load_lora_adapter", headers=bearer("k"))
        assert taken.status_code == 400 and "of another model" in taken.json()["error"]["message"]
    misfit = server.post({**wanted, "model": "usual"}, "load_lora_adapter", headers=bearer("k"))
    assert misfit.status_code == 400
    assert server.post(wanted, "load_lora_adapter", headers=bearer("k")).json()["parent"] == "tiny"
    assert server.post({**BODY, "model": "own"}, headers=bearer("k")).json()["model"] == "own"
    assert server.post({**BODY, "model": "own"}, headers=bearer(limited)).status_code == 404
    assert server.post({"lora_name": "own"}, "unload_lora_adapter", headers=bearer("k")).json()["deleted"]
    assert server.post({**BODY, "model": "own"}, headers=bearer("k")).status_code == 404


@pytest.mark.usefixtures("preloaded_python")
def test_large_bodies_malformed_ones_and_requests_without_a_key(several: tuple[Running, str]) -> None:
    server, _ = several
    large = {**BODY, "model": "tiny", "prompt": ["x "] * 100, "user": "u" * 70_000}
    assert server.post(large, headers=bearer("k")).json()["model"] == "tiny"
    for content in (b"{", b"[1]", b""):
        assert server.post(content, headers=bearer("k")).status_code == 400
    assert error_of(server.post(BODY), 401)["code"] == "invalid_api_key"
    assert httpx.get(f"{server.url}/").status_code == 200, "the playground"


def test_a_key_for_one_of_the_models(several: tuple[Running, str]) -> None:
    server, key = several
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.completions.create(model="tiny", **BODY).model == "tiny"
        with pytest.raises(openai.NotFoundError, match="may not use"):
            client.completions.create(model="usual", **BODY)
        with pytest.raises(openai.NotFoundError, match="not served here") as refused:
            client.completions.create(model="gpt", **BODY)
        assert "usual" not in str(refused.value), "names that the key may not use"


def test_stored_responses_speculation_metrics_and_probes(several: tuple[Running, str], client: openai.OpenAI) -> None:
    server, _ = several
    stored = client.responses.create(model="stdlib", input="x", max_output_tokens=4)
    assert client.responses.retrieve(stored.id).id == stored.id
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_none")
    headers = bearer("k")
    for name in ("stdlib", "tiny"):
        assert httpx.get(f"{server.url}/v1/speculation?model={name}", headers=headers).json()["model"] == name
    off = httpx.patch(f"{server.url}/v1/speculation", json={"model": "tiny", "enabled": False}, headers=headers).json()
    assert off["model"] == "tiny" and off["paused"] == "switched off"
    assert httpx.get(f"{server.url}/v1/speculation", headers=headers).json()["enabled"]
    page = httpx.get(f"{server.url}/metrics", headers=headers).text
    assert page.count("# TYPE foretoken:steps_total counter") == 1
    assert 'foretoken:steps_total{model_name="stdlib"}' in page and 'steps_total{model_name="tiny"}' in page
    for path in ("/health", "/ping", "/ready", "/health/ready", "/health/live"):
        assert httpx.get(server.url + path).json() == {"status": "ok"}


@pytest.mark.parametrize(
    "content, words",
    [
        (None, "cannot read --model-config"),
        ("{", "is not JSON"),
        ("{}", "a list of at least one object"),
        ("[3]", "model 1 of"),
        ('[{"draft_model": "x"}]', "it has no model"),
        ('[{"model": "x", "modle": 1}]', "unknown key(s) in it: modle"),
        ('[{"model": "x"}, {"model": "x"}]', "names two models 'x'"),
        ('[{"model": "x", "served_model_name": []}]', "a name or a list of names"),
        ('[{"model": "x", "kv_cache_memory_bytes": "lots"}]', "a size such as 2GiB"),
        ('[{"model": "x", "tool_call_parser": "none such"}]', "none such"),
        ('[{"model": "x", "chat_template": "none.jinja"}]', "cannot read the chat template"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path, run, content, words):
    file = tmp_path / "models.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InvalidRequest) as refused:
        read_models(file)
    assert words in str(refused.value)
    said = run("serve --port 0 --model-config", str(file)).err
    assert words in said and said.count("\n") == 1


def test_a_file_of_models(tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    first = {"model": "a", "served_model_name": ["one", "two"], "kv_cache_memory_bytes": "1GiB", "max_num_seqs": 2}
    file.write_text(json.dumps([first, {"model": "b", "draft_model": "c", "max_waiting": 3}]))
    one, two = read_models(file)
    assert one.names == ("one", "two") and one.options == {"kv_cache_memory_bytes": 2**30, "max_num_seqs": 2}
    assert two.names == ("b",) and two.draft_model == "c" and two.max_waiting == 3 and one.max_waiting is None


@pytest.mark.usefixtures("preloaded_python")
def test_the_command_serves_the_models_of_a_file(tiny_pair: Any, tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    names = {"served_model_name": "tiny", "draft_model": str(tiny_pair.draft)}
    plain = {"served_model_name": "plain", "speculative_config": {"method": "none"}, "methods": []}
    file.write_text(json.dumps([{"model": str(tiny_pair.target), **more} for more in (names, plain)]))
    with served("--model-config", str(file), "--log-format", "json") as (process, said):
        first, second = (json.loads(said.readline())["message"] for _ in range(2))
        assert "tiny" in first and "GiB together" in first and "memory are free" in first
        url = second.split()[-1]
        for name, drafts in (("tiny", True), ("plain", False)):
            body = {"model": name, "prompt": [5, 6, 7], "max_tokens": 20, "ignore_eos": True, "temperature": 0}
            answer = httpx.post(f"{url}/completions", json={**body, "speculative_tokens": 3}, timeout=PATIENCE)
            record = answer.json()["metrics"]["speculative_decoding"]
            assert answer.json()["model"] == name and (record["num_draft_tokens"] > 0) == drafts
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
