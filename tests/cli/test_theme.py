"""Progress and log lines without a terminal; authors of characters in rendered drafts."""

import logging
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from foretoken.cli import theme
from foretoken.cli.render import Origins, Span, legend, marked, styled, summary
from foretoken.cli.serve_options import announce, start_log
from foretoken.cli.theme import ColorMode, TokenOrigin, compilation_announced, console, staged, waiting, wide_console
from foretoken.core.draft import Draft
from foretoken.core.native.build import COMPILING, NOTICE, Compilation
from foretoken.core.step import StepOutput, Timings
from foretoken.core.verdict import Verdict
from foretoken.outputs import SpeculationStats, StreamPiece


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def compilation(monkeypatch: pytest.MonkeyPatch) -> Compilation:
    """The progress of a process that has compiled nothing."""
    fresh = Compilation()
    monkeypatch.setattr(theme, "compilation", fresh)
    return fresh


@pytest.fixture
def log() -> Iterator[None]:
    """Restores the handlers and levels that ``start_log`` changes."""
    root, ours = logging.getLogger(), logging.getLogger("foretoken")
    kept = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:], root.level = kept[:2]
    ours.setLevel(kept[2])


def test_every_stage_is_a_line_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with staged(console(ColorMode.AUTO, stderr=True)) as say:
        for what, share in (("loading", 0.0), ("steps", 0.25), ("steps", 0.5), ("texts [a]", 0.5), ("steps", 0.75)):
            say(what, share)
    assert capsys.readouterr() == ("", "  0%  loading\n 25%  steps\n 50%  texts [a]\n")


@pytest.mark.parametrize("silent, line", [(False, "loading ...\n"), (True, "")])
def test_a_spinner_is_a_line_without_a_terminal(capsys: pytest.CaptureFixture[str], silent: bool, line: str) -> None:
    with waiting(console(ColorMode.AUTO, stderr=True), "loading", silent=silent):
        assert capsys.readouterr() == ("", line)


def test_a_spinner_shows_how_many_kernels_are_compiled(capsys, monkeypatch, compilation):
    shown: list[str] = []
    notes: Any = console(ColorMode.ALWAYS, stderr=True)
    monkeypatch.setattr("foretoken.cli.theme.on_terminal", lambda console: True)
    monkeypatch.setattr("rich.status.Status.update", lambda status, text: shown.append(text))
    with waiting(notes, "loading"):
        compilation.begin(2)
        compilation.finish()
        compilation.finish()
    assert shown == [f"{COMPILING}: 0 of 2 files", f"{COMPILING}: 1 of 2 files", "loading"]


def test_a_command_that_compiles_says_so_once(capsys: pytest.CaptureFixture[str], compilation: Compilation) -> None:
    with compilation_announced():
        compilation.begin(0)
        assert capsys.readouterr().err == ""
        compilation.begin(2)
        compilation.finish()
        compilation.begin(1)
    assert capsys.readouterr() == ("", f"{NOTICE} ...\n")


def test_lines_of_the_log_are_not_folded(capsys, log, compilation):
    start_log("info", "text")
    with compilation_announced():
        compilation.begin(1)
    logging.getLogger("foretoken.x").info("word " * 60)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("INFO")[1].strip() for line in lines] == [NOTICE, ("word " * 60).strip()]


def test_the_servers_address_is_not_folded(capsys: pytest.CaptureFixture[str]) -> None:
    name = "/models/" + "a-long-name" * 9
    settings: Any = SimpleNamespace(model_names=[name], api_keys=(), key_file=None)
    with socket.socket() as listening:
        listening.bind(("0.0.0.0", 0))
        announce(settings, listening, False, "text")
        port = listening.getsockname()[1]
    address, playground, warning = capsys.readouterr().err.splitlines()
    assert address == f"{name} at http://0.0.0.0:{port}/v1"
    assert playground.startswith("playground at") and warning.startswith("warning: anyone who reaches")


def test_other_programs_read_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    wide_console(ColorMode.AUTO).print("word " * 60)
    assert capsys.readouterr().out.count("\n") == 1


A, R, T = TokenOrigin.ACCEPTED, TokenOrigin.REJECTED, TokenOrigin.TARGET


class Letters:
    """Token i is the i-th letter; 26 and 27 are the two halves of an é."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        halves = [b"\xc3", b"\xa9"]
        return b"".join(halves[i - 26] if i >= 26 else bytes([97 + i]) for i in token_ids).decode(errors="replace")


def step(draft: Draft, path: tuple[int, ...], token: int, emitted: int | None = None) -> StepOutput:
    tokens = (*(draft.ids[i] for i in path), token)[:emitted]
    return StepOutput(0, 0, draft, Verdict(path, token), tokens, Timings(0, 0, 0, 0, 1))


def piece(text: str, of: StepOutput) -> StreamPiece:
    return StreamPiece(0, 0, text, of.tokens, of)


def test_accepted_rejected_and_the_targets_own():
    round_ = step(Draft.chain([0, 1, 2, 3]), (0, 1), 4)
    spans = Origins(Letters()).push(piece("abe", round_))
    assert spans == [Span("a", A), Span("b", A), Span("cd", R), Span("e", T)]


def test_plain_decoding_is_all_the_targets():
    assert Origins(Letters()).push(piece("c", step(Draft.empty(), (), 2))) == [Span("c", T)]


def test_text_that_lags_behind_keeps_its_origins():
    """A character over two tokens belongs to the token that completes it; held-back text to its own token."""
    origins = Origins(Letters())
    assert origins.push(piece("", step(Draft.chain([26]), (0,), 27, emitted=1))) == []
    assert origins.push(piece("é", step(Draft.chain([27]), (0,), 0))) == [Span("é", A)]
    assert origins.push(piece("ab", step(Draft.empty(), (), 1))) == [Span("a", T), Span("b", T)]


def test_text_nobody_accounts_for_is_the_targets():
    assert Origins(Letters()).push(piece("a!", step(Draft.empty(), (), 0))) == [Span("a", T), Span("!", T)]


@pytest.mark.parametrize(
    "draft, path, expected",
    [
        (Draft.empty(), (), []),
        (Draft.chain([5, 6]), (), [5, 6]),
        (Draft.chain([5, 6]), (0,), [6]),
        (Draft.chain([5, 6]), (0, 1), []),
        (Draft.tree([5, 6, 7, 8], (-1, -1, 1, 2)), (), [6, 7, 8]),
        (Draft.tree([5, 6, 7, 8], (-1, -1, 1, 2)), (0,), []),
        (Draft.tree([5, 6, 7, 8], (-1, -1, 1, 2)), (1,), [7, 8]),
    ],
)
def test_rejected_path_of_chains_and_trees(draft, path, expected):
    assert [draft.ids[node] for node in step(draft, path, 0).rejected] == expected


def test_nothing_is_rejected_when_the_text_ended_first():
    assert step(Draft.chain([5, 6, 7]), (0, 1), 0, emitted=1).rejected == ()


def test_marks_and_styles():
    spans = [Span("a", A), Span("b", A), Span("x\ny", R), Span("c\n", T)]
    assert marked(spans) == "«ab»~~x⏎y~~c\n"
    assert styled(spans).plain == "abx⏎yc\n"
    assert styled(spans, rejected=False).plain == "abc\n"
    assert legend(coloured=False).plain == "«draft, accepted»   ~~draft, rejected~~   the target's own"


def test_a_summary_counts_tokens_and_acceptance():
    stats = SpeculationStats(steps=4, drafts=4, drafted=16, accepted=6, tokens=10)
    assert summary([stats], 2.0) == "10 tokens · 5.0 tok/s · mean acceptance 2.50 · 6 of 16 drafted tokens accepted"
    assert summary([SpeculationStats(steps=1, tokens=1)], 0.5) == "1 token · 2.0 tok/s · no drafts"
