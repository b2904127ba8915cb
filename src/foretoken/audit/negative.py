"""Negative control: the same test, on at most as many tokens, must find errors that are planted.

All wrong verifiers are one exact rule with one part replaced. The rule verifies children one after another, as
recursive rejection sampling does (2305.09781), for every kind of draft: a fixed candidate x counts as sampled from a
one-hot distribution, so it is accepted with probability p(x), and x is removed from p when it is rejected.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.audit.sampled import MAX_TOKENS, drawn, leveled, most_significant
from foretoken.audit.subject import CONTROL, Audited, AuditTask, Check, CheckOutcome
from foretoken.audit.tally import Statistic, TokenTally, noncentrality
from foretoken.core.context import Exactness
from foretoken.core.draft import Draft, PointMass, ProposalLaw, Sampled, TopPlusSampled
from foretoken.core.streams import Stream
from foretoken.core.verdict import Verdict
from foretoken.verify import Rule, Verifier, choose
from foretoken.verify.residual import excess, normalized, ratio
from foretoken.verify.rows import Probs

Accept = Callable[[float, float], float]
Reshape = Callable[[Tensor], Tensor]


def fair(p: float, q: float) -> float:
    """Returns min(1, p/q)."""
    return min(1.0, ratio(p, q))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Returns norm((p - q)+), or p where no mass is left."""
    left, mass = excess(p, q)
    return left / mass if mass > 0.0 else p


def independent_draw(stream: Stream, p: float, child: int, depth: int) -> bool:
    """Accepts with probability ``p`` by a random number that nothing else uses."""
    return stream.bernoulli(p, index=child)


def unchanged(row: Tensor) -> Tensor:
    return row


def sequential(
    *,
    accept: Accept = fair,  # (p(x), q(x)) -> acceptance probability
    reject: Callable[[Tensor, Tensor], Tensor] = residual,  # (p, q) -> distribution to sample from after a rejection
    decide: Callable[[Stream, float, int, int], bool] = independent_draw,  # turns the probability into a decision
    target: Reshape = unchanged,  # transforms p
    drafted: Reshape = unchanged,  # transforms q
    bonus: Reshape = unchanged,  # transforms the distribution of the bonus token
) -> Verifier:
    """Returns the rule with replaceable parts."""

    def verify(draft: Draft, probs: Probs, stream: Stream) -> Verdict:
        node, depth = -1, 0
        while True:
            p, children = target(probs[node + 1].double()), draft.children[node + 1]
            if not children and node >= 0:
                p = bonus(p)
            chosen = None
            for at, child in enumerate(children):
                q = drafted(_law_of(draft, node, at, p))
                token = draft.ids[child]
                if decide(stream, accept(float(p[token]), float(q[token])), child, depth):
                    chosen = child
                    break
                p = reject(p, q)
            if chosen is None:
                return Verdict(draft.path(node), stream.categorical(p, index=depth))
            node, depth = chosen, depth + 1

    return verify


def _law_of(draft: Draft, node: int, at: int, p: Tensor) -> Tensor:
    """Returns the distribution of child number ``at`` of ``node`` given its earlier siblings, float64 [V]."""
    tokens = [draft.ids[child] for child in draft.children[node + 1]]
    law = draft.law
    if isinstance(law, PointMass) or (isinstance(law, TopPlusSampled) and at < len(tokens) - 1):
        return F.one_hot(torch.tensor(tokens[at], device=p.device), p.shape[-1]).double()
    q = law.probs[node + 1].double().clone()
    if not isinstance(law, Sampled):
        q[tokens[:at]] = 0.0
    return normalized(q)


def planted(verifier: Verifier) -> Rule:
    """Returns a rule that uses ``verifier`` in the distribution grade and the right verifier elsewhere."""

    def rule(law: ProposalLaw, exactness: Exactness) -> Verifier:
        return verifier if exactness is Exactness.DISTRIBUTION else choose(law, exactness)

    return rule


PLANTS: Mapping[str, Rule] = {
    "a rejected token is replaced by a draw from p": planted(sequential(reject=lambda p, q: p)),
    "drafts are accepted with 2 p/q": planted(sequential(accept=lambda p, q: min(1.0, 2.0 * ratio(p, q)))),
}
"""The errors that an audit plants: the commonest mistake, and the commonest shortcut."""


FEWEST = 256  # tokens before the first test


@dataclass(frozen=True, slots=True)
class Plant:
    """One planted error. found: the tests that found it. needed: tokens needed to find it, None if unknown."""

    error: str
    tokens: int
    found: tuple[Statistic, ...]
    impossible: int
    needed: int | None


def negative(work: AuditTask, max_tokens: int = MAX_TOKENS) -> Check:
    """Samples each planted error until it is found, its share of the time is over, or ``max_tokens`` are reached."""
    plants = work.subject.planted()
    results: list[Plant] = []
    for index, (error, subject) in enumerate(plants.items()):
        share = (work.deadline - monotonic()) / (len(plants) - index)
        results.append(find_error(replace(work, deadline=monotonic() + share), error, subject, max_tokens))
    return control_check(results)


def control_check(results: Sequence[Plant]) -> Check:
    """Returns the check that every planted error was found, at least one."""
    numbers = {
        "plants": [
            {
                "error": one.error,
                "tokens": one.tokens,
                "needed": one.needed,
                "found": {s.name: s.value for s in one.found},
                "impossible": one.impossible,
            }
            for one in results
        ]
    }
    missed = [one for one in results if not one.found and not one.impossible]
    if not missed and results:
        evidence = "; ".join(f"found, after {one.tokens:,} tokens: {one.error} ({_how(one)})" for one in results)
        return Check(CONTROL, CheckOutcome.PASSED, evidence, numbers)
    evidence = "; ".join(f"not found in {one.tokens:,} tokens: {one.error} ({_effort(one)})" for one in missed)
    return Check(CONTROL, CheckOutcome.INCONCLUSIVE, evidence or "no error could be planted", numbers)


def find_error(work: AuditTask, error: str, subject: Audited, max_tokens: int) -> Plant:
    """Samples from ``subject`` until its error is found, ``max_tokens`` are reached, or the deadline has passed."""

    def enough(tally: TokenTally) -> bool:
        return tally.tokens >= FEWEST and (tally.impossible > 0 or bool(_significant(*leveled(tally, work.level))))

    return plant_of(error, drawn(work, subject, Exactness.DISTRIBUTION, max_tokens, enough), work.level)


def plant_of(error: str, tally: TokenTally, level: float) -> Plant:
    """Returns whether the tests, together at ``level``, found an error in sampled tokens, and their power."""
    statistics, level = leveled(tally, level)
    found = _significant(statistics, level)
    return Plant(error, tally.tokens, found, tally.impossible, None if found else _needed(statistics, tally, level))


def _significant(statistics: Sequence[Statistic], level: float) -> tuple[Statistic, ...]:
    return tuple(one for one in statistics if one.p_value < level)


def _needed(statistics: list[Statistic], tally: TokenTally, level: float) -> int | None:
    """Estimates the tokens needed: deviations grow with the square root of their number, noncentralities linearly."""
    factors = []
    for one in statistics:
        seen = one.value - one.dof if one.dof else one.value**2 - 1.0
        if seen > 0.0:
            factors.append(noncentrality(one.dof or 1, level) / seen)
    return math.ceil(tally.tokens * max(1.0, min(factors))) if factors else None


def _how(plant: Plant) -> str:
    return most_significant(plant.found) if plant.found else f"{plant.impossible} tokens of probability 0"


def _effort(plant: Plant) -> str:
    if plant.needed is None:
        return "no sign of it"
    return f"about {plant.needed:,} would show it, a budget {plant.needed / plant.tokens:.1f} times as long"
