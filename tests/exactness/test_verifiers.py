"""Every verifier, enumerated through the production code: the law of the first tokens is the target's."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.core.context import Exactness
from foretoken.core.draft import Draft, PointMass, Sampled, TopPlusSampled, WithoutReplacement
from foretoken.core.errors import InvalidRequest
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Purpose, Streams
from foretoken.params import MAX_SPECULATIVE_TOKENS
from foretoken.verify import VERIFIERS, choose, stream_for

from .decode_step import (
    PROMPT,
    Pair,
    argmax,
    constant,
    drawn,
    drawn_tree,
    fixed_tree,
    shaped_tree,
    table,
    top_plus_tree,
)
from .enumerate import outcomes

LIMIT = 1e-12
CHAIN_RULES = ("block", "token")


def unlike(vocab: int, **kwargs):
    """A target and an unrelated draft."""
    return table(vocab, seed=1, **kwargs), table(vocab, seed=2, **kwargs)


PAIRS = {
    "unlike": lambda v: unlike(v),
    "zeros": lambda v: unlike(v, zeros=0.4),
    "sharp": lambda v: unlike(v, sharpness=6.0),
    "p = q": lambda v: (table(v, seed=1),) * 2,
    "p = q with zeros": lambda v: (table(v, seed=1, zeros=0.5),) * 2,
    "one-hot q": lambda v: (table(v, seed=1), table(v, seed=2, zeros=1.0)),
    "one-hot p": lambda v: (table(v, seed=1, zeros=1.0), table(v, seed=2)),
    "one-hot both": lambda v: (table(v, seed=1, zeros=1.0), table(v, seed=2, zeros=1.0)),
    "disjoint": lambda v: (constant(*[1.0] * (v - 1), 0.0), constant(*[0.0] * (v - 1), 1.0)),
}
pairs = pytest.mark.parametrize("pair", PAIRS)


@pairs
@pytest.mark.parametrize("rejection", CHAIN_RULES)
@pytest.mark.parametrize("vocab, depth", [(2, 3), (3, 2), (4, 1)])
def test_drawn_chain(pair, rejection, vocab, depth):
    p, q = PAIRS[pair](vocab)
    assert Pair(p, drawn(q), rejection=rejection, budget=lambda g: depth).gap(length=3) < LIMIT


@pytest.mark.parametrize("rejection", CHAIN_RULES)
def test_drawn_chain_three_tokens_deep_over_three_tokens(rejection):
    p, q = unlike(3, zeros=0.2)
    assert Pair(p, drawn(q), rejection=rejection).gap(length=4) < LIMIT


@pairs
def test_argmax_chain(pair):
    p, q = PAIRS[pair](3)
    assert Pair(p, argmax(q)).gap(length=4) < LIMIT


TREES = {
    "chain": ((0, 1, 0), (-1, 0, 1)),
    "ragged": ((0, 1, 2, 0, 0, 1), (-1, -1, 0, 0, 1, 3)),
    "all of two levels": ((0, 1, 2) * 4, (-1, -1, -1, 0, 0, 0, 1, 1, 1, 2, 2, 2)),
    "duplicate siblings": ((1, 1, 0, 2, 0), (-1, -1, 0, 1, 3)),
    "duplicates that meet again": ((1, 1, 2, 2, 0, 1), (-1, -1, 0, 1, 2, 3)),
}


@pairs
@pytest.mark.parametrize("tree", TREES)
def test_fixed_tree(pair, tree):
    p, _ = PAIRS[pair](3)
    assert Pair(p, fixed_tree(*TREES[tree])).gap(length=4) < LIMIT


trees = pytest.mark.parametrize("rejection", CHAIN_RULES, ids=["traversal", "recursive"])
kinds = pytest.mark.parametrize("replace", [True, False], ids=["i.i.d.", "without replacement"])


@pairs
@trees
@kinds
@pytest.mark.parametrize("widths", [(2,), (3,), (2, 1), (1, 2)])
@pytest.mark.slow
def test_drawn_tree(pair, rejection, replace, widths):
    p, q = PAIRS[pair](3)
    assert Pair(p, drawn_tree(q, widths, replace), rejection=rejection).gap(length=3) < LIMIT


@trees
@kinds
def test_drawn_tree_two_levels_of_two(rejection, replace):
    p, q = unlike(2, zeros=0.1)
    assert Pair(p, drawn_tree(q, (2, 2), replace), rejection=rejection).gap(length=3) < LIMIT


SHAPES = {
    "the second child goes deeper": lambda path, drawn: (2, 0, 2)[len(drawn)] if len(drawn) < 3 else 0,
    "three levels, one side": lambda path, drawn: {(): 2, (0,): 1, (0, 1): 2}.get(path, 0),
    "as the token says": lambda path, drawn: (2, path[-1] if path else 2, 0)[len(path)],
    "as the elder sibling's token says": lambda path, drawn: 2 if not path else drawn[0] if len(path) == 1 else 0,
    "none": lambda path, drawn: 0,
}


@trees
@kinds
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.slow
def test_drawn_tree_of_any_shape_decided_before_its_draws(shape, replace, rejection):
    p, q = unlike(3, zeros=0.2)
    assert Pair(p, shaped_tree(q, SHAPES[shape], replace), rejection=rejection).gap(length=3) < LIMIT


@trees
@kinds
def test_drawn_tree_with_siblings_beyond_what_q_can_draw(replace, rejection):
    p, q = constant(0.2, 0.3, 0.5, 0.0), constant(0.5, 0.5, 0.0, 0.0)
    assert Pair(p, drawn_tree(q, (4,), replace), rejection=rejection).gap(length=2) < LIMIT


@trees
@kinds
@pytest.mark.parametrize(
    "law", [SamplingLaw(temperature=0.0), SamplingLaw(temperature=0.7, top_k=2, frequency_penalty=1.0)]
)
def test_drawn_tree_under_sampling_parameters(law, replace, rejection):
    p, q = unlike(3)
    own = SamplingLaw(temperature=1.2)
    assert Pair(p, drawn_tree(q, (2, 1), replace, own), law=law, rejection=rejection).gap(length=3) < LIMIT


@trees
@pytest.mark.slow
def test_drawn_tree_with_an_end_inside(rejection):
    p, q = unlike(3)
    cut = lambda text, added: added[: added.index(1) + 1] if 1 in added else added  # noqa: E731
    pair = Pair(p, drawn_tree(q, (2, 1), replace=False), rejection=rejection, cut=cut)
    assert pair.gap(4, lambda text: text[-1] == 1) < LIMIT


@pytest.mark.parametrize("pair", ["unlike", "zeros", "sharp"])
@pytest.mark.parametrize("replace", [True, False], ids=["i.i.d.", "without replacement"])
def test_traversal_of_a_chain_is_block_verification_number_for_number(pair, replace):
    p, q = (model((0, 1)).softmax(-1).expand(4, -1) for model in PAIRS[pair](5))
    kind = Sampled if replace else WithoutReplacement
    for seed in range(300):
        stream = Streams(seed).private(Purpose.DRAFT, 0)
        draft = Draft.chain([stream.categorical(q[i], i) for i in range(3)], kind(q[:3]))
        verdicts = [
            VERIFIERS[rule](draft, p, Streams(seed).private(Purpose.VERIFY, 0)) for rule in ("traversal", "block")
        ]
        assert verdicts[0] == verdicts[1]


@pairs
@pytest.mark.parametrize("widths", [(1,), (2,), (3,), (2, 2), (3, 1)])
@pytest.mark.slow
def test_top_plus_tree(pair, widths):
    p, q = PAIRS[pair](4)
    assert Pair(p, top_plus_tree(q, widths)).gap(length=len(widths) + 1) < LIMIT


@pytest.mark.parametrize("rejection", CHAIN_RULES)
def test_draft_length_decided_beforehand_may_vary(rejection):
    p, q = unlike(3)
    assert Pair(p, drawn(q), rejection=rejection, budget=lambda g: (2, 0, 1, 2)[g]).gap(length=4) < LIMIT


@pytest.mark.parametrize("rejection", CHAIN_RULES)
def test_draft_may_stop_on_the_law_it_is_about_to_draw_from(rejection):
    p, q = unlike(3)
    assert Pair(p, drawn(q, stop=lambda row: float(row.max()) < 0.5), rejection=rejection).gap(length=3) < LIMIT


@pytest.mark.parametrize("rejection", CHAIN_RULES)
def test_draft_may_have_its_own_temperature_and_filters(rejection):
    p, q = unlike(3)
    own = SamplingLaw(temperature=0.5, top_k=2)
    pair = Pair(p, drawn(q, own), law=SamplingLaw(temperature=1.3, top_p=0.9), rejection=rejection, budget=lambda g: 2)
    assert pair.gap(length=3) < LIMIT


# Accepted lengths


def accepted(pair: Pair) -> float:
    """Expected accepted draft tokens of the first step."""
    return sum(p * (len(emitted) - 1) for emitted, p in outcomes(lambda s: pair.step((), s), position=0).items())


@pytest.mark.parametrize("rejection, expected", [("token", 10 / 9), ("block", 11 / 9)])
def test_accepted_length_of_the_paper(rejection, expected):
    p, q = constant(1 / 3, 2 / 3), constant(2 / 3, 1 / 3)  # 2403.10444
    pair = Pair(p, drawn(q), rejection=rejection, budget=lambda g: 2)
    assert accepted(pair) == pytest.approx(expected, abs=1e-12)


def test_walk_accepts_the_path_probabilities():
    p, _ = unlike(3)
    pair = Pair(p, fixed_tree(*TREES["ragged"]))
    draft = fixed_tree(*TREES["ragged"])(None, 0)
    reference = {n: pair.reference(n) for n in (1, 2, 3)}
    paths = [tuple(draft.ids[i] for i in draft.path(node)) for node in range(len(draft))]
    assert accepted(pair) == pytest.approx(sum(reference[len(path)][path] for path in paths), abs=1e-12)


@pytest.mark.parametrize("replace", [True, False], ids=["i.i.d.", "without replacement"])
def test_traversal_accepts_more_than_recursive_rejection(replace):
    gains = []
    for seed in range(3):
        p, q = table(3, seed=seed), table(3, seed=100 + seed)
        whole, single = (accepted(Pair(p, drawn_tree(q, (2, 1), replace), rejection=r)) for r in CHAIN_RULES)
        gains.append(whole - single)
    assert min(gains) > -1e-12
    assert sum(gains) > 0.02


def test_greedy_multi_draft_attains_its_bound():
    p, q = (0.2, 0.3, 0.1, 0.4), (0.5, 0.25, 0.15, 0.1)
    pair = Pair(constant(*p), top_plus_tree(constant(*q), (2,)))
    bound = p[0] + sum(min(a, b / (1 - q[0])) for a, b in zip(p[1:], q[1:], strict=True))
    assert accepted(pair) == pytest.approx(bound, abs=1e-12)


@pytest.mark.parametrize("rejection", CHAIN_RULES)
def test_a_draft_equal_to_the_target_is_accepted_whole(rejection):
    p = table(3, seed=1, dtype=torch.float32)
    assert accepted(Pair(p, drawn(p), rejection=rejection)) == pytest.approx(3.0, abs=1e-12)


# Numbers as production has them, and malformed drafts


@pytest.mark.parametrize("rejection", CHAIN_RULES)
def test_float32_rows_are_exact_to_their_rounding(rejection):
    p, q = unlike(3, dtype=torch.float32)
    assert Pair(p, drawn(q), rejection=rejection, budget=lambda g: 2).gap(length=3) < 1e-6


SUPPORT = {name: rule for name, rule in VERIFIERS.items() if name != "coupled"}


@pytest.mark.parametrize("verifier", SUPPORT.values(), ids=SUPPORT.keys())
@pytest.mark.parametrize("q", [(0.0, 0.5, 0.5), (0.5, 0.0, 0.5), (1.0, 0.0, 0.0), (0.0, 0.0, 0.0)])
def test_forbidden_tokens_are_never_emitted(verifier, q):
    """Not even when the draft's reported law is wrong and p = q = 0 at a drafted token."""
    p = torch.tensor([[0.0, 0.4, 0.6]] * 3, dtype=torch.float64)
    kind = TopPlusSampled if verifier is VERIFIERS["greedy-multi"] else Sampled
    draft = Draft.chain([0, 0], kind(torch.tensor([q] * 2, dtype=torch.float64)))

    def run(streams):
        verdict = verifier(draft, p, streams.private(Purpose.VERIFY, 0))
        return (len(verdict.path), verdict.token)

    law = outcomes(run)
    assert all(length == 0 and token != 0 for length, token in law)


@pytest.mark.parametrize("name", VERIFIERS)
def test_the_empty_draft_is_plain_decoding(name):
    p = torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.float64)
    law = outcomes(lambda s: VERIFIERS[name](Draft.empty(), p, s.private(Purpose.VERIFY, 0)).token)
    assert law == pytest.approx({0: 0.2, 1: 0.3, 2: 0.5}, abs=1e-15)


@pytest.mark.parametrize("name", ["token", "block", "recursive", "traversal", "greedy-multi"])
def test_rules_that_need_q_refuse_drafts_without_it(name):
    p = torch.full((3, 4), 0.25)
    stream = Streams(0).private(Purpose.VERIFY, 0)
    with pytest.raises(ValueError, match="fixed candidates"):
        VERIFIERS[name](Draft.chain([1, 2]), p, stream)
    with pytest.raises(ValueError, match=r"expected \[2 or more, 4\]"):
        VERIFIERS[name](Draft.chain([1, 2], Sampled(torch.full((1, 4), 0.25))), p, stream)
    with pytest.raises(ValueError, match=r"expected \[2 or more, 4\]"):
        VERIFIERS[name](Draft.chain([1, 2], Sampled(torch.full((2, 3), 1 / 3))), p, stream)


@pytest.mark.parametrize("name", VERIFIERS)
def test_a_row_of_nan_is_an_error_and_never_a_token(name):
    p = torch.full((2, 2), torch.nan)
    draft = Draft.chain([1], Sampled(torch.tensor([[0.5, 0.5]])))
    with pytest.raises(ValueError, match="cannot draw"):
        VERIFIERS[name](draft, p, stream_for(Exactness.DISTRIBUTION, Streams(1), 0))


@pytest.mark.parametrize("accepts", [True, False], ids=["accepted", "rejected"])
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("name", VERIFIERS)
def test_the_deepest_drafts_are_verified(name, shape, accepts):
    """4,096 nodes: a path, or a path whose nodes have a second child each. The draft's law puts half on token 0."""
    n = MAX_SPECULATIVE_TOKENS
    parents = range(-1, n - 1) if shape == "chain" else (2 * (i // 2 - 1) if i > 1 else -1 for i in range(n))
    tokens = [0 if shape == "chain" else i % 2 for i in range(n)]
    law = {"greedy-multi": TopPlusSampled, "block": Sampled, "token": Sampled}.get(name, WithoutReplacement)
    draft = Draft(tuple(tokens), tuple(parents), law(torch.tensor([[0.5, 0.5, 0.0]]).expand(n, 3)))
    p = torch.tensor([[1.0, 0.0, 0.0] if accepts else [0.0, 0.0, 1.0]]).expand(n + 1, 3)
    grade = Exactness.TRAJECTORY if name == "coupled" else Exactness.DISTRIBUTION
    verdict = VERIFIERS[name](draft, p, stream_for(grade, Streams(1), 0))
    depth = max(draft.depths) if accepts else 0
    assert (len(verdict.path), verdict.token) == (depth, 0 if accepts else 2)
    assert verdict.path == draft.path(verdict.path[-1] if accepts else -1)


# The choice


def test_choice_by_law_and_grade():
    rows = torch.zeros(1, 2)
    assert choose(PointMass()) is VERIFIERS["walk"]
    assert choose(Sampled(rows)) is VERIFIERS["block"]
    assert choose(Sampled(rows), rejection="token") is VERIFIERS["token"]
    assert choose(WithoutReplacement(rows)) is VERIFIERS["traversal"]
    assert choose(WithoutReplacement(rows), rejection="token") is VERIFIERS["recursive"]
    assert choose(TopPlusSampled(rows)) is VERIFIERS["greedy-multi"]
    for law in (PointMass(), Sampled(rows), WithoutReplacement(rows), TopPlusSampled(rows)):
        assert choose(law, Exactness.TRAJECTORY) is VERIFIERS["coupled"]
        assert choose(law, Exactness.TYPICAL) is VERIFIERS["typical"]
    with pytest.raises(InvalidRequest, match="'block' or 'token'"):
        choose(Sampled(rows), rejection="blok")


def test_stream_of_each_grade():
    streams = Streams(5)
    assert stream_for(Exactness.TRAJECTORY, streams, 7) == streams.shared(7)
    for grade in (Exactness.DISTRIBUTION, Exactness.TYPICAL):
        assert stream_for(grade, streams, 7) == streams.private(Purpose.VERIFY, 7)


# Lossy


def test_typical_acceptance_is_lossy_and_only_greedy_keeps_it_exact():
    p, q = table(3, seed=1), table(3, seed=2)
    pair = Pair(p, argmax(q), exactness=Exactness.TYPICAL)
    assert pair.gap(length=3) > 0.05
    assert Pair(p, argmax(q), law=SamplingLaw(temperature=0.0), exactness=Exactness.TYPICAL).gap(length=3) < LIMIT


def test_typical_acceptance_keeps_the_longest_path_above_the_threshold():
    p = torch.tensor([[0.5, 0.46, 0.04], [0.98, 0.01, 0.01], [0.3, 0.3, 0.4], [0.1, 0.1, 0.8]], dtype=torch.float64)
    draft = Draft.tree([0, 1, 2], (-1, -1, 1))  # 0 | 1 -> 2
    law = outcomes(lambda s: VERIFIERS["typical"](draft, p, s.private(Purpose.VERIFY, 0)).path)
    assert law == pytest.approx({(1, 2): 1.0})
    barred = Draft.tree([0, 2, 2], (-1, -1, 1))  # 0.04 at the root is under min(0.09, 0.3 exp(-H))
    law = outcomes(lambda s: VERIFIERS["typical"](barred, p, s.private(Purpose.VERIFY, 0)).path)
    assert law == pytest.approx({(0,): 1.0})


def simplex(vocab: int) -> st.SearchStrategy[tuple[float, ...]]:
    weights = st.lists(st.integers(0, 6), min_size=vocab, max_size=vocab).filter(any)
    return weights.map(lambda w: tuple(x / sum(w) for x in w))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(2, 3).flatmap(lambda v: st.tuples(simplex(v), simplex(v))), st.integers(1, 3))
@pytest.mark.slow
def test_block_is_exact_and_never_worse_than_token(distributions, depth):
    p, q = (constant(*law) for law in distributions)
    depth = depth if len(distributions[0]) == 2 else min(depth, 2)
    block, token = (Pair(p, drawn(q), rejection=r, budget=lambda g: depth) for r in ("block", "token"))
    assert block.gap(length=1) < 1e-12
    assert token.gap(length=1) < 1e-12
    assert accepted(block) >= accepted(token) - 1e-12


@pytest.mark.parametrize("seed", range(4))
def test_block_accepts_what_its_weights_predict(seed):
    """E[accepted] = sum_i E_q[w_i]."""
    p, q = table(3, seed=seed), table(3, seed=100 + seed)
    predicted = 0.0
    for length in (1, 2, 3):
        for path in product(range(3), repeat=length):
            w, mass = 1.0, 1.0
            for i, token in enumerate(path):
                p_row, q_row = (model((*PROMPT, *path[:i])).softmax(-1) for model in (p, q))
                mass *= float(q_row[token])
                w = min(1.0, w * float(p_row[token] / q_row[token]))
            predicted += mass * w
    assert accepted(Pair(p, drawn(q))) == pytest.approx(predicted, abs=1e-12)
