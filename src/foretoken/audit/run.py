"""``audit``: all checks in turn, within a budget of time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic

from foretoken.audit.chance import ALPHA
from foretoken.audit.greedy import NAME as GREEDY
from foretoken.audit.greedy import greedy
from foretoken.audit.negative import negative
from foretoken.audit.ours import Foretoken
from foretoken.audit.prefix import NAME as PREFIX
from foretoken.audit.prefix import prefix
from foretoken.audit.result import CONTROL, Audit, Check
from foretoken.audit.sampled import NAMES, sampled
from foretoken.audit.selfdraft import NAME as SELF
from foretoken.audit.selfdraft import self_draft
from foretoken.audit.subject import Audited
from foretoken.audit.trajectory import NAME as TRAJECTORY
from foretoken.audit.trajectory import trajectory
from foretoken.audit.work import Work, noise
from foretoken.bench.workloads import FUNCTIONS
from foretoken.core.checks import integer, number
from foretoken.core.context import Exactness
from foretoken.core.errors import InvalidRequest
from foretoken.llm import LLM

BUDGET = 120.0
SHARES = {
    GREEDY: 0.08,
    SELF: 0.02,
    TRAJECTORY: 0.12,
    NAMES[Exactness.DISTRIBUTION]: 0.38,
    NAMES[Exactness.TRAJECTORY]: 0.10,
    PREFIX: 0.15,
    CONTROL: 0.15,
}
"""Of the budget, in this order; what a check leaves is the later ones'."""

STATISTICAL = 3  # checks that share ``ALPHA``

Watch = Callable[[str, float], None]
"""Called with the check at work and the share of the budget that is spent."""


def audit(
    subject: LLM | Audited,
    prompts: Sequence[str] | None = None,
    *,
    budget: float = BUDGET,
    temperature: float = 1.0,
    seed: int = 0,
    float32: bool = True,
    watch: Watch | None = None,
) -> Audit:
    """Is this speculation exact? See ``docs/audit.md`` for what is checked and what a verdict means.

    subject: an ``LLM``, which does nothing else meanwhile, or anything ``Audited``. prompts: texts like the user's;
    None takes our own functions. budget: seconds, not counting loading; more find smaller errors. temperature: above 0.
    float32: compare seeded texts in that precision too, which loads the models once more.
    """
    number("budget", budget, 1.0)
    number("temperature", temperature, 0.05)
    integer("seed", seed, 0)
    audited: Audited = Foretoken.of(subject) if isinstance(subject, LLM) else subject
    ids = _ids(audited, FUNCTIONS if prompts is None else prompts)
    started, watch = monotonic(), watch or (lambda check, share: None)
    work = Work(audited, ids, temperature, seed, ALPHA / STATISTICAL, started, noise(audited, ids[:1]))
    checks: list[Check] = []
    spent = 0.0
    for name, run in _checks(float32).items():
        spent += SHARES[name]
        begun = monotonic()
        mine = replace(work, deadline=started + spent * budget, tick=_tick(watch, name, started, budget))
        mine.tick()
        checks.append(replace(run(mine), seconds=monotonic() - begun))
    facts = dict(audited.facts) | {
        "temperature": temperature, "prompts": len(ids), "seed": seed, "budget": budget, "noise": work.noise,
    }  # fmt: skip
    return Audit(facts, tuple(checks), monotonic() - started)


def _checks(float32: bool) -> Mapping[str, Callable[[Work], Check]]:
    tokens: list[int] = []

    def law(work: Work, grade: Exactness) -> Check:
        check, tally = sampled(work, grade)
        tokens.append(tally.tokens)
        return check

    return {
        GREEDY: greedy,
        SELF: self_draft,
        TRAJECTORY: partial(trajectory, float32=float32),
        NAMES[Exactness.DISTRIBUTION]: partial(law, grade=Exactness.DISTRIBUTION),
        NAMES[Exactness.TRAJECTORY]: partial(law, grade=Exactness.TRAJECTORY),
        PREFIX: prefix,
        # No more tokens than the law itself was judged by: what they do not show, it could not have shown either.
        CONTROL: lambda work: negative(work, tokens[0]),
    }


def _tick(watch: Watch, name: str, started: float, budget: float) -> Callable[[], None]:
    return lambda: watch(name, min(1.0, (monotonic() - started) / budget))


def _ids(audited: Audited, prompts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    if isinstance(prompts, str) or not prompts:
        raise InvalidRequest("prompts must be a list of one text at least")
    found = tuple(tuple(audited.encode(prompt)) for prompt in prompts)
    if empty := [at for at, ids in enumerate(found, 1) if not ids]:
        raise InvalidRequest(f"prompt {empty[0]} is empty; give at least one token to continue from")
    return found
