"""Tensor parallelism on two processes: the same logits as one process, and the same text with and without drafts."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import Pair

from foretoken.cli.main import main
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.models.base import Handle
from foretoken.models.hf.sharded import RankGroup, plan_from_json, plan_to_json, read_part
from foretoken.models.loading import check_ranks, load_model
from foretoken.models.runners.pass_plan import PassPlan

from .tiny import ARCHITECTURES
from .trees import repeating

RUN = Path(__file__).with_name("tensor_parallel_run.py")
PATIENCE = 300.0


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Two ranks on this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": False, "timeout": PATIENCE}
    return subprocess.run(command, env=environment, **options)


@pytest.mark.usefixtures("preloaded_python")
@pytest.mark.slow
def test_two_ranks_equal_one(tiny_pair: Pair, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    done = torchrun(str(RUN), str(tiny_pair.target), str(tiny_pair.draft), str(out))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n", "a rank other than the first continued"
    result: dict[str, Any] = json.loads(out.read_text())
    assert result["difference"] < 1e-4
    assert result["speculative"] == result["controlled"] == result["plain"] and all(result["plain"])
    assert result["seeded"] == result["seeded plain"] != result["plain"]
    part, whole = result["row bytes"]
    assert 2 * part == whole


def test_plans_survive_json() -> None:
    tree = repeating((-1, 0, -1))
    handles = [Handle(1, [3, 4, 5], 1), Handle(0, [9], 0)]
    plan = PassPlan.of(handles, [tree, Draft.empty()], [0, 0])
    assert plan_from_json(json.loads(json.dumps(plan_to_json(plan)))) == replace(plan, outputs=[])


def test_missing_ranks_are_refused(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(InvalidRequest, match=r"needs 2 processes and finds 1.*torchrun --nproc-per-node 2"):
        load_model(tiny_pair.target, "float32", "cpu", tensor_parallel_size=2)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(InvalidRequest, match="needs 2 processes and finds 4"):
        RankGroup.join(2, torch.device("cpu"))


def test_models_that_cannot_be_divided_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="use backend='hf'"):
        check_ranks(2, "native", None)
    with pytest.raises(InvalidRequest, match="one rank"):
        check_ranks(2, "auto", "int8")
    with pytest.raises(InvalidRequest, match="at least 1"):
        check_ranks(0, "auto", None)
    assert not check_ranks(1, "native", "int8")
    with pytest.raises(ModelLoadError, match="no tensor-parallel plan for the type 'gpt2'"):
        read_part(ARCHITECTURES["gpt2"].save(tmp_path / "gpt2"), torch.float32, 2)
    with pytest.raises(ModelLoadError, match="num_key_value_heads=2, which 4 ranks"):
        read_part(ARCHITECTURES["llama"].save(tmp_path / "llama"), torch.float32, 4)


def test_the_command_line_names_torchrun(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit) as caught:
        main(["generate", "x", "--tensor-parallel-size", "2"])
    said = capsys.readouterr().err.strip().splitlines()
    assert caught.value.code == 1 and len(said) == 1 and "torchrun --nproc-per-node 2" in said[0]
