from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from foretoken.core.context import Context
from foretoken.core.law import PointMass
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams
from foretoken.propose.lookup import Lookup, LookupConfig


def context(tokens: list[int]) -> Context:
    return Context(0, tokens, len(tokens), SamplingLaw(), Streams(0))


def drafted(tokens: list[int], budget: int, config: LookupConfig | None = None) -> tuple[int, ...]:
    return Lookup(config).propose([context(tokens)], [budget])[0].ids


def test_the_longest_match_wins_over_a_later_short_one() -> None:
    assert drafted([1, 2, 3, 9, 9, 3, 7, 1, 2, 3], 2) == (9, 9)


def test_the_latest_occurrence_wins() -> None:
    assert drafted([5, 1, 5, 2, 5], 1) == (2,)


def test_periodic_text_continues_its_period() -> None:
    assert drafted([1, 2, 1, 2], 5) == (1, 2, 1, 2, 1)


def test_texts_without_a_match_are_not_drafted_for() -> None:
    assert drafted([1, 2, 3], 4) == ()
    assert drafted([1], 4) == ()
    assert drafted([1, 1], 0) == ()


def test_the_minimum_match_length_holds() -> None:
    assert drafted([4, 1, 5, 1], 2, LookupConfig(2, 3)) == ()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 8))
def test_incremental_equals_from_scratch_and_a_plain_search(tokens: list[int], budget: int) -> None:
    lookup = Lookup()
    live = context([])
    for token in tokens:
        live.tokens.append(token)
        draft = lookup.propose([live], [budget])[0]
    assert isinstance(draft.law, PointMass)
    assert draft.ids == drafted(tokens, budget)
    for length in range(min(4, len(tokens)), 0, -1):
        ends = [e for e in range(length, len(tokens)) if tokens[e - length : e] == tokens[-length:]]
        if ends:
            assert draft.ids[0] == tokens[ends[-1]]
            return
    assert draft.ids == ()
