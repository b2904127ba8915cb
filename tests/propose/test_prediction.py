"""Following a reference text through edits."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.core.context import Context
from foretoken.core.draft import Draft, PointMass
from foretoken.core.errors import InvalidRequest
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams
from foretoken.propose.prediction import METHOD, Prediction, ReferencePosition

REFERENCE = tuple(range(10, 60))


def context(reference, output=(), identifier=0) -> Context:
    return Context(identifier, [1, 2, *output], 2, SamplingLaw(), Streams(0), prediction=tuple(reference))


def accepted(draft: Draft, truth: list[int]) -> int:
    node, count = -1, 0
    while count < len(truth):
        following = [i for i in draft.children[node + 1] if draft.ids[i] == truth[count]]
        if not following:
            break
        node, count = following[0], count + 1
    return count


def count_steps(reference, output, budget=16, proposer: Prediction | None = None) -> int:
    """Returns the number of passes until ``output`` is written, each with a draft of at most ``budget``."""
    proposer, c, passes = proposer or Prediction(), context(reference), 0
    while c.generated < len(output):
        draft = proposer.propose([c], [budget])[0]
        assert len(draft) <= budget
        assert isinstance(draft.law, PointMass)
        remaining = list(output[c.generated :])
        c.tokens.extend(remaining[: accepted(draft, remaining) + 1])
        passes += 1
    return passes


def test_a_correct_prediction_is_drafted_whole():
    draft = Prediction().propose([context(REFERENCE)], [16])[0]
    assert draft.ids == REFERENCE[:16]
    assert draft.is_chain
    assert count_steps(REFERENCE, REFERENCE) == 3


@pytest.mark.parametrize(
    "output",
    [
        (*REFERENCE[:20], 99, *REFERENCE[21:]),  # one token replaced
        (*REFERENCE[:20], 97, 98, 99, *REFERENCE[21:]),  # one by three
        (*REFERENCE[:20], 99, *REFERENCE[23:]),  # three by one
        (*REFERENCE[:20], *REFERENCE[26:]),  # some omitted
        (*REFERENCE[:20], 97, 98, 99, *REFERENCE[20:]),  # some put in
        (90, 91, 92, 93, *REFERENCE),  # something said before
        (*REFERENCE, 90, 91, 92),  # and after
    ],
)
def test_an_edit_costs_few_steps(output):
    assert count_steps(REFERENCE, output, 50) <= 6


def test_a_rename_is_learnt_once():
    body = [[20 + i, 5, 30 + i, 31 + i] for i in range(0, 60, 6)]
    reference = [t for piece in body for t in piece]
    renamed = [u for t in reference for u in ((7, 8) if t == 5 else (t,))]
    learning = count_steps(reference, renamed, 16)
    assert learning <= 2 + len(renamed) // 17 + 2
    assert learning < count_steps(reference, renamed, 16, Prediction(METHOD.config(replay_edits=False))) - 3


def test_a_replacement_that_does_not_come_again_is_dropped():
    follower = ReferencePosition((1, 5, 2, 3, 5, 4, 6, 5, 8))
    follower.follow([1, 7, 2, 3])
    assert follower.draft(3).ids == (7, 4, 6)
    follower.follow([5])
    assert follower.draft(3).ids == (4, 6, 5)


def test_moved_text_is_found_again():
    output = (*REFERENCE[30:], *REFERENCE[:30])
    assert count_steps(REFERENCE, output, 50) <= 9


def test_nothing_in_common_is_plain_decoding_after_a_while():
    follower = ReferencePosition(REFERENCE)
    follower.follow([200 + i for i in range(100)])
    assert len(follower.draft(16)) == 0
    follower.follow(REFERENCE[10:14])
    assert follower.draft(3).ids == REFERENCE[14:17]


def test_without_a_prediction_nothing_is_proposed():
    proposer = Prediction()
    drafts = proposer.propose([context(()), context(REFERENCE, identifier=1)], [4, 0])
    assert drafts == [Draft.empty(), Draft.empty()]
    proposer.forget(context(()))


def test_sequences_without_a_budget_catch_up():
    proposer, c = Prediction(), context(REFERENCE)
    assert len(proposer.propose([c], [0])[0]) == 0
    c.tokens.extend(REFERENCE[:9])
    assert proposer.propose([c], [2])[0].ids == REFERENCE[9:11]
    proposer.forget(c)
    assert proposer.propose([c], [2])[0].ids == REFERENCE[9:11]


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40), st.integers(1, 20))
def test_any_text_against_any_reference(reference, output, budget):
    """Seeing the text at once and seeing it in pieces lead to the same draft."""
    assert count_steps(reference, output, budget) <= max(1, len(output)) or not output
    at_once, in_pieces = ReferencePosition(tuple(reference)), ReferencePosition(tuple(reference))
    at_once.follow(output)
    for token in output:
        in_pieces.follow([token])
    assert at_once.draft(budget).ids == in_pieces.draft(budget).ids


def test_long_references_stay_cheap():
    words = random.Random(0)
    reference = tuple(words.randrange(50) for _ in range(100_000))
    follower = ReferencePosition(reference, replay=False)
    follower.follow([words.randrange(50) for _ in range(500)])
    follower.follow(reference[70_000:70_020])
    assert follower.draft(8).ids == reference[70_020:70_028]


def test_bad_keys_are_named():
    with pytest.raises(InvalidRequest, match="replay_edits"):
        METHOD.config(replay_edits=3)
