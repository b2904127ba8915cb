from __future__ import annotations

from collections import Counter

import pytest
import torch

from foretoken.core.law import TopPlusSampled, WithoutReplacement
from foretoken.core.streams import Purpose, Streams
from foretoken.propose.drawn_tree import DrawnTree


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
