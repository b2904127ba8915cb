"""``audit_endpoint``: audits the speculation of an OpenAI-compatible server from outside."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

from foretoken.audit.chance import ALPHA
from foretoken.audit.endpoint.checkpoint import CheckpointReference
from foretoken.audit.endpoint.distribution import detectable, distribution
from foretoken.audit.endpoint.engines import EnginePair
from foretoken.audit.endpoint.exact_parameters import exact_findings
from foretoken.audit.endpoint.findings import findings_check
from foretoken.audit.endpoint.parity import parity
from foretoken.audit.endpoint.sizes import LEAST, Sizes
from foretoken.audit.endpoint.tuned import tuned_findings
from foretoken.audit.endpoint.work import EndpointTask
from foretoken.audit.result import Audit, Check, CheckOutcome
from foretoken.audit.run import Watch
from foretoken.bench.workloads import FUNCTIONS
from foretoken.probe.answers import Failed, Refused, ServerAnswer
from foretoken.probe.client import Patience
from foretoken.probe.counters import ServerCounters
from foretoken.probe.dialects import ServerKind
from foretoken.probe.journal import Journal, restored_answer
from foretoken.probe.side import EndpointRequest, Prompt, Reference, Side, probed, tokenized
from foretoken.probe.sides import ServerPair, why_unusable

ENDPOINT, SPECULATION = "endpoint", "speculation"
PARAMETERS, SAMPLING = "other parameters", "sampling parameters"
_TIMED = 16  # tokens of the texts that measure the speed
_USED = 0.4  # share of a time budget that the measured speed fills, as texts that run alone are slower
_CHARACTERS = 3.2  # of a token, about


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What to audit, and how.

    Attributes:
        url: The server whose speculation is audited.
        model: The model's name there.
        baseline: A server of the same model without speculation; None if ``url`` can switch it off for a request.
        kind: What kind of server ``url`` is.
        key: Its API key.
        baseline_key: That of the baseline; None for the same.
        budget: Generated tokens, or with ``seconds`` None.
        seconds: Time to take, about, in place of ``budget``.
        concurrency: Requests at a time.
        checkpoint: The model's checkpoint, to compute the target's distribution here.
        seed: All random numbers of the audit are derived from it.
        patience: Time limits and retries.
        journal: File of the answers of an audit that is under way.
        level: Probability of failing an exact server, over all checks.
        engines: Engines in processes of their own, in place of ``url`` and ``baseline``.
    """

    url: str
    model: str
    baseline: str | None = None
    kind: ServerKind = ServerKind.AUTO
    key: str | None = None
    baseline_key: str | None = None
    budget: int | None = 60_000
    seconds: float | None = None
    concurrency: int = 8
    checkpoint: str | None = None
    seed: int = 0
    patience: Patience = field(default_factory=Patience)
    journal: Path | None = None
    level: float = ALPHA
    engines: EnginePair | None = None


def audit_endpoint(
    endpoint: Endpoint,
    prompts: Sequence[str] = FUNCTIONS,
    announce: Callable[[Mapping[str, Any]], bool] = lambda plan: True,
    watch: Watch = lambda check, share: None,
) -> Audit:
    """Audits a server.

    Args:
        endpoint: What to audit.
        prompts: Texts like the user's.
        announce: Called with the plan before it is carried out: its costs and power. Returns whether to go on.
        watch: Called with the running check and the share of the requests that is done.

    Raises:
        ForetokenError: The server refuses the key or the model, or the checkpoint cannot be loaded.
        InvalidRequest: The budget is too small.
    """
    started, journal = monotonic(), Journal(restored_answer, endpoint.journal)
    checks: list[Check] = []
    facts: dict[str, Any] = {"endpoint": endpoint.url, "baseline": endpoint.baseline, "model": endpoint.model}
    try:
        sides = _sides(endpoint, journal)
        ready = [probed(side, prompts[0]) for side in sides]
        failed = [(side, one) for side, one in zip(sides, ready, strict=True) if not isinstance(one, Side)]
        if failed:
            checks.append(_unusable(*failed[0]))
        else:
            task = _task(endpoint, _plain_first([one for one in ready if isinstance(one, Side)]), prompts)
            plan = _plan(endpoint, task)
            facts |= _facts(task)
            if announce(plan):
                checks += _checked(task, plan, watch)
            facts["plan"] = plan
            facts["spent"] = {side.name: asdict(side.client.spent) for side in task.sides}
        result = Audit(facts, tuple(checks), monotonic() - started)
    except BaseException:
        journal.close(finished=False)
        raise
    journal.close(finished=bool(checks) and result.outcome is not CheckOutcome.INCONCLUSIVE)
    return result


def _sides(endpoint: Endpoint, journal: Journal[ServerAnswer]) -> list[Side]:
    """Returns the plain side, if there is one, and the speculative side."""
    if endpoint.engines is not None:
        return endpoint.engines.sides()
    pair = ServerPair(
        url=endpoint.url,
        model=endpoint.model,
        baseline=endpoint.baseline,
        kind=endpoint.kind,
        key=endpoint.key,
        baseline_key=endpoint.baseline_key,
        patience=endpoint.patience,
    )
    return pair.sides(journal)


def _plain_first(sides: Sequence[Side]) -> Sequence[Side]:
    """Returns the sides, without the plain one if it drafted although its requests switch speculation off."""
    plain = sides[0]
    return sides[1:] if len(sides) == 2 and plain.switch and plain.client.spent.drafted else sides


def _unusable(side: Side, why: Refused | Failed) -> Check:
    """Returns the check of a server that gave no text. Raises ForetokenError if the user can mend that."""
    return Check(ENDPOINT, CheckOutcome.INCONCLUSIVE, f"inconclusive, because {why_unusable(side, why)}")


def _task(endpoint: Endpoint, sides: Sequence[Side], prompts: Sequence[str]) -> EndpointTask:
    speculative, plain = sides[-1], sides[0] if len(sides) == 2 else None
    judge = plain or speculative
    each = endpoint.checkpoint is None and judge.abilities.reference is Reference.EACH
    tokens = _tokens(endpoint, speculative, prompts)
    return EndpointTask(
        speculative=speculative,
        plain=plain,
        prompts=_prompts(judge, prompts),
        sizes=Sizes.of(tokens, len(sides), each),
        concurrency=endpoint.concurrency,
        level=endpoint.level / 2,
        seed=endpoint.seed,
        checkpoint=None if endpoint.checkpoint is None else CheckpointReference(endpoint.checkpoint),
    )


def _tokens(endpoint: Endpoint, side: Side, prompts: Sequence[str]) -> int:
    """Returns the budget in tokens. A time is converted by the speed of a few texts at once."""
    if endpoint.seconds is None:
        return endpoint.budget or LEAST
    count = endpoint.concurrency
    requests = [EndpointRequest(prompts[i % len(prompts)], _TIMED, f"speed/{i}", 1.0, False) for i in range(count)]
    known = [reply for reply in side.complete(requests, count) if isinstance(reply, ServerAnswer)]
    slowest = max((reply.seconds for reply in known), default=0.0)
    speed = sum(reply.tokens for reply in known) / slowest if slowest else 0.0
    return max(LEAST, int(speed * endpoint.seconds * _USED))


def _prompts(judge: Side, prompts: Sequence[str]) -> tuple[Prompt, ...]:
    """Returns the prompts, as token ids where the server takes these and does not tell them with its texts."""
    if judge.abilities.reference is not Reference.EACH or judge.dialect.told:
        return tuple(prompts)
    return tuple(tokenized(judge, prompt) or prompt for prompt in prompts)


def _plan(endpoint: Endpoint, task: EndpointTask) -> dict[str, Any]:
    """Returns what the audit will cost and find."""
    characters = sum(len(prompt) / (_CHARACTERS if isinstance(prompt, str) else 1.0) for prompt in task.prompts)
    reference, sides = task.reference, len(task.sides)
    costs = task.sizes.costs(
        sides, characters / len(task.prompts), reference is Reference.EACH, reference is Reference.PROMPT
    )
    tokens = task.sizes.sampled * task.sizes.sampled_tokens
    spent = [side.client.spent for side in task.sides]
    return {
        "reference": str(reference),
        "sizes": asdict(task.sizes),
        "costs": costs,
        "requests": sum(cost["requests"] for cost in costs.values()),
        "prompt_tokens": sum(cost["prompt_tokens"] for cost in costs.values()),
        "tokens": sum(cost["tokens"] for cost in costs.values()),
        "sent": {"requests": sum(one.requests for one in spent), "tokens": sum(one.tokens for one in spent)},
        "power": detectable(tokens, task.level),
        "concurrency": endpoint.concurrency,
    }


def _facts(task: EndpointTask) -> dict[str, Any]:
    side = task.speculative
    return {
        "server": str(side.dialect.kind),
        "api": side.abilities.path,
        "alternatives": side.abilities.top,
        "reference": str(task.reference),
        "checkpoint": task.checkpoint.name if task.checkpoint is not None else None,
        "plain_by": None if task.plain is None else json.dumps(task.plain.switch) if task.plain.switch else "baseline",
        "prompts": len(task.prompts),
        "seed": task.seed,
    }


def _checked(task: EndpointTask, plan: Mapping[str, Any], watch: Watch) -> list[Check]:
    """Runs all checks."""
    running, done = [""], [0]

    def tick() -> None:
        done[0] += 1
        watch(running[0], min(1.0, done[0] / max(1, plan["requests"])))

    for side in task.sides:
        side.client.tick = tick
    before = {side.name: _counted(side) for side in task.sides}
    stages: dict[str, Callable[[], list[Check]]] = {
        "greedy parity": lambda: parity(task),
        "sampled distribution": lambda: distribution(task),
        PARAMETERS: lambda: [findings_check(PARAMETERS, exact_findings(task))],
        SAMPLING: lambda: [findings_check(SAMPLING, tuned_findings(task))],
        SPECULATION: lambda: [_speculation(task, before)],
    }
    checks: list[Check] = []
    for name, run in stages.items():
        running[0], begun = name, monotonic()
        watch(name, min(1.0, done[0] / max(1, plan["requests"])))
        made = run()
        checks += [replace(check, seconds=(monotonic() - begun) / len(made)) for check in made]
    return [checks[-1], *checks[:-1]]


def _counted(side: Side) -> float | None:
    """Returns the draft tokens that the server's metrics have counted, None if they do not."""
    counted = ServerCounters.of(side.client.get("/metrics")).speculation
    return None if counted is None else counted.drafted


def _speculation(task: EndpointTask, before: Mapping[str, float | None]) -> Check:
    """Checks that the speculative side drafted, and that the plain one did not."""
    drafted: dict[str, float | None] = {}
    for side in task.sides:
        earlier, now = before[side.name], _counted(side)
        shared = side is task.plain and side.client.url == task.speculative.client.url
        known = not (earlier is None or now is None or shared or side.client.spent.resumed)
        counted = now - earlier if known and now is not None and earlier is not None else None
        drafted[side.name] = counted if side.client.spent.drafted is None else side.client.spent.drafted
    numbers = {"drafted": drafted}
    own, plain = drafted["speculative"], drafted.get("plain")
    if plain:
        evidence = f"inconclusive, because the plain side drafted {plain:,.0f} tokens: it is not plain"
        return Check(SPECULATION, CheckOutcome.INCONCLUSIVE, evidence, numbers)
    if own is None:
        return Check(SPECULATION, CheckOutcome.SKIPPED, "the server does not say whether it drafts", numbers)
    if not own:
        evidence = "inconclusive, because nothing was drafted: there is no speculation to audit"
        return Check(SPECULATION, CheckOutcome.INCONCLUSIVE, evidence, numbers)
    return Check(SPECULATION, CheckOutcome.PASSED, f"{own:,.0f} draft tokens", numbers)
