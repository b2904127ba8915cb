"""Texts that must be equal: greedy, seeded, and a target that drafts for itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.audit.toys import PROMPTS, drafting, subject, work

from foretoken.audit.divergence import Divergence, explain_divergence, first_difference, parity
from foretoken.audit.equality import greedy, self_draft, trajectory
from foretoken.audit.ours import Foretoken
from foretoken.audit.result import CheckOutcome
from foretoken.audit.subject import CompletionSettings, noise
from foretoken.core.sampling import SamplingLaw
from foretoken.core.verdict import Verdict
from foretoken.verify import choose


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
