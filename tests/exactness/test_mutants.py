"""Every planted mistake is detected, and the honest decode step beside it is not rejected."""

from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch

from foretoken.core.draft import Draft, Sampled, WithoutReplacement
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Purpose, Streams
from foretoken.verify import block, tree

from . import mutants
from .decode_step import Pair, constant, drawn, drawn_tree, fixed_tree, table, top_plus_tree
from .enumerate import AddressReused, Text, exact_law
from .gtest import draws_needed, g_test

LIMIT = 1e-12
P, Q = table(3, seed=31, sharpness=1.5), table(3, seed=32, sharpness=1.5)
TOKEN = Pair(P, drawn(Q), rejection="token", budget=lambda g: 2)
BLOCK = Pair(P, drawn(Q), rejection="block", budget=lambda g: 2)
PENALIZED = SamplingLaw(temperature=0.7, top_p=0.9, frequency_penalty=1.0)


def caught(honest: Pair, mutant: Pair, least: float = 0.01, length: int = 3) -> None:
    """The enumerator passes the one and sees the other at total variation ``least`` or more."""
    assert honest.gap(length) < LIMIT
    assert mutant.gap(length) > least


def caught_by_sampling(honest: Pair, mutant: Pair, delta: float) -> None:
    """Through the real streams: a test with power 0.9 at ``delta`` passes the one and fails the other."""
    reference = honest.reference(2)
    n = draws_needed(delta, cells=len(reference))
    p_values = [
        g_test(Counter(pair.text(seed, 2) for seed in range(n)), reference).p_value for pair in (honest, mutant)
    ]
    assert p_values[0] > 1e-3 > p_values[1], p_values


@pytest.mark.parametrize("honest", [TOKEN, BLOCK], ids=["token", "block"])
def test_argmax_draft_with_softmax_q(honest):
    caught(honest, replace(honest, propose=mutants.argmax_with_softmax_q(Q)))


@pytest.mark.parametrize("honest", [TOKEN, BLOCK], ids=["token", "block"])
def test_q_recomputed_at_another_temperature(honest):
    drew, reports = SamplingLaw(temperature=0.6), SamplingLaw()
    caught(
        replace(honest, propose=drawn(Q, drew)), replace(honest, propose=mutants.reports_another_law(Q, drew, reports))
    )


@pytest.mark.parametrize("honest", [TOKEN, BLOCK], ids=["token", "block"])
def test_q_recomputed_in_another_precision(honest):
    caught(honest, replace(honest, propose=mutants.reports_in_bfloat16(Q)), least=1e-5)


@pytest.mark.parametrize("honest", [TOKEN, BLOCK], ids=["token", "block"])
def test_draft_top_k_silently_applied(honest):
    drew, reports = SamplingLaw(top_k=2), SamplingLaw()
    caught(
        replace(honest, propose=drawn(Q, drew)), replace(honest, propose=mutants.reports_another_law(Q, drew, reports))
    )


@pytest.mark.parametrize("honest", [TOKEN, BLOCK], ids=["token", "block"])
def test_drawn_tokens_of_low_confidence_dropped(honest):
    caught(honest, replace(honest, propose=mutants.drops_unlikely_tokens(Q, least=0.35)))


@pytest.mark.parametrize("rejection", ["token", "block"])
def test_drawn_tokens_dropped_at_a_grammar_violation(rejection):
    p, q = constant(0.5, 0.5, 0.0), constant(0.6, 0.1, 0.3)
    honest = Pair(p, drawn(q), rejection=rejection, budget=lambda g: 1)
    mutant = replace(honest, propose=mutants.drops_illegal_tokens(q, illegal=2))
    assert exact_law(honest.emit, 1) == pytest.approx({(0,): 0.5, (1,): 0.5}, abs=LIMIT)
    assert exact_law(mutant.emit, 1) == pytest.approx({(0,): 0.65, (1,): 0.35}, abs=LIMIT)


def test_target_rows_without_the_sampling_parameters():
    honest = replace(BLOCK, law=PENALIZED)
    caught(honest, replace(honest, target_rows=mutants.rows_without_parameters))


def test_bonus_row_without_its_processors():
    honest = replace(BLOCK, law=PENALIZED)
    caught(honest, replace(honest, target_rows=mutants.bonus_without_parameters))


@pytest.mark.parametrize(
    "law",
    [
        SamplingLaw(frequency_penalty=1.0),
        SamplingLaw(repetition_penalty=2.0),
        SamplingLaw(bad_words=((0, 1), (2, 2))),
        SamplingLaw(min_tokens=2, end_ids=(1,)),
    ],
    ids=["frequency", "repetition", "bad words", "min tokens"],
)
def test_one_history_at_all_positions(law):
    honest = replace(BLOCK, law=law)
    caught(honest, replace(honest, target_rows=mutants.rows_with_one_history))


def test_residual_filtered_again():
    law = SamplingLaw(top_p=0.75)  # keeps three tokens of p, and then two of the residual
    p, q = constant(0.4, 0.3, 0.2, 0.1), constant(0.1, 0.1, 0.1, 0.7)
    honest = Pair(p, drawn(q, SamplingLaw()), law=law, rejection="token", budget=lambda g: 1)
    caught(honest, replace(honest, verifier=mutants.token_rule(rest=mutants.filtered_again(law))))


def test_the_replaceable_token_rule_is_right_as_it_stands():
    assert replace(TOKEN, verifier=mutants.token_rule()).gap(length=3) < LIMIT
    assert replace(BLOCK, verifier=mutants.block_rule).gap(length=3) < LIMIT


def test_rejecting_whenever_p_is_under_q():
    caught(TOKEN, replace(TOKEN, verifier=mutants.token_rule(accept=lambda p, q: float(p >= q))))


def test_drawing_from_p_after_a_rejection():
    caught(TOKEN, replace(TOKEN, verifier=mutants.token_rule(rest=lambda p, q: p)))


def test_accepting_where_p_and_q_are_zero():
    """A sibling beyond what q can draw, and forbidden by the target: never emitted, and the rest stays exact."""

    def exhausted(context, budget):
        return Draft.chain([2], Sampled(torch.zeros(1, 3, dtype=torch.float64)))

    honest = Pair(constant(0.5, 0.5, 0.0), exhausted, rejection="token")
    mutant = replace(honest, verifier=mutants.token_rule(accept=mutants.zero_over_zero_accepts))
    assert honest.gap(length=2) < LIMIT
    assert mutant.gap(length=2) > 0.5
    assert any(2 in text for text in exact_law(mutant.emit, 2))


def test_block_that_stops_at_the_first_failure():
    caught(BLOCK, replace(BLOCK, verifier=mutants.block_stops_at_first_failure))


def test_block_without_the_exit_weight():
    caught(BLOCK, replace(BLOCK, verifier=mutants.block_without_exit_weight))


# Trees

TREE = Pair(P, drawn_tree(Q, (2, 1), replace=False))
RECURSIVE = replace(TREE, rejection="token")
tree_rules = pytest.mark.parametrize("honest", [TREE, RECURSIVE], ids=["traversal", "recursive"])


@pytest.mark.slow
def test_the_replaceable_traversal_is_right_as_it_stands():
    for seed in range(3):
        pair = Pair(table(3, seed=seed), drawn_tree(table(3, seed=50 + seed), (2, 1), replace=False))
        assert replace(pair, verifier=mutants.traversal_rule()).gap(length=2) < LIMIT


@pytest.mark.parametrize(
    "weight_of",
    [lambda mass, pa: mass, lambda mass, pa: 1.0 if mass > 0.0 else 0.0, lambda mass, pa: pa],
    ids=["Z", "Z/Z", "unchanged"],
)
def test_traversal_with_a_wrong_update_of_the_weight(weight_of):
    caught(TREE, replace(TREE, verifier=mutants.traversal_rule(weight_of=weight_of)), length=2)


@pytest.mark.slow
def test_traversal_whose_weights_are_not_capped_along_the_path():
    """min(1, .) once at the leaf instead of at every node."""
    propose = drawn_tree(Q, (1, 1, 1), replace=False)
    honest = Pair(P, propose)
    rule = mutants.traversal_rule(below=lambda pa, ratio: pa * ratio)

    def capped_at_the_leaf(draft, probs, stream):
        class Capped:
            def bernoulli(self, p, index):
                return stream.bernoulli(min(1.0, max(0.0, p)), index)

            categorical = stream.categorical

        return rule(draft, probs, Capped())

    caught(honest, replace(honest, verifier=capped_at_the_leaf))


def test_traversal_that_forgets_what_was_drawn_before():
    caught(TREE, replace(TREE, verifier=mutants.traversal_rule(exclude=False)), least=0.002, length=2)


@tree_rules
def test_siblings_without_replacement_reported_as_independent(honest):
    caught(honest, replace(honest, propose=mutants.reports_replacement(Q)), least=0.002, length=2)


@tree_rules
def test_drawn_children_pruned(honest):
    caught(honest, replace(honest, propose=mutants.prunes_unlikely_children(Q, least=0.3)), length=2)


@tree_rules
@pytest.mark.parametrize("kind", [Sampled, WithoutReplacement])
def test_top_children_with_softmax_q(honest, kind):
    caught(honest, replace(honest, propose=mutants.top_children_with_softmax_q(Q, kind)), length=2)


def test_a_draw_for_every_path():
    honest = Pair(P, fixed_tree((0, 1, 2, 0), (-1, -1, 0, 0)))
    caught(honest, replace(honest, verifier=mutants.walk_of_every_path), length=2)


SHARP = constant(1 - 8e-8, 2.4e-8, 5.6e-8, dtype=torch.float32)


@pytest.mark.parametrize("trees", ["without replacement", "top plus one"])
def test_exit_mass_by_subtraction_in_trees(trees):
    """A sharp float32 row: what is left beside its top is 8e-8, but one minus the top is 6e-8."""
    propose = drawn_tree(SHARP, (2,), replace=False) if trees == "without replacement" else top_plus_tree(SHARP, (2,))
    pair = Pair(constant(0.2, 0.5, 0.3), propose)
    assert pair.gap(length=1) < 1e-6
    with mock.patch.object(tree, "_without", mutants.removed_by_subtraction):
        assert pair.gap(length=1) > 0.01


def test_exit_mass_by_subtraction_in_blocks():
    """For p = q the residual is empty, but one minus a float32 row's sum is not: a draw from nothing."""
    row = torch.tensor([0.3, 0.3, 0.4]) * (1 - 6e-8)  # sums to a little under 1, as a float32 softmax may
    first = torch.tensor([0.2, 0.2, 0.6])
    p, q = torch.stack([first, row, row]), torch.stack([first.flip(0), row])

    def propose(context, budget):
        stream = context.streams.private(Purpose.DRAFT, context.generated)
        return Draft.chain([stream.categorical(q[i], index=i) for i in range(2)], Sampled(q))

    pair = Pair(P, propose, target_rows=lambda context, draft, target: p)
    law = exact_law(pair.emit, 1)
    assert [law[(i,)] for i in range(3)] == pytest.approx(first.tolist(), abs=1e-6)
    with mock.patch.object(block, "excess", mutants.excess_by_subtraction), pytest.raises(ValueError, match="sum"):
        exact_law(pair.emit, 1)


# Shared noise: the enumerator sees the address asked twice, and the real streams show what it does


def test_verifying_with_the_drafts_numbers():
    """A rejected draw came from the low end of the random numbers, and the residual then uses that end too."""
    p, q = constant(0.2, 0.3, 0.3, 0.2), constant(0.7, 0.1, 0.1, 0.1)
    honest = Pair(p, drawn(q), rejection="token", budget=lambda g: 1)
    mutant = replace(honest, stream=mutants.verifying_with_the_drafts_numbers)
    with pytest.raises(AddressReused):
        mutant.gap(length=1)
    caught_by_sampling(honest, mutant, delta=0.1)


def test_one_number_for_accept_and_residual():
    mutant = replace(TOKEN, verifier=mutants.token_rule(decide=mutants.one_uniform_for_accept_and_residual))
    with pytest.raises(AddressReused):
        mutant.gap(length=1)
    caught_by_sampling(TOKEN, mutant, delta=0.1)


def test_reseeding_inside_the_accept_loop():
    mutant = replace(TOKEN, verifier=mutants.token_rule(decide=mutants.reseeded))
    with pytest.raises(AddressReused):
        mutant.gap(length=1)
    caught_by_sampling(TOKEN, mutant, delta=0.06)


@pytest.mark.slow
def test_drafting_with_noise_that_comes_again():
    """Block verification has used the noise of deeper positions, and the next step drafts from it again."""
    p, q = constant(1 / 3, 2 / 3), constant(2 / 3, 1 / 3)
    honest = Pair(p, drawn(q), budget=lambda g: 2)
    mutant = replace(honest, propose=mutants.drafting_with_shared_noise(q))
    with pytest.raises(AddressReused):
        mutant.gap(length=2)
    caught_by_sampling(honest, mutant, delta=0.05)


# Ends inside a block

EOS = 1


def test_eos_inside_an_accepted_block_ignored():
    def cut(text: Text, added: Text) -> Text:
        return added[: added.index(EOS) + 1] if EOS in added else added

    ended = lambda text: text[-1] == EOS  # noqa: E731
    honest = replace(BLOCK, cut=cut)
    assert honest.gap(4, ended) < LIMIT
    assert replace(honest, cut=mutants.judged_by_the_last_token).gap(4, ended) > 0.01


def test_stop_sequence_inside_an_accepted_block_ignored():
    def cut(text: Text, added: Text) -> Text:
        whole = text + added
        return next((added[: i + 1] for i in range(len(added)) if whole[: len(text) + i + 1][-2:] == (2, 0)), added)

    ended = lambda text: text[-2:] == (2, 0)  # noqa: E731
    honest = replace(BLOCK, cut=cut)
    assert honest.gap(4, ended) < LIMIT
    assert replace(honest, cut=mutants.judged_by_the_last_token).gap(4, ended) > 0.005


def test_max_tokens_inside_an_accepted_block_ignored():
    ended = lambda text: len(text) >= 2  # noqa: E731
    honest = replace(BLOCK, cut=lambda text, added: added[: 2 - len(text)])
    assert honest.gap(4, ended) < LIMIT
    assert replace(honest, cut=mutants.judged_by_the_last_token).gap(4, ended) > 0.1


def test_the_interface_has_no_draw_that_accepts_at_zero():
    """Production verifiers never compare a number themselves: bernoulli(0) is False at every address."""
    stream = Streams(0).private(Purpose.VERIFY, 0)
    assert not any(stream.bernoulli(0.0, index) for index in range(2000))
    assert all(stream.bernoulli(1.0, index) for index in range(2000))
