"""Greedy parity: the same text with and without speculation, alone and in a ragged batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from foretoken.audit.divergence import Divergence, explain_divergence, first_difference, parity
from foretoken.audit.result import Check
from foretoken.audit.subject import AuditedCompletion, CompletionSettings
from foretoken.audit.work import AuditTask

NAME = "greedy parity"
TOKENS, PROMPTS = 64, 16
COMPLETIONS = 8  # of ``NOISE_TOKENS`` for a prompt: plain, alone, in a batch, and in one as controlled


def greedy(work: AuditTask) -> Check:
    """Compares prompts one at a time until the deadline, then all of them in one batch where supported."""
    subject = work.subject
    settings = CompletionSettings(subject.law(0.0), TOKENS, (0,), subject.depth, ends=subject.ends, batch=1)
    plain: list[AuditedCompletion] = []
    alone: list[AuditedCompletion] = []
    most = min(PROMPTS, len(work.prompts), work.fitting(PROMPTS, COMPLETIONS))
    for index in work.portions(most):
        prompt = [work.prompts[index]]
        plain += subject.generate(prompt, replace(settings, depth=0))
        alone += subject.generate(prompt, settings)
    prompts = work.prompts[: len(plain)]
    every = replace(settings, seeds=(0,) * len(prompts), batch=subject.batch)
    divergences = _compare(work, plain, alone, replace(every, batch=1))
    ways = {"alone": len(plain)}
    if subject.batch > 1 and len(prompts) > 1:
        for way, depth in (("in a batch", subject.depth), ("in a batch as controlled", None)):
            divergences += _compare(work, plain, subject.generate(prompts, each := replace(every, depth=depth)), each)
            ways[way] = len(plain)
    return parity(NAME, divergences, subject.bit_equal, ways, sum(len(text.tokens) for text in plain))


def _compare(
    work: AuditTask,
    plain: Sequence[AuditedCompletion],
    texts: Sequence[AuditedCompletion],
    settings: CompletionSettings,
) -> list[Divergence]:
    prompts = work.prompts[: len(plain)]
    parts = [first_difference(here.tokens, there.tokens) for here, there in zip(plain, texts, strict=True)]
    alone = replace(settings, depth=0, batch=1)
    return [
        explain_divergence(work.subject, prompts, i, at, alone, settings)
        for i, at in enumerate(parts)
        if at is not None
    ]
