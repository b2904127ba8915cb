"""Never slower: a ledger of what drafting cost beside plain decoding, and a limit to how much may be lost.

Every round that drafted is charged its seconds, catching up included, less what plain decoding would have taken for the
tokens that came. Losses are paid from an allowance, a small share of all time, and from earlier gains up to a limit. A
round may draft only what would not overdraw the account if every guess were wrong. So whatever the proposer does, text
takes at most the allowance longer; and tries after a failure become rare by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.control.base import Controller
from foretoken.control.tempo import Tempo
from foretoken.core.checks import number
from foretoken.core.context import Context
from foretoken.core.step import StepOutput, is_decode_only

_START = 2.0  # plain rounds that may be lost before anything was gained
_MOST = 16.0  # and of earlier gains
_DISTURBED = 3.0  # times what a round should take; what takes longer is not the proposer's doing
_UNKNOWN = 2  # nodes for one sequence, while it is not known what drafting takes


@dataclass(frozen=True, slots=True)
class GuardConfig:
    """allowance: the share of time that drafting may lose."""

    allowance: float = 0.005

    def __post_init__(self) -> None:
        number("allowance", self.allowance, 0.0, 1.0)


class Guard(Controller):
    """``inner``, as far as the ledger allows. Requests that name their own depth have it, and are not charged.

    balance: seconds that may be lost now, None until a plain round was timed.
    """

    def __init__(self, inner: Controller, tempo: Tempo, config: GuardConfig | None = None) -> None:
        """tempo: may be shared with ``inner``."""
        self.inner, self.tempo, self.config = inner, tempo, config or GuardConfig()
        self.balance: float | None = None
        self._forced: dict[int, int] = {}
        self._batch = 0
        self._short: tuple[list[int], float] | None = None  # who could not have a node, and what one would cost

    def budgets(self, contexts: Sequence[Context], rooms: Sequence[int]) -> list[int]:
        if not self._still_short(contexts):
            self._short = None
        wanted = self.inner.budgets(contexts, _only(contexts, rooms, {}) if self._short else rooms)
        self._batch = len(contexts)
        self._forced = {c.id: k for c, k in zip(contexts, wanted, strict=True) if c.depth is not None}
        own = [i for i, context in enumerate(contexts) if context.depth is None and wanted[i] > 0]
        if own:
            limits = self._affordable(contexts, wanted, own)
            if limits != {i: wanted[i] for i in own}:
                wanted = self.inner.budgets(contexts, _only(contexts, rooms, limits))
        self.tempo.begin(contexts, wanted)
        return wanted

    def observe(self, steps: Sequence[StepOutput]) -> None:
        if steps:
            self._charge(steps)
        self.tempo.observe(steps)
        self.inner.observe(steps)
        if steps and (plain := self.tempo.plain_seconds(len(steps))):
            self.balance = min(_START * plain if self.balance is None else self.balance, _MOST * plain)

    def rest(self) -> int:
        """As long as ``inner``, and until the account allows what it did not."""
        rounds, income = self.inner.rest(), self._income()
        if self._short is None or self.balance is None or not income:
            return rounds
        return min(rounds, max(0, int((self._short[1] - self.balance) / income)))

    def rested(self, rounds: int) -> None:
        if self.balance is not None:
            self.balance += rounds * self._income()
        self.inner.rested(rounds)

    def forget(self, context: Context) -> None:
        self.tempo.forget(context)
        self.inner.forget(context)

    def _still_short(self, contexts: Sequence[Context]) -> bool:
        """Whether the same requests could not draft anything anyway, so that nobody need decide how much."""
        if self._short is None or self.balance is None:
            return False
        who, least = self._short
        return self.balance < least and who == [context.id for context in contexts]

    def _affordable(self, contexts: Sequence[Context], wanted: Sequence[int], own: Sequence[int]) -> dict[int, int]:
        """By place in the batch, nodes that may be drafted: all, or what the worst case leaves room for."""
        if self.balance is None or self.tempo.due(len(contexts)):
            return {}
        behind = {i: self.tempo.behind(contexts[i]) for i in own}
        if not self.tempo.ready:
            first = min(own, key=lambda i: behind[i])
            return {first: min(_UNKNOWN, wanted[first])} if self.balance > 0.0 else {}
        limits = {i: wanted[i] for i in own}
        if self._worst(len(contexts), limits, behind) <= self.balance:
            return limits
        depth = max(limits.values())
        while depth > 0:
            limits = {}
            for i in sorted(own, key=lambda i: behind[i]):
                more = {**limits, i: min(depth, wanted[i])}
                if self._worst(len(contexts), more, behind) > self.balance:
                    break
                limits = more
            if limits:
                return limits
            depth //= 2
        first = min(own, key=lambda i: behind[i])
        self._short = [context.id for context in contexts], self._worst(len(contexts), {first: 1}, behind)
        return {}

    def _worst(self, batch: int, limits: dict[int, int], behind: dict[int, int]) -> float:
        """Seconds lost if nothing is accepted."""
        tempo, rows = self.tempo, batch + sum(limits.values())
        drafting = tempo.draft_seconds(max(limits.values()), len(limits))
        missed = tempo.missed_seconds(sum(behind[i] for i in limits))
        return drafting + missed + max(0.0, tempo.pass_seconds(batch, rows) - tempo.plain_seconds(batch))

    def _income(self) -> float:
        """Seconds that a plain round brings."""
        return self.config.allowance * self.tempo.plain_seconds(self._batch)

    def _charge(self, steps: Sequence[StepOutput]) -> None:
        """Enter a round: its allowance, and its loss or gain against the same tokens without the drafts on trial."""
        plain, batch = self.tempo.plain_seconds(len(steps)), len(steps)
        if self.balance is None or not plain:
            return
        timings = steps[0].timings
        free = [step for step in steps if step.sequence not in self._forced]
        self.balance += self.config.allowance * timings.total
        if not any(len(step.draft) for step in free):
            return
        forced = sum(len(step.draft) for step in steps if step.sequence in self._forced)
        nodes = sum(len(step.draft) for step in free)
        base, tokens = plain if not forced else self._with(batch + forced), sum(len(step.tokens) for step in free)
        if is_decode_only(steps):
            seconds = min(timings.total, _DISTURBED * self._expected(steps, batch + forced + nodes))
            # On a machine that is faster now than when plain rounds were timed, a loss would look like a gain.
            rest = seconds * (timings.total - timings.propose) / timings.total
            base = min(base, rest * self.tempo.share(batch + forced, batch + forced + nodes))
        else:  # beside a prompt's rows only what was added can be told
            seconds = plain + timings.propose + max(0.0, self._with(batch + nodes) - plain)
        self.balance -= seconds - base * tokens / len(free)

    def _with(self, rows: int) -> float:
        return self.tempo.passes.alone(rows)

    def _expected(self, steps: Sequence[StepOutput], rows: int) -> float:
        tempo = self.tempo
        return self._with(rows) + (tempo.planned_seconds() if tempo.ready else steps[0].timings.propose)


def _only(contexts: Sequence[Context], rooms: Sequence[int], limits: dict[int, int]) -> list[int]:
    """``rooms``, for requests that name no depth of their own as far as ``limits`` have it."""
    return [
        room if context.depth is not None else min(room, limits.get(i, 0))
        for i, (context, room) in enumerate(zip(contexts, rooms, strict=True))
    ]
