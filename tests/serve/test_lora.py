"""LoRA adapters behind the API: requests choose one as their model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.models.adapters import ATTENTION, save_adapter
from tests.serve.conftest import Run, Running, running

from foretoken import LLM
from foretoken.cli.serve_engines import read_models
from foretoken.core.errors import InvalidRequest
from foretoken.serve.settings import ServerSettings

BODY = {"prompt": "def greet(name):\n", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def server(tiny_pair: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("adapters")
    paths = {name: str(save_adapter(folder / name, tiny_pair.target, ATTENTION, seed=i)) for i, name in enumerate("ab")}
    llm = LLM(tiny_pair.target, tiny_pair.draft, dtype="float32", lora=paths, enable_prefix_caching=True)
    with running(llm, ServerSettings(model_names=("base", "usual"), lora_modules=paths, allow_admin=True)) as found:
        yield found


def test_adapters_are_listed_with_their_model(server: Running) -> None:
    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [(each["id"], each["parent"]) for each in listed] == [
        ("base", None),
        ("usual", None),
        ("a", "base"),
        ("b", "base"),
    ]
    assert listed[2]["root"].endswith("/a") and listed[0]["root"] == server.worker.llm.model
    assert httpx.get(f"{server.url}/v1/models/b").json() == listed[3]


def test_requests_choose_an_adapter_as_their_model(server: Running) -> None:
    answers = {name: server.post({**BODY, "model": name}).json() for name in ("base", "a", "b", "usual")}
    assert all(answer["model"] == name for name, answer in answers.items())
    texts = {name: answer["choices"][0]["text"] for name, answer in answers.items()}
    assert texts["base"] == texts["usual"] and len({texts["base"], texts["a"], texts["b"]}) == 3
    assert server.worker.llm.adapters.names == ("a", "b")
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8, "temperature": 0}
    streamed = server.client.completions.create(model="a", stream=True, **BODY)
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == texts["a"]
    assert server.post({**chat, "model": "c"}, "chat/completions").json()["error"]["code"] == "model_not_found"


def test_adapters_come_and_go_while_requests_run(server: Running, tiny_pair: Any, tmp_path: Path) -> None:
    texts = {name: server.post({**BODY, "model": name}).json()["choices"][0]["text"] for name in ("base", "a", "b")}
    paths = {entry["id"]: entry["root"] for entry in httpx.get(f"{server.url}/v1/models").json()["data"]}
    long = {**BODY, "max_tokens": 200, "ignore_eos": True, "model": "c"}
    loaded = server.post({"lora_name": "c", "lora_path": paths["a"]}, "load_lora_adapter")
    assert loaded.status_code == 200 and loaded.json()["parent"] == "base" and loaded.json()["root"] == paths["a"]
    whole = server.post(long).json()["choices"][0]["text"]
    assert whole.startswith(texts["a"])
    taken = server.post({"lora_name": "c", "lora_path": paths["b"]}, "load_lora_adapter")
    assert taken.status_code == 400 and "give load_inplace" in taken.json()["error"]["message"]
    with server.client.completions.create(
        **{key: long[key] for key in BODY}, model="c", stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        pieces = [next(stream).choices[0].text]
        body = {"lora_name": "c", "lora_path": paths["b"], "load_inplace": True}
        assert server.post(body, "load_lora_adapter").status_code == 200
        pieces += [chunk.choices[0].text for chunk in stream if chunk.choices]
    assert whole.startswith("".join(pieces))  # begun with the old adapter, and finished with it
    assert server.post({**BODY, "model": "c"}).json()["choices"][0]["text"] == texts["b"]
    gone = server.post({"lora_name": "c"}, "unload_lora_adapter")
    assert gone.json() == {"id": "c", "object": "model", "deleted": True}
    assert server.post({**BODY, "model": "c"}).json()["error"]["code"] == "model_not_found"
    assert len(server.worker.llm.target.adapters) == 2


def test_an_adapter_whose_last_request_is_abandoned_is_freed(server: Running) -> None:
    paths = {entry["id"]: entry["root"] for entry in httpx.get(f"{server.url}/v1/models").json()["data"]}
    assert server.post({"lora_name": "c", "lora_path": paths["a"]}, "load_lora_adapter").status_code == 200
    long = {**BODY, "max_tokens": 400, "n": 4, "ignore_eos": True, "model": "c"}
    with server.streaming(long):
        assert server.post({"lora_name": "c"}, "unload_lora_adapter").status_code == 200
    server.until(lambda: len(server.worker.llm.target.adapters) == 2)


@pytest.mark.parametrize(
    "body, message",
    [
        ({"lora_name": "base", "lora_path": "x"}, "'base' is a name of another model here"),
        ({"lora_name": "d", "lora_path": "/nowhere"}, "there is no folder '/nowhere'"),
        ({"lora_name": "d", "lora_path": "/" + "x" * 5000}, "lora_path"),
        ({"lora_name": "d"}, "lora_path"),
        ({"lora_name": "", "lora_path": "x"}, "lora_name"),
    ],
)
def test_wrong_adapters_are_refused(server: Running, body: dict[str, Any], message: str) -> None:
    refused = server.post(body, "load_lora_adapter")
    assert refused.status_code == 400 and message in json.dumps(refused.json(), ensure_ascii=False)
    assert server.post({"lora_name": "d"}, "unload_lora_adapter").status_code == 400


def test_the_command_line_names_what_is_wrong(run: Run) -> None:
    assert "takes NAME=PATH, got 'sql'" in run("serve --lora-modules sql").err
    assert "two adapters 'a'" in run("serve --lora-modules a=x a=y").err
    assert "two adapters 'a'" in run("serve --lora-modules a=x --lora-modules a=y").err
    as_json = json.dumps({"name": "m", "path": "x", "base_model_name": "y"})
    clash = run("serve --served-model-name m --lora-modules", as_json).err
    assert "names 'm', which is a name of the model" in clash
    assert "there is no folder '/nowhere'" in run("serve --lora-modules a=/nowhere b=/nowhere").err


def test_a_model_of_several_may_have_adapters(tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    file.write_text(json.dumps([{"model": "m", "lora_modules": {"a": "x"}}]))
    assert read_models(file)[0].options["lora"] == {"a": "x"}
    file.write_text(json.dumps([{"model": "m", "lora_modules": {"a": "x"}}, {"model": "a"}]))
    with pytest.raises(InvalidRequest, match="two models 'a'"):
        read_models(file)
    file.write_text(json.dumps([{"model": "m", "lora_modules": ["a"]}]))
    with pytest.raises(InvalidRequest, match="must be an object of paths by name"):
        read_models(file)
