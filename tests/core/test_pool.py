"""The pool of threads: each item once, loops in order, whatever the threads, callers and forks; forked processes."""

import ctypes
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from foretoken.core.forking import ForkServer
from foretoken.core.native import build, status
from foretoken.core.native.status import Status

CASES = Path(__file__).parent / "pool_cases.cpp"


@pytest.fixture(scope="module")
def cases() -> ctypes.CDLL:
    try:
        library = status.load(build.compiled(CASES, (), build.ANY))
    except build.KernelsUnavailable as why:
        pytest.skip(str(why))
    library.sums.restype = ctypes.c_int64
    library.sums.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int]
    library.fails.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int]
    library.foretoken_problem.restype = ctypes.c_char_p
    library.computing.argtypes = [ctypes.c_int, ctypes.c_int64]
    return library


@pytest.mark.parametrize("threads", [1, 2, 3, 8, 24])
@pytest.mark.parametrize(("items", "grain"), [(0, 1), (1, 1), (2, 4), (7, 1), (100, 8), (5000, 3)])
def test_each_item_is_computed_once_and_loops_follow_one_another(cases, threads, items, grain):
    assert cases.sums(threads, 20, items, grain, 0) == 0


def test_more_items_than_a_word_counts(cases):
    assert cases.sums(3, 2, (1 << 21) + 5, 1, 0) == 0


@pytest.mark.parametrize("threads", [2, 8])
def test_a_slow_thread_loses_the_rest_of_its_share_to_others(cases, threads):
    assert cases.sums(threads, 50, 64, 1, 13) == 0


def test_requested_threads_take_part(cases):
    counts = [1]
    while max(counts) == 1 and len(counts) < 500:  # on a busy machine the others may come when all is done
        counts.append(cases.computing(4, 40))
    assert 1 < max(counts) <= 4
    assert cases.computing(1, 4) == 1


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_an_exception_ends_the_team_and_the_next_one_works(cases, threads):
    for at in (0, 10, 99):
        assert cases.fails(threads, 100, at, Status.NO_MEMORY) == Status.NO_MEMORY
        assert cases.sums(threads, 5, 100, 1, 0) == 0


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize(
    ("how", "status", "text"),
    [
        (Status.NO_MEMORY, Status.NO_MEMORY, "no memory for 100 items"),
        (Status.BAD_ARGUMENT, Status.BAD_ARGUMENT, "item 7"),
        (Status.INTERNAL, Status.INTERNAL, "a bug"),
        (17, Status.INTERNAL, "an exception without a text"),
    ],
)
def test_an_exception_of_any_thread_becomes_a_status_with_a_message(cases, threads, how, status, text):
    assert cases.fails(threads, 100, 7, how) == status
    assert cases.foretoken_problem().decode() == text


def test_callers_at_the_same_time(cases):
    """More of them than teams, and more threads than cores."""
    with ThreadPoolExecutor(12) as callers:
        results = callers.map(lambda i: cases.sums(2 + i % 4, 20, 40 + i, 1, 17 * (i % 2)), range(120))
        assert list(results) == [0] * 120


def test_a_forked_process_has_a_pool_of_its_own(cases):
    assert cases.sums(3, 5, 50, 1, 0) == 0
    child = os.fork()
    if child == 0:
        os._exit(0 if cases.sums(3, 5, 50, 1, 0) == 0 and status.library().foretoken_pool_workers() == 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert cases.sums(3, 5, 50, 1, 0) == 0


def test_many_short_teams(cases):
    """A thread that comes late to a team finds it closed, or another one in its place."""
    assert all(cases.sums(2 + i % 3, 1 + i % 3, 6, 1, 0) == 0 for i in range(3000))


SECONDS = 60.0  # of the program, unless it is ended


@pytest.mark.slow
def test_closing_does_not_wait_for_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may still be importing, and has nothing to save."""
    (tmp_path / "sleeping_program.py").write_text(f"import time\ntime.sleep({SECONDS})\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = ForkServer("sleeping_program", lambda: None)
    server.fork()
    began = time.monotonic()
    server.close()
    assert time.monotonic() - began < SECONDS / 2 and server.pid is None
