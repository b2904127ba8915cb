"""Self-draft control: a target that drafts for itself is never contradicted."""

from __future__ import annotations

from foretoken.audit.result import Check, Outcome
from foretoken.audit.subject import Ask
from foretoken.audit.work import Work
from foretoken.core.context import Exactness

NAME = "self-draft control"
TOKENS, TEXTS = 32, 8
PURPOSE = 2
LEAST = 0.95  # of rounds, where two passes over one text may differ


def self_draft(work: Work) -> Check:
    """Greedy, drawn and seeded: every draft is accepted down to its depth."""
    subject = work.subject.self_drafting()
    if subject is None:
        return Check(NAME, Outcome.SKIPPED, "its rounds cannot be seen")
    laws = {
        "greedy": (0.0, Exactness.DISTRIBUTION),
        "drawn": (work.temperature, Exactness.DISTRIBUTION),
        "seeded": (work.temperature, Exactness.TRAJECTORY),
    }
    shares: dict[str, float] = {}
    rounds = 0
    for index, (name, (temperature, grade)) in enumerate(laws.items()):
        ask = Ask(subject.law(temperature), TOKENS, work.seeds(PURPOSE, index, TEXTS), grade=grade, batch=subject.batch)
        seen = [one for text in subject.generate(work.turn(0, TEXTS), ask) for one in text.rounds]
        shares[name] = sum(one.whole for one in seen) / max(1, len(seen))
        rounds += len(seen)
        work.tick()
    least = 1.0 if subject.bit_equal else LEAST
    outcome = Outcome.PASSED if min(shares.values()) >= least else Outcome.FAILED
    told = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    evidence = f"drafts of the target itself accepted whole in {rounds} rounds: {told}; {least:.0%} expected"
    return Check(NAME, outcome, evidence, {"rounds": rounds, "accepted_whole": shares, "least": least})
