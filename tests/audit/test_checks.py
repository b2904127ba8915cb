"""The audit's checks: texts that must be equal, and the G-test of sampled texts, which planted mistakes fail."""

from dataclasses import replace

import pytest
import torch
from tests.audit import mutants
from tests.audit.toys import PROMPTS, drafting, subject, work

from foretoken.audit.equality import (
    Divergence,
    explain_divergence,
    first_difference,
    greedy,
    parity,
    self_draft,
    trajectory,
)
from foretoken.audit.implementations import Foretoken
from foretoken.audit.negative import find_error, negative
from foretoken.audit.sampled import drawn, prefix, sampled
from foretoken.audit.subject import AuditSpeed, CheckOutcome, CompletionSettings, noise
from foretoken.audit.tally import ALPHA
from foretoken.core.context import Exactness
from foretoken.core.sampling import SamplingLaw
from foretoken.core.verdict import Verdict
from foretoken.propose.base import Proposer
from foretoken.propose.suffix import Lookup
from foretoken.verify import choose

HONEST = {
    "drawn chain": lambda: drafting(),
    "argmax chain": lambda: drafting(draft_temperature=0.0),
    "drawn tree": lambda: drafting(tree="sampled", top_k=2),
    "likely and drawn": lambda: drafting(tree="greedy_multi", top_k=2),
    "lookup": lambda: Lookup(),
}
TOKENS = 4096


@pytest.mark.parametrize("proposer", HONEST)
@pytest.mark.slow
def test_an_honest_engine_passes(proposer):
    check, tally = sampled(work(subject(HONEST[proposer]())), max_tokens=1024)
    assert check.outcome is CheckOutcome.PASSED, check.evidence
    assert tally.tokens == check.numbers["tokens"] == 1024 and tally.steps > 0
    assert "would have found" in check.evidence and "power 0.9" in check.evidence


def test_seeded_texts_follow_the_law():
    check, _ = sampled(work(subject()), Exactness.TRAJECTORY, max_tokens=1024)
    assert check.outcome is CheckOutcome.PASSED, check.evidence
    assert all(one["name"] != "first: toward the draft" for one in check.numbers["statistics"])


@pytest.mark.parametrize("error", mutants.RULES)
@pytest.mark.slow
def test_a_wrong_rule_fails(error):
    draft = drafting(strength=mutants.STRENGTHS.get(error, 0.5))
    wrong = subject(draft, rule=mutants.RULES[error])
    assert find_error(work(wrong), error, wrong, TOKENS).found


@pytest.mark.parametrize("error", mutants.PROPOSERS)
def test_a_proposer_that_lies_about_its_law_fails(error):
    tampered = mutants.Tampered(drafting(), mutants.PROPOSERS[error])
    check, _ = sampled(work(subject(tampered)), max_tokens=1024)
    assert check.outcome is CheckOutcome.FAILED, check.evidence
    assert "do not follow the target's distribution" in check.evidence


class Unfiltered(Foretoken):
    """Promises a filter and forgets it."""

    def law(self, temperature):
        return SamplingLaw(temperature=temperature, top_k=11)

    def generate(self, prompts, ask):
        return super().generate(prompts, replace(ask, law=SamplingLaw()))


def test_a_token_that_cannot_be_drawn_is_an_error():
    check, tally = sampled(work(subject(kind=Unfiltered)), max_tokens=1024)
    assert check.outcome is CheckOutcome.FAILED and tally.impossible > 0
    assert "probability 0" in check.evidence


def test_without_drafts_nothing_is_proved():
    check, _ = sampled(work(subject(Proposer())), max_tokens=1024)
    assert (check.outcome, check.evidence) == (CheckOutcome.INCONCLUSIVE, "nothing was drafted")


@pytest.mark.slow
def test_prefixes_follow_their_joint_law():
    check = prefix(work(subject()), 800)
    assert check.outcome is CheckOutcome.PASSED, check.evidence
    assert check.numbers["texts"] == 800 and check.numbers["fits"][0]["dof"] > 10


class Repeating(Foretoken):
    """The right law, and the same texts over and over."""

    def generate(self, prompts, ask):
        return super().generate(prompts, replace(ask, seeds=tuple(seed % 40 for seed in ask.seeds)))


def test_texts_that_repeat_themselves_are_not_independent():
    assert prefix(work(subject(kind=Repeating)), 480).outcome is CheckOutcome.FAILED


def test_tokens_that_would_show_no_error_say_nothing():
    task = replace(work(subject()), speed=AuditSpeed(completion=170.0))  # three texts before the deadline
    check, tally = sampled(task, max_tokens=96)
    assert tally.tokens == 96 and tally.statistics(ALPHA)
    assert check.outcome is CheckOutcome.INCONCLUSIVE and check.evidence == "96 tokens are too few"


def test_a_few_texts_say_nothing():
    check = prefix(work(subject()), 64)
    assert check.outcome is CheckOutcome.INCONCLUSIVE and "64 texts are too few" in check.evidence


def test_the_control_finds_its_plants():
    check = negative(work(subject()), TOKENS)
    assert check.outcome is CheckOutcome.PASSED, check.evidence
    assert all(0 < plant["tokens"] <= TOKENS for plant in check.numbers["plants"])


def test_a_control_that_finds_nothing_says_what_would():
    """A draft that is nearly the target hides every error."""
    near = drafting(strength=0.02)
    check = negative(work(subject(near)), 1024)
    assert check.outcome is CheckOutcome.INCONCLUSIVE
    assert "not found in 1,024 tokens" in check.evidence


def test_tally_counts_rounds():
    tally = drawn(work(subject(depth=2)), subject(depth=2), Exactness.DISTRIBUTION, 512, lambda _: False)
    assert 0 < tally.whole < tally.steps and tally.drafted <= 2 * tally.steps
    assert tally.behind[0].tokens == tally.steps


@pytest.mark.slow
def test_an_honest_engine_writes_the_plain_text():
    check = greedy(work(subject()))
    assert check.outcome is CheckOutcome.PASSED
    assert check.numbers["texts"] == dict.fromkeys(("alone", "in a batch", "in a batch as controlled"), len(PROMPTS))
    seeded = trajectory(work(subject(drafting(tree="top_k", top_k=2)), seconds=0.0))
    assert seeded.outcome is CheckOutcome.PASSED, seeded.evidence


def careless(law, exactness):
    """Takes the first drafted token unseen."""

    def verify(draft, probs, stream):
        verdict = choose(law, exactness)(draft, probs, stream)
        if len(draft) and not verdict.path:
            return Verdict((0,), int(probs[1].argmax()))
        return verdict

    return verify


@pytest.mark.slow
@pytest.mark.usefixtures("short_audits")
def test_a_wrong_verifier_is_a_bug():
    check = greedy(work(subject(drafting(strength=0.9), rule=careless)))
    assert check.outcome is CheckOutcome.FAILED
    first = check.numbers["divergences"][0]
    assert first["moved"] == 0.0 and first["margin"] > 0 and not first["tie"]
    assert "not a tie" in check.evidence
    assert trajectory(work(subject(drafting(strength=0.9), rule=careless), seconds=0.0)).outcome is CheckOutcome.FAILED


class Noisy(Foretoken):
    """Its speculative passes come out a little different from its plain ones."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.bit_equal = False

    def generate(self, prompts, ask):
        law = ask.law if ask.depth == 0 else replace(ask.law, logit_bias=((1, 0.01), (2, -0.01)))
        texts = super().generate(prompts, replace(ask, law=law))
        if ask.depth == 0 or not ask.keep:
            return texts
        moved = torch.zeros(12, dtype=torch.float64)
        moved[[1, 2]] = torch.tensor([0.01, -0.01], dtype=torch.float64)
        return [replace(text, rows=text.rows + moved) for text in texts]


def test_a_tie_is_told_from_a_bug():
    subject_ = subject(kind=Noisy)
    plain = CompletionSettings(SamplingLaw(temperature=0.0), 4, (0,), depth=0)
    result = explain_divergence(subject_, PROMPTS[:1], 0, 0, plain, replace(plain, depth=None))
    assert result.margin is None and "not again" in str(result)
    tie, bug = Divergence(0, 3, 0.015, 0.01), Divergence(1, 5, 0.5, 0.01)
    assert tie.tie and not bug.tie and "a tie" in str(tie)
    assert parity("x", [tie], False, {"alone": 4}, 8).outcome is CheckOutcome.PASSED
    assert parity("x", [tie], True, {"alone": 4}, 8).outcome is CheckOutcome.FAILED
    assert parity("x", [tie, bug], False, {"alone": 4}, 8).outcome is CheckOutcome.FAILED


def test_noise_is_what_two_passes_differ_by():
    assert noise(subject(), PROMPTS) == 0.0
    assert noise(subject(kind=Noisy), PROMPTS) == pytest.approx(0.01, abs=1e-5)


def test_texts_part_at_their_first_difference():
    assert first_difference((1, 2, 3), (1, 2, 3)) is None
    assert first_difference((1, 2, 3), (1, 5, 3)) == 1
    assert first_difference((1, 2), (1, 2, 3)) == 2


def test_a_target_that_drafts_for_itself_is_never_contradicted():
    check = self_draft(work(subject()))
    assert check.outcome is CheckOutcome.PASSED, check.evidence
    assert set(check.numbers["accepted_whole"].values()) == {1.0}


def test_a_verifier_that_contradicts_the_target_fails_the_control():
    def stubborn(law, exactness):
        return lambda draft, probs, stream: Verdict((), stream.categorical(probs[0], index=0))

    assert self_draft(work(subject(rule=stubborn))).outcome is CheckOutcome.FAILED
