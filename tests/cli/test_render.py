"""Authors of characters in rendered drafts."""

from __future__ import annotations

import pytest

from foretoken.cli.render import Origins, Span, legend, marked, styled, summary
from foretoken.cli.theme import TokenOrigin
from foretoken.core.draft import Draft
from foretoken.core.step import StepOutput, Timings
from foretoken.core.verdict import Verdict
from foretoken.outputs import SpeculationStats, StreamPiece

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
