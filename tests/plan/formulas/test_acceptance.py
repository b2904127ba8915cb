"""Every rule's acceptance by its formula is that of the production verifier, by enumeration."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.exactness.decode_step import (
    PROMPT,
    Pair,
    argmax,
    constant,
    drawn,
    drawn_tree,
    fixed_tree,
    table,
    top_plus_tree,
)
from tests.exactness.enumerate import outcomes

from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.core.law import Sampled
from foretoken.core.streams import SharedStream
from foretoken.plan.formulas import acceptance, bounds
from foretoken.verify import VERIFIERS

relaxed = settings(max_examples=30, deadline=None, derandomize=True)
PAIRS = [(0, 0.0), (1, 0.4)]
pairs = pytest.mark.parametrize("seed, zeros", PAIRS)


def accepted(pair: Pair) -> float:
    return sum(p * (len(emitted) - 1) for emitted, p in outcomes(lambda s: pair.step((), s), position=0).items())


def models(vocab: int, seed: int, zeros: float = 0.0):
    return table(vocab, seed, 1.5, zeros), table(vocab, 70 + seed, 1.5, zeros)


def row(model, path=()) -> torch.Tensor:
    return model((*PROMPT, *path)).softmax(-1)


def distributions(vocab: int = 4) -> st.SearchStrategy[torch.Tensor]:
    """[V]; some tokens impossible, some rows one-hot."""
    weights = st.lists(st.integers(0, 9), min_size=vocab, max_size=vocab).filter(any)
    return weights.map(lambda w: torch.tensor(w, dtype=torch.float64) / sum(w))


# One node


@pairs
def test_token_acceptance_is_that_of_the_enumeration(seed, zeros):
    p, q = models(4, seed, zeros)
    for rejection in ("token", "block"):  # a chain of one is verified in the same way
        pair = Pair(p, drawn(q), rejection=rejection, budget=lambda generated: 1)
        assert accepted(pair) == pytest.approx(float(acceptance.token(row(p), row(q))), abs=1e-12)


@relaxed
@given(distributions(), distributions())
def test_leviathans_divergence_is_total_variation(p, q):
    middle = (p + q) / 2
    assert float((p - middle).abs().sum()) == pytest.approx(float(acceptance.total_variation(p, q)), abs=1e-12)
    assert float(1 - acceptance.token(p, q)) == pytest.approx(float(acceptance.total_variation(p, q)), abs=1e-12)


@pairs
def test_walk_acceptance_is_that_of_the_enumeration(seed, zeros):
    p, q = models(4, seed, zeros)
    siblings = fixed_tree((2, 0, 2), (-1, -1, -1))  # one of them twice
    assert accepted(Pair(p, siblings)) == pytest.approx(
        float(acceptance.walk(row(p), torch.tensor([2, 0, 2]))), abs=1e-12
    )
    greedy = Pair(p, argmax(q), budget=lambda generated: 1)
    assert accepted(greedy) == pytest.approx(float(acceptance.walk(row(p), row(q).argmax(-1, keepdim=True))), abs=1e-12)


@pairs
@pytest.mark.parametrize("replace", [True, False], ids=["i.i.d.", "without replacement"])
@pytest.mark.parametrize("siblings", [1, 2, 3])
def test_recursive_and_one_level_of_traversal(seed, zeros, replace, siblings):
    p, q = models(4, seed, zeros)
    formula = float(acceptance.recursive(row(p), row(q), siblings, replace))
    for rejection in ("token", "block"):
        pair = Pair(p, drawn_tree(q, (siblings,), replace), rejection=rejection)
        assert accepted(pair) == pytest.approx(formula, abs=1e-12)


@pairs
@pytest.mark.parametrize("siblings", [1, 2, 3])
def test_greedy_multi(seed, zeros, siblings):
    p, q = models(4, seed, zeros)
    support = int((row(q) > 0).sum())
    if siblings <= support:  # with less to draw from, the last sibling is one more fixed candidate
        formula = float(acceptance.greedy_multi(row(p), row(q), siblings))
        assert accepted(Pair(p, top_plus_tree(q, (siblings,)))) == pytest.approx(formula, abs=1e-12)


@pairs
def test_typical_acceptance_is_that_of_the_enumeration(seed, zeros):
    p, q = models(5, seed, zeros)

    def run(streams):
        stream = streams.private(1, 0)
        draft = Draft.chain([stream.categorical(row(q), 0)], Sampled(row(q)[None]))
        return len(VERIFIERS["typical"](draft, torch.stack([row(p)] * 2), streams.private(2, 0)).path)

    share = sum(chance * kept for kept, chance in outcomes(run).items())
    assert share == pytest.approx(float(acceptance.typical(row(p), row(q))), abs=1e-12)


def test_lenience_accepts_what_it_says():
    p, q = torch.tensor([0.2, 0.3, 0.5]), torch.tensor([0.6, 0.3, 0.1])
    assert float(acceptance.lenient(p, q, 0.5)) == pytest.approx(0.4 + 0.3 + 0.1)
    assert float(acceptance.lenient(p, q, 1.0)) == pytest.approx(float(acceptance.token(p, q)))


# The trajectory grade


@relaxed
@given(distributions(), distributions())
def test_coupled_is_its_formula_and_keeps_its_bounds(p, q):
    slow = 0.0
    for x in range(len(p)):
        if p[x] > 0 and q[x] > 0:
            slow += 1 / sum(max(float(p[y] / p[x]), float(q[y] / q[x])) for y in range(len(p)))
    result = float(acceptance.coupled(p, q))
    assert result == pytest.approx(slow, abs=1e-12)
    limits = bounds.coupled_from_variation(acceptance.total_variation(p, q))
    assert float(limits.low) - 1e-12 <= result <= float(limits.high) + 1e-12


@pytest.mark.parametrize("seed, children", [(0, 1), (1, 2), (2, 3)])
def test_coupled_is_what_the_real_noise_does(seed, children):
    """The noise cannot be enumerated: 2,000 positions of it, within four standard errors."""
    p, q = (row(model) for model in models(6, seed))
    expected, count = float(acceptance.coupled(p, q, children)), 2_000
    hits = sum(
        SharedStream(seed, at).categorical(p, 0) in SharedStream(seed, at).race(q, 0).topk(children).indices.tolist()
        for at in range(count)
    )
    assert hits / count == pytest.approx(expected, abs=4 * (expected * (1 - expected) / count) ** 0.5)


def test_coupled_children_by_quadrature():
    p, q = (row(model) for model in models(7, 1))
    by_hand = 0.0  # fewer than two may overtake: 1/(1+L) + sum_y [1/(1+L-l_y) - 1/(1+L)], L = sum_y l_y
    for x in range(7):
        rates = (q * p[x] / q[x] - p).clamp(min=0)
        whole = float(1 + rates.sum())
        by_hand += float(p[x]) * (1 / whole + sum(1 / (whole - float(rate)) - 1 / whole for rate in rates))
    assert float(acceptance.coupled(p, q, 2)) == pytest.approx(by_hand, abs=1e-9)
    assert float(acceptance.coupled(p, q, 7)) == pytest.approx(1.0, abs=1e-9)
    matched = [float(acceptance.coupled(p, q, k)) for k in range(1, 8)]
    assert matched == sorted(matched)


def test_coupled_toy_of_two_tokens():
    """p = (1/3, 2/3), q = (2/3, 1/3): 1/(1+2) + 1/(2+1) = 2/3, of 1 - TV = 2/3 and (1-TV)/(1+TV) = 1/2."""
    p, q = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
    assert float(acceptance.coupled(p, q)) == pytest.approx(1 / (1 + 2) + 1 / (1 + 2), abs=1e-12)


@pytest.mark.slow
def test_coupled_on_distributions_like_a_language_models():
    """V = 300 at 1 - TV of .745: one child .685, four .957; the toy distributions of those figures are not recorded.

    Normal logits and a normal error of .67 are distributions with the same figures, within .02.
    """
    generator = torch.Generator().manual_seed(0)
    logits, error = (torch.randn(8, 300, dtype=torch.float64, generator=generator) for _ in range(2))
    p, q = logits.softmax(-1), (logits + 0.67 * error).softmax(-1)
    one, four = (float(acceptance.coupled(p, q, k).mean()) for k in (1, 4))
    token, rejection = acceptance.token(p, q).mean(), acceptance.recursive(p, q, 4, replace=True).mean()
    assert (float(token), one, four) == pytest.approx((0.745, 0.685, 0.957), abs=0.02)
    assert one < float(token) < float(rejection) < four


# Chains


def conditional(model, depth: int, vocab: int) -> list[torch.Tensor]:
    """For ``chain``: [V], [V, V], ... by path."""
    result = []
    for at in range(depth):
        paths = torch.cartesian_prod(*[torch.arange(vocab)] * at).reshape(-1, at).tolist() if at else [()]
        result.append(torch.stack([row(model, path) for path in paths]).reshape([vocab] * (at + 1)))
    return result


@pairs
@pytest.mark.parametrize("rule", ["token", "block"])
def test_chain_acceptance_is_that_of_the_enumeration(seed, zeros, rule):
    p, q = models(3, seed, zeros)
    formula = float(acceptance.chain(conditional(p, 3, 3), conditional(q, 3, 3), rule))
    assert accepted(Pair(p, drawn(q), rejection=rule)) == pytest.approx(formula, abs=1e-12)


def test_chain_toy_of_the_block_paper():
    """2403.10444: 10/9 by token, 11/9 by block verification, of 12/9."""
    p, q = (
        [torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)] * 2,
        [torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)] * 2,
    )
    for rule, expected in (("token", 10 / 9), ("block", 11 / 9), ("ideal", 12 / 9)):
        assert float(acceptance.chain(p, q, rule)) == pytest.approx(expected, abs=1e-12)
    for rule, expected in (("token", 10 / 9), ("block", 11 / 9)):
        pair = Pair(constant(1 / 3, 2 / 3), drawn(constant(2 / 3, 1 / 3)), rejection=rule, budget=lambda generated: 2)
        assert accepted(pair) == pytest.approx(expected, abs=1e-12)


@relaxed
@given(st.lists(st.tuples(distributions(3), distributions(3)), min_size=1, max_size=4))
def test_token_under_block_under_ideal(rows):
    p, q = zip(*rows, strict=True)
    token, block, ideal = (float(acceptance.chain(p, q, rule)) for rule in ("token", "block", "ideal"))
    assert token <= block + 1e-12
    assert block <= ideal + 1e-12


def test_block_weights_of_every_continuation_average_to_the_chain():
    p, q = models(3, 0)
    depth = 3
    p_rows, q_rows = conditional(p, depth, 3), conditional(q, depth, 3)
    paths = torch.cartesian_prod(*[torch.arange(3)] * depth)
    at = [tuple(paths[:, : i + 1].T) for i in range(depth)]
    ratios = torch.stack([p_rows[i][at[i]] / q_rows[i][at[i]] for i in range(depth)], -1)
    mass = torch.stack([q_rows[i][at[i]] for i in range(depth)], -1).prod(-1)
    block = (mass * acceptance.block_weights(ratios).sum(-1)).sum()
    token = (mass * ratios.clamp(max=1).cumprod(-1).sum(-1)).sum()
    assert float(block) == pytest.approx(float(acceptance.chain(p_rows, q_rows, "block")), abs=1e-12)
    assert float(token) == pytest.approx(float(acceptance.chain(p_rows, q_rows, "token")), abs=1e-12)


# Shapes and refusals


def test_leading_dimensions_and_kinds_of_arrays():
    generator = torch.Generator().manual_seed(1)
    p, q = (torch.rand(2, 3, 5, generator=generator).softmax(-1) for _ in range(2))
    one_by_one = {
        "token": lambda a, b: acceptance.token(a, b),
        "coupled": lambda a, b: acceptance.coupled(a, b),
        "coupled, two": lambda a, b: acceptance.coupled(a, b, 2),
        "recursive": lambda a, b: acceptance.recursive(a, b, 2),
        "recursive, i.i.d.": lambda a, b: acceptance.recursive(a, b, 2, replace=True),
        "greedy-multi": lambda a, b: acceptance.greedy_multi(a, b, 2),
        "lenient": lambda a, b: acceptance.lenient(a, b, 0.8),
        "typical": lambda a, b: acceptance.typical(a, b),
        "walk": lambda a, b: acceptance.walk(a, torch.tensor([1, 3])),
    }
    for name, rule in one_by_one.items():
        whole = rule(p, q.numpy())
        assert whole.shape == (2, 3), name
        assert whole.dtype == torch.float64
        assert float(whole[1, 2]) == pytest.approx(float(rule(p[1, 2], q[1, 2])), abs=1e-12), name
        assert rule(p, q[0, 0])[0, 0] == pytest.approx(whole[0, 0])


@relaxed
@given(distributions(), distributions())
def test_every_acceptance_is_a_chance(p, q):
    for result in (
        acceptance.token(p, q),
        acceptance.coupled(p, q),
        acceptance.coupled(p, q, 2),
        acceptance.recursive(p, q, 3),
        acceptance.recursive(p, q, 3, replace=True),
        acceptance.greedy_multi(p, q, 2),
        acceptance.typical(p, q),
    ):
        assert -1e-12 <= float(result) <= 1 + 1e-12


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda p: acceptance.token(p.log(), p), "softmax"),
        (lambda p: acceptance.token(p * 2, p), "summing to 1"),
        (lambda p: acceptance.recursive(p, p, 0), "siblings"),
        (lambda p: acceptance.recursive(p.repeat(100) / 100, p.repeat(100) / 100, 6), "too many branches"),
        (lambda p: acceptance.greedy_multi(p, p, 9), "siblings"),
        (lambda p: acceptance.lenient(p, p, 0.0), "lenience"),
        (lambda p: acceptance.chain([p], [p], "best"), "'token', 'block' or 'ideal'"),
        (lambda p: acceptance.coupled(p, p, 0), "children"),
    ],
)
def test_what_cannot_be_is_refused(wrong, message):
    with pytest.raises(InvalidRequest, match=message):
        wrong(torch.tensor([0.2, 0.3, 0.5]))
