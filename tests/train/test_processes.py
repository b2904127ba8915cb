"""Two processes that train together, over gloo."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from foretoken.train import processes
from foretoken.train.config import TrainConfig
from foretoken.train.trainer import Trainer

WORK = """
import sys
from pathlib import Path
import torch
from foretoken.train import processes
from foretoken.train.trainer import Trainer
from foretoken.train.config import TrainConfig
from tests.train.test_processes import batches, make

with processes.joined(torch.device("cpu")):
    rank, world = processes.rank(), processes.world()
    trainer = make(Path(sys.argv[1]))
    trainer.run(batches(2, rank), lambda x: trainer.model(x).square().mean(), dict)
    torch.save(trainer.model.state_dict(), Path(sys.argv[1]) / f"{rank}-of-{world}.pt")
"""


def make(folder: Path) -> Trainer:
    torch.manual_seed(0)
    config = TrainConfig(steps=3, batch=2, window=4, learning_rate=1e-2, compile=False)
    return Trainer(torch.nn.Linear(4, 3), config, folder / "run.checkpoint")


def batches(each, rank):  # type: ignore[no-untyped-def]
    """Rows ``rank * each`` to ``(rank + 1) * each`` of the same batches of four."""
    for step in range(10):
        whole = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        yield whole[rank * each : (rank + 1) * each]


@pytest.mark.usefixtures("preloaded_python")
@pytest.mark.slow
def test_two_processes_take_the_steps_of_one_with_both_their_batches(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WORK, str(tmp_path)],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=120)[1].decode() for process in started]
    assert [process.returncode for process in started] == [0, 0], errors[0][-800:]
    assert "step 3" in errors[0]
    assert "step 3" not in errors[1]
    first, second = (torch.load(tmp_path / f"{rank}-of-2.pt") for rank in range(2))
    alone = make(tmp_path)
    alone.run(batches(4, 0), lambda x: alone.model(x).square().mean(), dict)
    for name, value in alone.model.state_dict().items():
        assert torch.equal(first[name], second[name])
        assert torch.allclose(first[name], value, atol=1e-3)  # Muon rounds to bfloat16 inside


def test_alone_nothing_is_asked_of_anybody() -> None:
    with processes.joined(torch.device("cpu")) as device:
        assert (device.type, processes.rank(), processes.world()) == ("cpu", 0, 1)
        assert processes.largest(2.5, True) == (2.5, True)
        processes.wait()
