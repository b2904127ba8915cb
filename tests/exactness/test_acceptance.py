"""Every verifier's acceptance, by enumeration, is that of the papers' formula: p of the target, q of the draft, [V]."""

import math

import pytest
import torch
from torch import Tensor

from foretoken.core.draft import Draft, Sampled
from foretoken.core.streams import SharedStream
from foretoken.verify import VERIFIERS
from foretoken.verify.typical import DELTA, EPSILON

from .decode_step import PROMPT, Pair, argmax, constant, drawn, drawn_tree, fixed_tree, table, top_plus_tree
from .enumerate import outcomes

pairs = pytest.mark.parametrize("seed, zeros", [(0, 0.0), (1, 0.4)])


def accepted(pair: Pair) -> float:
    return sum(p * (len(emitted) - 1) for emitted, p in outcomes(lambda s: pair.step((), s), position=0).items())


def models(vocab: int, seed: int, zeros: float = 0.0):
    return table(vocab, seed, 1.5, zeros), table(vocab, 70 + seed, 1.5, zeros)


def row(model, path=()) -> Tensor:
    return model((*PROMPT, *path)).softmax(-1)


def overlap(p: Tensor, q: Tensor) -> float:
    """1 - TV, the optimum for one sampled token (2211.17192, theorem 3.5)."""
    return float(torch.minimum(p, q).sum())


def residual(p: Tensor, q: Tensor) -> Tensor:
    rest = (p - q).clamp(min=0.0)
    return rest / rest.sum() if rest.sum() > 0 else p


# One node


@pairs
def test_token_rejection_accepts_the_overlap(seed, zeros):
    p, q = models(4, seed, zeros)
    for rejection in ("token", "block"):  # a chain of one is verified in the same way
        pair = Pair(p, drawn(q), rejection=rejection, budget=lambda generated: 1)
        assert accepted(pair) == pytest.approx(overlap(row(p), row(q)), abs=1e-12)


@pairs
def test_walk_accepts_the_probability_of_the_distinct_candidates(seed, zeros):
    p, q = models(4, seed, zeros)
    siblings = fixed_tree((2, 0, 2), (-1, -1, -1))  # one of them twice
    assert accepted(Pair(p, siblings)) == pytest.approx(float(row(p)[[0, 2]].sum()), abs=1e-12)
    greedy = Pair(p, argmax(q), budget=lambda generated: 1)
    assert accepted(greedy) == pytest.approx(float(row(p)[row(q).argmax()]), abs=1e-12)


def recursive(p: Tensor, q: Tensor, siblings: int, replace: bool) -> float:
    """Recursive rejection, i.i.d. (2305.09781) or without replacement (2402.12374).

    After a rejection p <- norm((p - q)+), and without replacement q[x] <- 0, renormalized.
    """
    if not siblings or not q.sum() > 0:
        return 0.0
    kept, rest = overlap(p, q), residual(p, q)
    if replace:
        return kept + (1 - kept) * recursive(rest, q, siblings - 1, replace)
    for x, rejected in enumerate((q - p).clamp(min=0.0).tolist()):
        if rejected:
            others = q.clone()
            others[x] = 0.0
            kept += rejected * recursive(rest, others / others.sum().clamp(min=1e-300), siblings - 1, replace)
    return kept


@pairs
@pytest.mark.parametrize("replace", [True, False], ids=["i.i.d.", "without replacement"])
@pytest.mark.parametrize("siblings", [1, 2, 3])
def test_recursive_rejection_and_one_level_of_traversal(seed, zeros, replace, siblings):
    p, q = models(4, seed, zeros)
    formula = recursive(row(p), row(q), siblings, replace)
    for rejection in ("token", "block"):
        pair = Pair(p, drawn_tree(q, (siblings,), replace), rejection=rejection)
        assert accepted(pair) == pytest.approx(formula, abs=1e-12)


@pairs
@pytest.mark.parametrize("siblings", [1, 2, 3])
def test_greedy_multi_draft_attains_the_optimal_transport_bound(seed, zeros, siblings):
    """The top ``siblings`` - 1 tokens T of q and one sampled from q' = q outside T: p(T) + sum min(p, q')."""
    p, q = models(4, seed, zeros)
    if siblings <= int((row(q) > 0).sum()):  # with less to draw from, the last sibling is one more fixed candidate
        top = row(q).topk(siblings - 1).indices
        rest = row(q).index_fill(0, top, 0.0)
        formula = float(row(p)[top].sum()) + overlap(row(p).index_fill(0, top, 0.0), rest / rest.sum())
        assert accepted(Pair(p, top_plus_tree(q, (siblings,)))) == pytest.approx(formula, abs=1e-12)


@pairs
def test_typical_acceptance_accepts_likely_tokens(seed, zeros):
    p, q = (row(model) for model in models(5, seed, zeros))

    def run(streams):
        stream = streams.private(1, 0)
        draft = Draft.chain([stream.categorical(q, 0)], Sampled(q[None]))
        return len(VERIFIERS["typical"](draft, torch.stack([p] * 2), streams.private(2, 0)).path)

    threshold = min(EPSILON, DELTA * math.exp(-float(torch.special.entr(p).sum())))
    share = sum(chance * kept for kept, chance in outcomes(run).items())
    assert share == pytest.approx(float(q[p > threshold].sum()), abs=1e-12)


# The trajectory grade


def coupled(p: Tensor, q: Tensor, children: int = 1) -> float:
    """The chance that the target's argmax(log p + G) is among the top ``children`` of log q + G (2408.07978).

    Let x win p's exponential race at time s. In q's race each y overtakes it independently with probability
    1 - exp(-s l_y), l_y = (q_y p_x/q_x - p_y)+, and x is among the top if fewer than ``children`` do. The integral over
    s is exact for one child, sum_x 1 / sum_y max(p_y/p_x, q_y/q_x), and a sum over a fine grid of exp(-s) for more.
    """
    total, chances = 0.0, (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    for x in range(len(p)):
        if not p[x] > 0 or not q[x] > 0:
            continue
        rates = (q * p[x] / q[x] - p).clamp(min=0)
        if children == 1:
            total += float(p[x] / (1 + rates.sum()))
            continue
        ahead = [torch.ones_like(chances), *[torch.zeros_like(chances)] * (children - 1)]  # by number that overtook x
        for rate in rates:
            behind = chances**rate  # exp(-s l_y) where exp(-s) is a chance
            ahead = [a * behind + b * (1 - behind) for a, b in zip(ahead, [0.0, *ahead[:-1]], strict=True)]
        total += float(p[x] * torch.stack(ahead).sum(0).mean())
    return total


@pytest.mark.parametrize("seed, children", [(0, 1), (1, 2), (2, 3)])
def test_coupled_acceptance_is_that_of_the_shared_noise(seed, children):
    """The noise cannot be enumerated: 2,000 positions of it, within four standard errors."""
    p, q = (row(model) for model in models(6, seed))
    expected, count = coupled(p, q, children), 2_000
    hits = sum(
        SharedStream(seed, at).categorical(p, 0) in SharedStream(seed, at).race(q, 0).topk(children).indices.tolist()
        for at in range(count)
    )
    assert hits / count == pytest.approx(expected, abs=4 * (expected * (1 - expected) / count) ** 0.5)


@pytest.mark.parametrize("seed", range(4))
def test_coupled_acceptance_keeps_its_bounds(seed):
    """(1 - TV) / (1 + TV) <= P(match) <= 1 - TV; two tokens, p = (1/3, 2/3) and q reversed, match with 2/3."""
    p, q = (row(model) for model in models(7, seed))
    most = overlap(p, q)
    assert most / (2 - most) <= coupled(p, q) <= most
    assert coupled(p, q) < coupled(p, q, 2) < coupled(p, q, 3) < coupled(p, q, 7) == pytest.approx(1.0)
    third = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
    assert coupled(third, third.flip(0)) == pytest.approx(2 / 3)


# Chains


def chain(p, q, depth: int, vocab: int, rule: str) -> float:
    """E[accepted] of a chain, by enumerating all paths of the draft.

    token: sum_i prod_j min(1, p_j/q_j). block: sum_i w_i with w_i = min(1, w_{i-1} p_i/q_i) (2403.10444, section 4).
    ideal: sum_i min(1, prod_j p_j/q_j), the maximum over all verifiers of one path.
    """
    total = 0.0
    paths: list[tuple[tuple[int, ...], float, float]] = [((), 1.0, 1.0)]  # path, its probability under q, w
    for _ in range(depth):
        longer = []
        for path, mass, weight in paths:
            for x, (chance, ours) in enumerate(zip(row(q, path).tolist(), row(p, path).tolist(), strict=True)):
                if chance:
                    ratio = ours / chance
                    w = weight * (min(1.0, ratio) if rule == "token" else ratio)
                    longer.append(((*path, x), mass * chance, min(1.0, w) if rule == "block" else w))
        paths = longer
        total += sum(mass * min(1.0, w) for _, mass, w in paths)
    return total


@pairs
@pytest.mark.parametrize("rule", ["token", "block"])
def test_chain_acceptance_is_that_of_the_enumeration(seed, zeros, rule):
    p, q = models(3, seed, zeros)
    formula = chain(p, q, 3, 3, rule)
    assert accepted(Pair(p, drawn(q), rejection=rule)) == pytest.approx(formula, abs=1e-12)
    assert chain(p, q, 3, 3, "token") <= chain(p, q, 3, 3, "block") <= chain(p, q, 3, 3, "ideal")


def test_chain_of_the_block_paper():
    """2403.10444: p = (1/3, 2/3), q = (2/3, 1/3): 10/9 by token, 11/9 by block verification, of 12/9."""
    p, q = constant(1 / 3, 2 / 3), constant(2 / 3, 1 / 3)
    for rule, expected in (("token", 10 / 9), ("block", 11 / 9), ("ideal", 12 / 9)):
        assert chain(p, q, 2, 2, rule) == pytest.approx(expected, abs=1e-12)
    for rule, expected in (("token", 10 / 9), ("block", 11 / 9)):
        pair = Pair(p, drawn(q), rejection=rule, budget=lambda generated: 2)
        assert accepted(pair) == pytest.approx(expected, abs=1e-12)
