"""The clients that people have, each against a running server; docs/guides/serving.md lists them."""

import json
import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import certifi
import pytest
from tests.serve.clients import install
from tests.serve.conftest import running

from foretoken import LLM
from foretoken.serve.settings import ServerSettings

HERE = Path(install.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "guides" / "serving.md"
APIS = ("completions", "chat completions", "responses", "messages")
NODE, PYTHON, OPENAI2 = "node.mjs", "python.py", "openai2.py"
ENVIRONMENTS: dict[str, Callable[[], list[str]]] = {
    NODE: install.node,
    PYTHON: partial(install.python, "python"),
    OPENAI2: partial(install.python, "openai2"),
}
# The packages of the clients whose name is not a package's.
PACKAGES = {
    "ai": ("ai", "@ai-sdk/openai", "@ai-sdk/anthropic"),
    "langchain": ("langchain-openai", "langchain-anthropic"),
    "pydantic-ai": ("pydantic-ai-slim",),
}


def checks(script: str) -> list[tuple[str, str, str]]:
    """The client, the API and the subject of each check of a script."""
    text = (HERE / script).read_text(encoding="utf-8")
    return re.findall(r'^ +"([^"|]+) \| ([^"|]+) \| ([^"|]+)": ', text, re.MULTILINE)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """One certificate authority in the place of all: clients read them whenever they are made, 20 ms each time."""
    end = "-----END CERTIFICATE-----\n"
    first = Path(certifi.where()).read_text(encoding="utf-8").partition(end)[0] + end
    (tmp_path / "authority.pem").write_text(first, encoding="utf-8")
    kept = {name: value for name, value in os.environ.items() if name != "NODE_EXTRA_CA_CERTS"}
    return kept | {"SSL_CERT_FILE": str(tmp_path / "authority.pem")}


@pytest.mark.slow
@pytest.mark.parametrize("script", ENVIRONMENTS)
def test_clients_against_a_running_server(spare: LLM, script: str, environment: dict[str, str]) -> None:
    command = ENVIRONMENTS[script]()
    with running(spare, ServerSettings(model_names=("stdlib",), stored_responses=100)) as server:
        ran = subprocess.run(
            [*command, server.url], env=environment, capture_output=True, text=True, timeout=300, check=False
        )
    results = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert [result for result in results if "error" in result] == []
    assert [result["name"] for result in results] == [" | ".join(each) for each in checks(script)], ran.stderr


def versions(script: str) -> dict[str, str]:
    if script == NODE:
        return dict(json.loads((HERE / "package.json").read_text(encoding="utf-8"))["dependencies"])
    lines = (HERE / script).with_suffix(".txt").read_text(encoding="utf-8").split()
    return dict(line.split("==") for line in lines)


def test_the_table_of_clients_lists_what_is_tested() -> None:
    rows = []
    for script in ENVIRONMENTS:
        tested: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for client, api, what in checks(script):
            assert api in APIS
            tested[client][api].append(what)
        for client, subjects in tested.items():
            name, _, language = client.partition(" ")
            packages = [f"{package} {versions(script)[package]}" for package in PACKAGES.get(name, (name,))]
            first = ", ".join(packages) + (f" {language}" if language else "")
            rows.append("| " + " | ".join([first, *(", ".join(subjects[api]) for api in APIS)]) + " |")
    _, head, behind = PAGE.read_text(encoding="utf-8").partition("| client | " + " | ".join(APIS) + " |\n")
    assert head, "the table of clients is gone"
    assert behind.partition("\n\n")[0].splitlines()[1:] == [row.replace("  ", " ") for row in rows]


def test_locked_packages_are_those_of_the_table() -> None:
    lock = json.loads((HERE / "package-lock.json").read_text(encoding="utf-8"))
    assert lock["packages"][""]["dependencies"] == versions(NODE)
