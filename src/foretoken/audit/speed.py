"""The time that an audit takes: measured on one text, and estimated for the smallest audit."""

from __future__ import annotations

from time import monotonic

from foretoken.audit import greedy, selfdraft, trajectory
from foretoken.audit.sampled import text_distributions
from foretoken.audit.subject import Audited, CompletionSettings, Ids
from foretoken.audit.tally import TokenTally
from foretoken.audit.work import NOISE_TOKENS, AuditSpeed

_PREFIX = 3  # completions of ``NOISE_TOKENS`` that the prefix distribution's short texts cost at least


def measured_speed(subject: Audited, prompt: Ids, temperature: float) -> AuditSpeed:
    """Returns the speed on one text, the second of two: the first may compile kernels."""
    settings = CompletionSettings(subject.law(temperature), NOISE_TOKENS, (0,), subject.depth, batch=1)
    speed = AuditSpeed()
    for _ in range(2):
        started = monotonic()
        (text,) = subject.generate([prompt], settings)
        completed = monotonic()
        probs, _impossible = text_distributions(subject, prompt, text.tokens, settings.law)
        TokenTally().add(text, probs, probs.new_full((len(text.tokens),), 0.5), None)
        speed = AuditSpeed(completed - started, monotonic() - completed)
    return speed


def least_seconds(subject: Audited, speed: AuditSpeed, float32: bool) -> float:
    """Returns the seconds of an audit with one text for every check."""
    sampled = 1 + subject.seeded + len(subject.planted())
    completions = greedy.COMPLETIONS + sampled + _PREFIX
    completions += selfdraft.COMPLETIONS * (subject.self_drafting() is not None)
    completions += trajectory.completions(subject) * (1 + float32) * subject.seeded
    return completions * speed.completion + sampled * speed.distributions
