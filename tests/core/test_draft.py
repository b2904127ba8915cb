"""Drafts as trees: what is derived from tokens and parents, and what is refused; acceptance by position,
and runs of it."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretoken.core.context import Context
from foretoken.core.draft import Draft, PointMass, Sampled
from foretoken.core.sampling import SamplingLaw
from foretoken.core.step import PositionCounts
from foretoken.core.streams import Streams
from foretoken.core.verdict import AcceptanceRun, Verdict

# 0 ─ 1 ─ 3
#   └ 2   5
# 4
TREE = Draft.tree([10, 11, 12, 13, 14, 15], (-1, 0, 0, 1, -1, 2))
LOOP, COPY = [7, 8, 9] * 200, [*range(600)]  # texts


@st.composite
def trees(draw: st.DrawFn) -> Draft:
    parents = [draw(st.integers(-1, i - 1)) for i in range(draw(st.integers(0, 12)))]
    tokens = [draw(st.integers(0, 3)) for _ in parents]
    return Draft.tree(tokens, tuple(parents))


def test_a_ragged_tree():
    assert len(TREE) == 6
    assert TREE.ids == (10, 11, 12, 13, 14, 15)
    assert TREE.depths == (1, 2, 2, 3, 1, 3)
    assert TREE.children == ((0, 4), (1, 2), (3,), (5,), (), (), ())
    assert TREE.path(5) == (0, 2, 5)
    assert TREE.path(-1) == ()
    assert not TREE.is_chain
    assert TREE.ancestors.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [1, 0, 1, 0, 0, 1],
    ]


def test_a_chain():
    law = Sampled(torch.full((3, 9), 1 / 9))
    chain = Draft.chain([7, 8, 7], law)
    assert chain.parents == (-1, 0, 1)
    assert chain.tokens.dtype == torch.int64
    assert chain.is_chain
    assert chain.law is law
    assert chain.depths == (1, 2, 3)
    assert torch.equal(chain.ancestors, torch.ones(3, 3).tril().bool())
    assert isinstance(Draft.chain(torch.tensor([1, 2])).law, PointMass)


def test_the_empty_draft():
    empty = Draft.empty()
    assert len(empty) == 0
    assert empty.is_chain
    assert empty.children == ((),)
    assert empty.depths == ()
    assert empty.ancestors.shape == (0, 0)
    assert len(Draft.chain([])) == 0


@given(trees())
def test_paths_depths_and_masks_of_a_tree_agree(draft):
    mask = draft.ancestors
    for node in range(len(draft)):
        path = draft.path(node)
        assert path[-1] == node
        assert len(path) == draft.depths[node] == int(mask[node].sum())
        assert set(path) == set(mask[node].nonzero()[:, 0].tolist())
        assert node in draft.children[draft.parents[node] + 1]
    assert sum(map(len, draft.children)) == len(draft)
    assert draft.is_chain == (draft.depths == tuple(range(1, len(draft) + 1)))


@given(trees())
def test_every_node_has_its_own_history(draft):
    context = Context(0, [5, 6, 7], 2, SamplingLaw(), Streams(0))
    histories = context.histories(draft)
    assert len(histories) == len(draft) + 1
    assert histories[0].path == ()
    for node in range(len(draft)):
        history = histories[node + 1]
        assert history.path == tuple(draft.ids[i] for i in draft.path(node))
        assert history.generated == 1 + draft.depths[node]


@pytest.mark.parametrize("parents", [(0,), (-1, 1), (-1, 2, 0), (-2,), (-1,) * 3])
def test_bad_parents_are_refused(parents):
    with pytest.raises(ValueError, match="parent"):
        Draft.tree([0] * (2 if parents == (-1,) * 3 else len(parents)), parents)


def test_a_step_counts_at_every_position_that_it_drafted():
    counts = PositionCounts()
    counts.add(3, 1)
    counts.add(1, 1)
    counts.add(0, 0)
    assert counts.drafted == [2, 1, 1] and counts.accepted == [2, 0, 0]
    assert counts.rates == (1.0, 0.0, 0.0)


def test_sums_are_of_any_lengths():
    one, other = PositionCounts(), PositionCounts()
    one.add(1, 1)
    other.add(2, 1)
    one.merge(other)
    assert one == PositionCounts([2, 1], [2, 0])
    assert PositionCounts([0.0], [0.0]).rates == (0.0,)


def alarms(accepted: list[int], text: list[int], drafted: int = 4) -> list[tuple[int, str]]:
    """Returns the steps that end with an alarm. accepted: number of accepted tokens of each step's chain."""
    run, draft = AcceptanceRun(), Draft.chain(range(drafted))
    kinds = [run.add(draft, Verdict(tuple(range(count)), 9), text) for count in accepted]
    return [(step, kind) for step, kind in enumerate(kinds) if kind]


def test_long_runs_are_found_once() -> None:
    assert alarms([4] * 300, LOOP) == [(127, "repetition")]  # 512 tokens
    assert alarms([4] * 300, COPY) == [(127, "all_accepted")]
    assert alarms([0] * 300, COPY) == [(255, "none_accepted")]
    assert alarms([*[4] * 127, 3, *[4] * 127, 0, *[0] * 254], LOOP) == []
    assert alarms([*[0] * 256, 4, *[0] * 256], COPY) == [(255, "none_accepted"), (512, "none_accepted")]


def test_a_path_that_ends_above_a_leaf_ends_a_run() -> None:
    run, tree = AcceptanceRun(), Draft.tree([1, 2, 3], (-1, -1, 0))
    paths = itertools.chain([(0, 2)] * 255, [(0,)], [(1,)] * 511)
    assert not any(run.add(tree, Verdict(path, 9), LOOP) for path in paths)
    assert run.add(tree, Verdict((1,), 9), LOOP) == "repetition"


def test_steps_without_a_draft_do_not_end_a_run() -> None:
    run, draft, empty = AcceptanceRun(), Draft.chain([1] * 256), Draft.empty()
    assert run.add(draft, Verdict(tuple(range(256)), 9), COPY) is None
    assert run.add(empty, Verdict((), 9), COPY) is None
    assert run.add(draft, Verdict(tuple(range(256)), 9), COPY) == "all_accepted"
