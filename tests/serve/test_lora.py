"""LoRA adapters behind the API: requests choose one as their model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.models.adapters import ATTENTION, save_adapter
from tests.serve.conftest import Running, running

from foretoken import LLM
from foretoken.cli.main import main
from foretoken.cli.serve_models import read_models
from foretoken.core.errors import InvalidRequest
from foretoken.serve.limits import ServerSettings

BODY = {"prompt": "def greet(name):\n", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def server(tiny_pair: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("adapters")
    paths = {name: str(save_adapter(folder / name, tiny_pair.target, ATTENTION, seed=i)) for i, name in enumerate("ab")}
    llm = LLM(tiny_pair.target, tiny_pair.draft, dtype="float32", lora=paths, enable_prefix_caching=True)
    with running(llm, ServerSettings(model_names=("base", "usual"), lora_modules=paths)) as found:
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
    llm = server.worker.llm
    assert llm.target.adapters == ("a", "b")
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8, "temperature": 0}
    streamed = server.client.completions.create(model="a", stream=True, **BODY)
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == texts["a"]
    assert server.post({**chat, "model": "c"}, "chat/completions").json()["error"]["code"] == "model_not_found"


def options_refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit):
        main(["serve", *args])
    return capsys.readouterr().err


def test_the_command_line_names_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert "takes NAME=PATH, got 'sql'" in options_refused(capsys, "--lora-modules", "sql")
    assert "two adapters 'a'" in options_refused(capsys, "--lora-modules", "a=x", "a=y")
    assert "two adapters 'a'" in options_refused(capsys, "--lora-modules", "a=x", "--lora-modules", "a=y")
    as_json = json.dumps({"name": "m", "path": "x", "base_model_name": "y"})
    clash = options_refused(capsys, "--served-model-name", "m", "--lora-modules", as_json)
    assert "names 'm', which is a name of the model" in clash
    assert "there is no folder '/nowhere'" in options_refused(capsys, "--lora-modules", "a=/nowhere", "b=/nowhere")


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
