"""Self-draft control: drafts of the target itself must be accepted whole."""

from __future__ import annotations

from foretoken.audit.result import Check, CheckOutcome
from foretoken.audit.subject import CompletionSettings
from foretoken.audit.work import AuditTask
from foretoken.core.context import Exactness

NAME = "self-draft control"
TOKENS, TEXTS = 32, 8
COMPLETIONS = 6  # of ``NOISE_TOKENS`` for a text: three modes, in which the draft computes as much as the target
PURPOSE = 2
MIN_SHARE = 0.95  # of steps accepted whole where two passes over one text may differ


def self_draft(work: AuditTask) -> Check:
    """Checks greedy, sampled and seeded decoding: every draft is accepted to its full depth."""
    subject = work.subject.self_drafting()
    if subject is None:
        return Check(NAME, CheckOutcome.SKIPPED, "its decode steps are not visible")
    modes = {
        "greedy": (0.0, Exactness.DISTRIBUTION),
        "drawn": (work.temperature, Exactness.DISTRIBUTION),
        "seeded": (work.temperature, Exactness.TRAJECTORY),
    }
    size = work.fitting(TEXTS, COMPLETIONS)
    shares: dict[str, float] = {}
    steps = 0
    for index, (name, (temperature, grade)) in enumerate(modes.items()):
        settings = CompletionSettings(
            subject.law(temperature), TOKENS, work.seeds(PURPOSE, index, size), grade=grade, batch=subject.batch
        )
        seen = [one for text in subject.generate(work.turn(0, size), settings) for one in text.steps]
        shares[name] = sum(one.whole for one in seen) / max(1, len(seen))
        steps += len(seen)
        work.tick()
    required = 1.0 if subject.bit_equal else MIN_SHARE
    outcome = CheckOutcome.PASSED if min(shares.values()) >= required else CheckOutcome.FAILED
    by_law = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    evidence = f"drafts of the target itself accepted whole in {steps} steps: {by_law}; {required:.0%} expected"
    return Check(NAME, outcome, evidence, {"steps": steps, "accepted_whole": shares, "required": required})
