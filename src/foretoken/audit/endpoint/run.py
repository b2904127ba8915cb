"""``audit_endpoint``: audits the speculation of an OpenAI-compatible server from outside."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

from foretoken.audit.endpoint.distribution import detectable, distribution, tuned_findings
from foretoken.audit.endpoint.engines import EnginePair
from foretoken.audit.endpoint.parameters import exact_findings, findings_check
from foretoken.audit.endpoint.parity import parity
from foretoken.audit.endpoint.task import MIN_BUDGET, CheckpointReference, EndpointTask, Sizes, inconclusive
from foretoken.audit.subject import Audit, Check, CheckOutcome
from foretoken.audit.tally import ALPHA
from foretoken.bench.workloads import FUNCTIONS
from foretoken.core.progress import Say
from foretoken.probe.answers import ServerAnswer, ServerCounters
from foretoken.probe.client import Journal
from foretoken.probe.server import (
    CHARACTERS,
    CannotTellError,
    EndpointRequest,
    Prompt,
    Reference,
    ServerPair,
    Side,
    all_probed,
    sent,
    tokenized,
)

ENDPOINT, SPECULATION = "endpoint", "speculation"
PARAMETERS, SAMPLING = "other parameters", "sampling parameters"
_TIMED = 16  # tokens of the texts that measure the speed
_USED = 0.4  # fraction of a time budget that the measured speed fills, as single requests are slower


@dataclass(frozen=True, slots=True)
class Endpoint(ServerPair):
    """The server to audit, and the settings of the audit."""

    budget: int | None = 60_000  # generated tokens
    seconds: float | None = None  # time to take, about, in place of ``budget``
    concurrency: int = 8  # requests at a time
    checkpoint: str | None = None  # of the model, to compute the target's distribution here
    seed: int = 0  # all random numbers of the audit are derived from it
    journal: Path | None = None  # file of the answers of an unfinished audit
    level: float = ALPHA  # probability of failing an exact server, over all checks
    engines: EnginePair | None = None  # engines in a process each, in place of ``url`` and ``baseline``


def audit_endpoint(
    endpoint: Endpoint,
    prompts: Sequence[str] = FUNCTIONS,
    announce: Callable[[Mapping[str, Any]], bool] = lambda plan: True,
    watch: Say = lambda check, fraction: None,
) -> Audit:
    """Audits a server.

    Args:
        endpoint: The server and the settings.
        prompts: Texts like the user's.
        announce: Called with the plan before it is carried out: its costs and power. Returns whether to continue.
        watch: Called with the running check and the finished fraction of the requests.

    Raises:
        ForetokenError: The server refuses the key or the model, or the checkpoint cannot be loaded.
        InvalidRequest: The budget is too small.
    """
    started, journal = monotonic(), Journal(ServerAnswer, endpoint.journal)
    checks: list[Check] = []
    facts: dict[str, Any] = {"endpoint": endpoint.url, "baseline": endpoint.baseline, "model": endpoint.model}
    finished = False
    try:
        sides = endpoint.sides(journal) if endpoint.engines is None else endpoint.engines.sides()
        try:
            task = _task(endpoint, all_probed(sides, prompts[0]), prompts)
        except CannotTellError as error:
            checks.append(inconclusive(ENDPOINT, str(error)))
        else:
            plan = _plan(endpoint, task)
            facts |= _facts(task)
            if announce(plan):
                checks += _checked(task, plan, watch)
            facts["plan"] = plan
            facts["spent"] = {side.name: asdict(side.client.spent) for side in task.sides}
        result = Audit(facts, tuple(checks), monotonic() - started)
        finished = bool(checks) and result.outcome is not CheckOutcome.INCONCLUSIVE
    finally:
        journal.close(finished)
    return result


def _task(endpoint: Endpoint, sides: Sequence[Side], prompts: Sequence[str]) -> EndpointTask:
    speculative, plain = sides[-1], sides[0] if len(sides) == 2 else None
    if plain is not None and plain.switch and plain.client.spent.drafted:
        plain = None  # it drafted although its requests switch speculation off
    judge = plain or speculative
    each = judge.reference is Reference.EACH
    texts: tuple[Prompt, ...] = tuple(prompts)
    if each and not judge.dialect.token_ids:  # the server takes token ids and does not report them with its texts
        texts = tuple(tokenized(judge, prompt) or prompt for prompt in prompts)
    tokens = _tokens(endpoint, speculative, prompts)
    return EndpointTask(
        speculative=speculative,
        plain=plain,
        prompts=texts,
        sizes=Sizes.of(tokens, 1 if plain is None else 2, each and endpoint.checkpoint is None),
        concurrency=endpoint.concurrency,
        level=endpoint.level / 2,
        seed=endpoint.seed,
        checkpoint=None if endpoint.checkpoint is None else CheckpointReference(endpoint.checkpoint),
    )


def _tokens(endpoint: Endpoint, side: Side, prompts: Sequence[str]) -> int:
    """Returns the budget in tokens. A time is converted by the speed of a few texts at once."""
    if endpoint.seconds is None:
        return endpoint.budget or MIN_BUDGET
    count = endpoint.concurrency
    requests = [EndpointRequest(prompts[i % len(prompts)], _TIMED, f"speed/{i}", 1.0, False) for i in range(count)]
    answers = [reply for reply in side.complete(requests, count) if isinstance(reply, ServerAnswer)]
    slowest = max((reply.seconds for reply in answers), default=0.0)
    speed = sum(reply.tokens for reply in answers) / slowest if slowest else 0.0
    return max(MIN_BUDGET, int(speed * endpoint.seconds * _USED))


def _plan(endpoint: Endpoint, task: EndpointTask) -> dict[str, Any]:
    """Returns estimated cost and power."""
    characters = sum(len(prompt) / (CHARACTERS if isinstance(prompt, str) else 1.0) for prompt in task.prompts)
    reference, prompt_tokens = task.reference, characters / len(task.prompts)
    each, scored = reference is Reference.EACH, reference is Reference.PROMPT
    costs = task.sizes.costs(len(task.sides), prompt_tokens, each, scored)
    return {
        "reference": str(reference),
        "sizes": asdict(task.sizes),
        "costs": costs,
        **{key: sum(cost[key] for cost in costs.values()) for key in ("requests", "prompt_tokens", "tokens")},
        "sent": sent(task.sides),
        "power": detectable(task.sizes.sampled * task.sizes.sampled_tokens, task.level),
        "concurrency": endpoint.concurrency,
    }


def _facts(task: EndpointTask) -> dict[str, Any]:
    side = task.speculative
    return {
        "server": str(side.dialect.kind),
        "api": side.path,
        "alternatives": side.top,
        "reference": str(task.reference),
        "checkpoint": task.checkpoint.name if task.checkpoint is not None else None,
        "plain_by": None if task.plain is None else json.dumps(task.plain.switch) if task.plain.switch else "baseline",
        "prompts": len(task.prompts),
        "seed": task.seed,
    }


def _checked(task: EndpointTask, plan: Mapping[str, Any], watch: Say) -> list[Check]:
    running, done = "", 0

    def show(more: int = 1) -> None:
        nonlocal done
        done += more
        watch(running, min(1.0, done / max(1, plan["requests"])))

    for side in task.sides:
        side.client.tick = show
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
        running, begun = name, monotonic()
        show(0)
        results = run()
        checks += [replace(check, seconds=(monotonic() - begun) / len(results)) for check in results]
    return [checks[-1], *checks[:-1]]


def _counted(side: Side) -> float | None:
    """Returns the draft tokens by the server's metrics, None if they have none."""
    counted = ServerCounters.of(side.client.get("/metrics")).speculation
    return None if counted is None else counted.drafted


def _speculation(task: EndpointTask, before: Mapping[str, float | None]) -> Check:
    """Checks that the speculative side drafted, and that the plain one did not."""
    drafted: dict[str, float | None] = {}
    for side in task.sides:
        earlier, now, spent = before[side.name], _counted(side), side.client.spent
        shared = side is task.plain and side.client.url == task.speculative.client.url
        counted = None if earlier is None or now is None or shared or spent.resumed else now - earlier
        drafted[side.name] = counted if spent.drafted is None else spent.drafted
    numbers = {"drafted": drafted}
    speculative, plain = drafted["speculative"], drafted.get("plain")
    if plain:
        return inconclusive(SPECULATION, f"the plain side drafted {plain:,.0f} tokens: it is not plain", numbers)
    if speculative is None:
        return Check(SPECULATION, CheckOutcome.SKIPPED, "the server does not say whether it drafts", numbers)
    if not speculative:
        return inconclusive(SPECULATION, "nothing was drafted: there is no speculation to audit", numbers)
    return Check(SPECULATION, CheckOutcome.PASSED, f"{speculative:,.0f} draft tokens", numbers)
