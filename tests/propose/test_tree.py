"""Trees that keep the best nodes, and trees of sampled nodes."""

from collections import Counter
from itertools import product
from math import exp, log

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.core.draft import PointMass, TopPlusSampled, WithoutReplacement
from foretoken.core.streams import Purpose, Streams
from foretoken.propose.drawn_tree import DrawnTree
from foretoken.propose.tree import Candidates, Tree, best_first, likeliest, racing

LEVELS = st.lists(
    st.lists(st.floats(-4.0, 0.0), min_size=3, max_size=3), min_size=1, max_size=3
)  # log-probabilities by depth


@settings(max_examples=60, deadline=None)
@given(LEVELS, st.integers(0, 12))
def test_best_first_takes_the_best_nodes_of_the_whole_product(levels: list[list[float]], budget: int) -> None:
    draft = best_first(torch.tensor(levels, dtype=torch.float64), torch.arange(3).expand(len(levels), 3) + 10, budget)
    everything = sorted(
        (
            sum(levels[d][rank] for d, rank in enumerate(path))
            for depth in range(1, len(levels) + 1)
            for path in product(range(3), repeat=depth)
        ),
        reverse=True,
    )
    assert draft.scores is not None
    assert len(draft) == min(budget, len(everything))
    assert draft.scores == pytest.approx(everything[:budget], abs=1e-5)
    for node in range(len(draft)):
        path = [draft.ids[i] - 10 for i in draft.path(node)]
        assert draft.scores[node] == pytest.approx(sum(levels[d][r] for d, r in enumerate(path)), abs=1e-5)
    assert len({draft.path(node) for node in range(len(draft))}) == len(draft)


def test_best_first_leaves_out_impossible_candidates() -> None:
    draft = best_first(torch.tensor([[0.0, -torch.inf], [-1.0, -torch.inf]]), torch.tensor([[5, 6], [7, 8]]), 10)
    assert draft.ids == (5, 7)
    assert isinstance(draft.law, PointMass)
    assert len(best_first(torch.empty(0, 3), torch.empty(0, 3, dtype=torch.int64), 4)) == 0


def row(*probs: float) -> torch.Tensor:
    return torch.tensor([probs], dtype=torch.float64)


def grown(
    rows: dict[tuple[int, ...], torch.Tensor], width: int, budget: int, steps: int, floor: float = 0.0
) -> tuple[Tree, int]:
    """Returns a tree grown from distributions by path, and the number of passes."""
    tree, passes = Tree(floor=log(floor) if floor else float("-inf")), 0
    while tree.frontier and passes < steps:
        assert tree.growing().ids == tuple(tree.tokens[node] for node in tree.scored)
        probs = torch.cat([rows.get(tree.path(node), row(0.5, 0.3, 0.2)) for node in tree.frontier])
        tree.expand(likeliest(probs, width), width, budget)
        passes += 1
    return tree, passes


def test_a_tree_does_not_grow_below_a_node_under_the_floor() -> None:
    rows = {(): row(0.6, 0.3, 0.1), (0,): row(0.9, 0.1, 0.0), (0, 0): row(0.4, 0.4, 0.2)}
    tree, passes = grown(rows, width=2, budget=9, steps=9, floor=0.5)
    assert passes == 3  # the root, and the two nodes of 0.6 and 0.54
    assert {tree.path(node) for node in range(len(tree.tokens))} == {(0,), (1,), (0, 0), (0, 1), (0, 0, 0), (0, 0, 1)}


def test_a_tree_keeps_the_best_nodes_of_all_levels() -> None:
    rows = {(): row(0.6, 0.3, 0.1), (0,): row(0.9, 0.1, 0.0), (1,): row(0.2, 0.2, 0.6)}
    tree, passes = grown(rows, width=2, budget=4, steps=2)
    assert passes == 2
    draft = tree.pruned(4)
    paths = {tuple(draft.ids[i] for i in draft.path(node)): s for node, s in enumerate(draft.scores)}
    expected = {(0,): 0.6, (0, 0): 0.54, (1,): 0.3, (1, 2): 0.18}
    assert {path: exp(score) for path, score in paths.items()} == pytest.approx(expected, abs=1e-6)


def test_kept_nodes_keep_their_parents_when_others_are_pruned() -> None:
    halves = row(0.5, 0.5, 0.0)
    rows = {(): row(0.8, 0.15, 0.05), (0,): halves, (0, 0): row(0.9, 0.1, 0.0), (0, 1): row(0.9, 0.1, 0.0)}
    tree, _ = grown(rows, width=2, budget=5, steps=3)
    draft = tree.pruned(5)
    paths = [tuple(draft.ids[i] for i in draft.path(node)) for node in range(5)]
    assert sorted(paths) == [(0,), (0, 0), (0, 0, 0), (0, 1), (0, 1, 0)]


def test_nodes_that_cannot_be_kept_are_not_expanded() -> None:
    certain = {tuple([0] * depth): row(1.0, 0.0, 0.0) for depth in range(4)}
    tree, passes = grown(certain, width=3, budget=2, steps=10)
    assert tree.pruned(2).ids == (0, 0)
    assert passes == 3, "the third node is no better than the two that are there"
    tree, passes = grown({(): row(0.4, 0.3, 0.3)}, width=3, budget=3, steps=10)
    assert passes == 2, "below three nodes of 0.3 and more nothing of 0.2 is kept"


def test_ties_keep_parents_before_children() -> None:
    tree, _ = grown({tuple([0] * depth): row(1.0, 0.0, 0.0) for depth in range(6)}, width=3, budget=3, steps=6)
    draft = tree.pruned(2)
    assert draft.parents == (-1, 0)


def test_racing_leaders_are_what_plain_decoding_emits() -> None:
    probs = torch.rand(6, 50).softmax(-1)
    for seed, depth in product(range(5), range(3)):
        stream = Streams(seed).shared(7)
        candidates = racing(probs, 3, stream, depth)
        assert candidates.ids[:, 0].tolist() == [stream.categorical(p, depth) for p in probs]
        assert bool((candidates.scores.exp().sum(-1) < 1.0).all())
        assert bool((candidates.scores.diff(dim=-1) <= 0.0).all())
    with pytest.raises(TypeError, match="shared noise"):
        racing(probs, 3, Streams(0).private(1, 0), 0)  # type: ignore[arg-type]


def test_candidates_of_small_vocabularies_and_impossible_tokens() -> None:
    candidates = likeliest(row(0.75, 0.25, 0.0), 9)
    assert isinstance(candidates, Candidates)
    assert candidates.ids.shape == (1, 3)
    assert candidates.scores[0, :2].tolist() == pytest.approx([log(0.75), log(0.25)])
    tree = Tree()
    tree.expand(candidates, 9, 9)
    assert tree.tokens == [0, 1]


def tree(kind: str = "sampled", budget: int = 8, steps: int = 4, width: int = 3, seed: int = 0) -> DrawnTree:
    stream = Streams(seed).private(Purpose.DRAFT, 0)
    return DrawnTree(kind=kind, budget=budget, steps=steps, width=width, stream=stream)  # type: ignore[arg-type]


def law_at(path: tuple[int, ...], vocab: int = 6, sharpness: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash(path) % 2**31)
    return (sharpness * torch.randn(vocab, generator=generator)).softmax(-1)


def grow(growth: DrawnTree, **law: float) -> DrawnTree:
    while growth.frontier:
        growth.expand(torch.stack([law_at(growth.path(node), **law) for node in growth.frontier]))  # type: ignore[arg-type]
    return growth


@pytest.mark.parametrize("kind", ["sampled", "greedy_multi"])
@pytest.mark.parametrize("budget", [1, 2, 5, 16])
def test_the_budget_is_spent_and_the_rows_are_those_drawn_from(kind: str, budget: int) -> None:
    for seed in range(10):
        growth = grow(tree(kind, budget, seed=seed))
        draft = growth.finished()
        assert len(draft) == budget
        assert max(draft.depths) <= 4
        assert isinstance(draft.law, WithoutReplacement if kind == "sampled" else TopPlusSampled)
        for node in range(-1, len(draft)):
            children = draft.children[node + 1]
            tokens = [draft.ids[child] for child in children]
            assert len(set(tokens)) == len(tokens) <= 3
            if children:
                assert torch.equal(draft.law.probs[node + 1], law_at(growth.path(node)))
            if kind == "greedy_multi" and len(children) > 1:
                assert tokens[:-1] == law_at(growth.path(node)).topk(len(tokens) - 1).indices.tolist()


def test_siblings_come_in_the_order_and_with_the_law_of_drawing_without_replacement() -> None:
    probs, draws = torch.tensor([[0.5, 0.3, 0.2]]), 4000
    pairs: Counter[tuple[int, ...]] = Counter()
    for seed in range(draws):
        growth = tree(budget=2, steps=1, width=2, seed=seed)
        growth.expand(probs)
        pairs[tuple(growth.tokens)] += 1
    for (first, second), count in pairs.items():
        p, q = float(probs[0, first]), float(probs[0, second])
        expected = p * q / (1.0 - p)
        assert abs(count / draws - expected) < 4.5 * (expected / draws) ** 0.5


def test_confident_drafts_grow_deep_trees_and_others_wide_ones() -> None:
    sure, unsure = grow(tree(steps=8), sharpness=60.0).finished(), grow(tree(steps=8), sharpness=0.0).finished()
    assert max(sure.depths) > max(unsure.depths)
    assert len(sure.children[0]) < len(unsure.children[0])


def test_no_more_siblings_are_drawn_than_tokens_are_possible() -> None:
    growth = tree(width=4)
    growth.expand(torch.tensor([[0.0, 1.0, 0.0, 0.0]]))
    assert growth.tokens == [1]
    assert len(tree(budget=0).finished()) == 0


def test_the_number_of_draws_does_not_depend_on_the_draws() -> None:
    probs = law_at(())[None]
    counts = set()
    for seed in range(50):
        growth = tree(seed=seed)
        growth.expand(probs)
        counts.add(len(growth.tokens))
    assert len(counts) == 1
