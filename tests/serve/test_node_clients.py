"""The clients of Node. They run where ``npm install`` was run in tests/serve/node, and are skipped elsewhere."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.serve.conftest import running

from foretoken import LLM
from foretoken.serve.limits import ServerSettings

HERE = Path(__file__).parent / "node"


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("node") is None or not (HERE / "node_modules").is_dir(), reason="npm install in tests/serve/node"
)
def test_clients_of_node(spare: LLM) -> None:
    with running(spare, ServerSettings(model_names=("stdlib",), stored_responses=100)) as server:
        command = ["node", "clients.mjs", server.url]
        ran = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=300, check=False)
    results = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(results) == 17, ran.stderr
    assert [result for result in results if "error" in result] == []
