"""``audit``: runs all checks within a time budget."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic

from foretoken.audit.equality import (
    GREEDY,
    GREEDY_COMPLETIONS,
    SELF_DRAFT,
    SELF_DRAFT_COMPLETIONS,
    TRAJECTORY,
    greedy,
    self_draft,
    trajectory,
    trajectory_completions,
)
from foretoken.audit.implementations import Foretoken
from foretoken.audit.negative import negative
from foretoken.audit.sampled import NAME as PREFIX
from foretoken.audit.sampled import NAMES, audited_distributions, prefix, sampled
from foretoken.audit.subject import (
    CONTROL,
    NOISE_TOKENS,
    Audit,
    Audited,
    AuditSpeed,
    AuditTask,
    Check,
    CompletionSettings,
    Ids,
    noise,
)
from foretoken.audit.tally import ALPHA, TokenTally
from foretoken.bench.workloads import FUNCTIONS
from foretoken.core.checks import integer, number
from foretoken.core.context import Exactness
from foretoken.core.errors import InvalidRequest
from foretoken.core.progress import Say
from foretoken.llm import LLM
from foretoken.speculation import NONE

NOTHING = (
    "there is nothing to audit: the method is 'none', so no tokens are drafted; name a draft model or a method, for "
    "instance ngram"
)
BUDGET = 120.0
MIN_TEMPERATURE = 0.05
SHARES = {
    GREEDY: 0.08,
    SELF_DRAFT: 0.02,
    TRAJECTORY: 0.12,
    NAMES[Exactness.DISTRIBUTION]: 0.38,
    NAMES[Exactness.TRAJECTORY]: 0.10,
    PREFIX: 0.15,
    CONTROL: 0.15,
}
"""Shares of the budget, in the order of the checks. Time that a check leaves goes to the later ones."""

_PREFIX = 3  # completions of ``NOISE_TOKENS`` that the prefix distribution's short texts cost at least
STATISTICAL = 3  # number of checks that share ``ALPHA``


def audit(
    subject: LLM | Audited,
    prompts: Sequence[str] | None = None,
    *,
    budget: float = BUDGET,
    temperature: float = 1.0,
    seed: int = 0,
    float32: bool = True,
    watch: Say | None = None,
    too_short: Callable[[float], None] = lambda least: None,
) -> Audit:
    """Audits whether speculative decoding is exact.

    Args:
        subject: An ``LLM``, which must not be used meanwhile, or any ``Audited`` implementation.
        prompts: Texts like the user's; None takes a bundled set of Python functions.
        budget: Seconds, loading excluded. Texts are as many as fit; a larger budget finds smaller errors.
        temperature: Sampling temperature, above 0.
        seed: All random numbers of the audit are derived from it.
        float32: Also compare seeded texts in float32, which loads the models once more.
        watch: Called with the running check and the share of the budget that is spent.
        too_short: Called at once if the budget does not suffice for one text for every check, with the estimated
            seconds that would. If it returns, the audit takes that long.

    Raises:
        InvalidRequest: An argument is out of range, a prompt is empty, or nothing is drafted.
    """
    number("budget", budget, 1.0)
    number("temperature", temperature, MIN_TEMPERATURE)
    integer("seed", seed, 0)
    if isinstance(subject, LLM) and subject.speculative_config.method_in_force == NONE:
        raise InvalidRequest(NOTHING)
    audited: Audited = Foretoken.of(subject) if isinstance(subject, LLM) else subject
    ids = _ids(audited, FUNCTIONS if prompts is None else prompts)
    started, watch = monotonic(), watch or (lambda check, share: None)
    speed = measured_speed(audited, ids[0], temperature)
    if (least := least_seconds(audited, speed, float32)) > budget:
        too_short(least)
    shared = AuditTask(
        audited, ids, temperature, seed, ALPHA / STATISTICAL, started, noise(audited, ids[:1]), speed=speed
    )
    checks: list[Check] = []
    spent = 0.0
    for name, run in _checks(float32).items():
        spent += SHARES[name]
        begun = monotonic()
        task = replace(shared, deadline=started + spent * budget, tick=_tick(watch, name, started, budget))
        task.tick()
        checks.append(replace(run(task), seconds=monotonic() - begun))
    facts = dict(audited.facts) | {
        "temperature": temperature,
        "prompts": len(ids),
        "seed": seed,
        "budget": budget,
        "noise": shared.noise,
    }
    return Audit(facts, tuple(checks), monotonic() - started)


def measured_speed(subject: Audited, prompt: Ids, temperature: float) -> AuditSpeed:
    """Returns the speed on one text, the second of two: the first may compile kernels."""
    settings = CompletionSettings(subject.law(temperature), NOISE_TOKENS, (0,), subject.depth, batch=1)
    speed = AuditSpeed()
    for _ in range(2):
        started = monotonic()
        (text,) = subject.generate([prompt], settings)
        completed = monotonic()
        probs, _impossible = audited_distributions(subject, prompt, text.tokens, settings.law)
        TokenTally().add(text, probs, probs.new_full((len(text.tokens),), 0.5), None)
        speed = AuditSpeed(completed - started, monotonic() - completed)
    return speed


def least_seconds(subject: Audited, speed: AuditSpeed, float32: bool) -> float:
    """Returns the seconds of an audit with one text for every check."""
    sampled = 1 + subject.seeded + len(subject.planted())
    completions = GREEDY_COMPLETIONS + sampled + _PREFIX
    completions += SELF_DRAFT_COMPLETIONS * (subject.self_drafting() is not None)
    completions += trajectory_completions(subject) * (1 + float32) * subject.seeded
    return completions * speed.completion + sampled * speed.distributions


def _checks(float32: bool) -> Mapping[str, Callable[[AuditTask], Check]]:
    tokens: list[int] = []

    def law(work: AuditTask, grade: Exactness) -> Check:
        check, tally = sampled(work, grade)
        tokens.append(tally.tokens)
        return check

    return {
        GREEDY: greedy,
        SELF_DRAFT: self_draft,
        TRAJECTORY: partial(trajectory, float32=float32),
        NAMES[Exactness.DISTRIBUTION]: partial(law, grade=Exactness.DISTRIBUTION),
        NAMES[Exactness.TRAJECTORY]: partial(law, grade=Exactness.TRAJECTORY),
        PREFIX: prefix,
        # As many tokens as the distribution check had: it cannot find an error that these do not show.
        CONTROL: lambda work: negative(work, tokens[0]),
    }


def _tick(watch: Say, name: str, started: float, budget: float) -> Callable[[], None]:
    return lambda: watch(name, min(1.0, (monotonic() - started) / budget))


def _ids(audited: Audited, prompts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    if isinstance(prompts, str) or not prompts:
        raise InvalidRequest("prompts must be a list of one text at least")
    encoded = tuple(tuple(audited.encode(prompt)) for prompt in prompts)
    if empty := [at for at, ids in enumerate(encoded, 1) if not ids]:
        raise InvalidRequest(f"prompt {empty[0]} is empty; give at least one token to continue from")
    return encoded
