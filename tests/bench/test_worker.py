"""The peers' processes: they answer, sleep between turns, fail in one line, and leave nothing behind."""

import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from foretoken.bench.peers.protocol import PeerRequest, Setup, Watch
from foretoken.bench.peers.registry import BOOT
from foretoken.bench.peers.worker import PeerError, PeerWorker

FAKE = [sys.executable, str(Path(__file__).with_name("fake.py"))]
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def worker(tmp_path: Path, method: str = "plain") -> PeerWorker:
    return PeerWorker(FAKE, Setup("fake", method, "target", options=(("key", "1"),)), tmp_path / "fake.log")


def state(pid: int) -> str:
    """Returns the state of a process, "Z" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def eventually(pid: int, wanted: str) -> None:
    deadline = time.monotonic() + 60
    while state(pid) != wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    assert state(pid) == wanted


def test_it_answers_whatever_its_libraries_print(tmp_path):
    with closing(worker(tmp_path)) as asked:
        assert asked.version == "1.0"
        answer = asked.answer(PeerRequest([[5], [1, 9]], 3, depth=1))
        assert answer.tokens == [[5, 6, 7], [9, 10, 11]]
        assert answer.total == 6
        assert answer.seconds == 0.5
    assert "a library that prints" in (tmp_path / "fake.log").read_text()


@linux
def test_it_sleeps_between_turns_and_is_gone_afterwards(tmp_path):
    asked = worker(tmp_path, "sleeps")
    pid = asked.pid
    eventually(pid, "T")
    asked.answer(PeerRequest([[1]], 2))
    eventually(pid, "T")
    asked.close()
    asked.close()
    assert not Path(f"/proc/{pid}").exists()


@linux
def test_its_memory_includes_that_of_its_children(tmp_path):
    with closing(worker(tmp_path)) as alone, closing(worker(tmp_path, "parent")) as parent:
        assert alone.resident_bytes > 2**20
        assert parent.resident_bytes > alone.resident_bytes + 30 * 2**20


def test_failures_are_one_line_and_what_can_answer_goes_on(tmp_path):
    with pytest.raises(PeerError, match=r"fake broken: ValueError: no such model"):
        worker(tmp_path, "broken")
    with pytest.raises(PeerError, match=r"fake crash stopped: out of memory"):
        worker(tmp_path, "crash")
    with closing(worker(tmp_path)) as asked:
        with pytest.raises(PeerError, match="thirteen"):
            asked.answer(PeerRequest([[1]], 13))
        assert asked.answer(PeerRequest([[1]], 2)).tokens == [[1, 2]]


@linux
@pytest.mark.slow
def test_a_killed_race_leaves_no_sleeper(tmp_path):
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from foretoken.bench.peers.protocol import Setup\n"
        "from foretoken.bench.peers.worker import PeerWorker\n"
        f"asked = PeerWorker({FAKE!r}, Setup('fake', 'plain', 't'), Path({str(tmp_path / 'log')!r}))\n"
        "print(asked.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    race = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert race.stdout is not None
    pid = int(race.stdout.readline())
    race.kill()
    race.wait()
    race.stdout.close()
    eventually(pid, "Z")


def test_a_peers_process_sees_the_package_and_nothing_beside_it(tmp_path):
    """An environment without foretoken: -S skips site-packages, and with them the installed package."""
    (tmp_path / "peer.py").write_text("")
    code = (
        f"import runpy, sys; boot = runpy.run_path({str(BOOT)!r})['boot']\n"
        "try: boot('vllm')\n"
        "finally: print(sorted(n for n in sys.modules if n.split('.')[0] in ('torch', 'foretoken')), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", code],
        input="",
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": os.environ["PATH"]},
    )
    assert "foretoken.bench.peers.vllm" in done.stderr
    assert "torch" not in done.stderr


def test_watch_waits_for_every_sequence():
    watch = Watch(2)
    watch.saw(0, 3, 0.1)
    watch.saw(0, 1, 0.2)
    watch.saw(1, 2, 0.3)
    watch.saw(1, 2, 0.4)
    answer = watch.answer([[0] * 4, [0] * 4], 0.5, 3)
    assert (answer.first_seconds, answer.first_tokens) == (0.3, 6)
