"""The ledger of seconds that drafting saved or lost against plain decoding, which keeps it from being slower."""

from collections.abc import Sequence

from foretoken.core.context import Context
from foretoken.core.step import StepOutput, is_decode_only
from foretoken.costs.model import CostModel


class Ledger:
    """Seconds that drafting may still lose.

    A step with drafts is charged its seconds, less those in which plain decoding would have given the same tokens. A
    search in vain is charged its time, and the first step after drafts what displaced caches add to the next steps.
    Losses are taken from the allowance, a small share of all time, and from earlier gains up to a limit. A step may
    draft only as much as would not overdraw the balance if every draft token were rejected. So a sequence takes at most
    the allowance longer, whatever the proposer does. Requests that ask for a draft length have it, and are not charged.
    allowance: The share of all time that drafting may lose.
    balance: Seconds that may be lost, None until a plain step was timed.
    """

    def __init__(self, allowance: float) -> None:
        self.allowance = allowance
        self.balance: float | None = None
        self._drafted = False  # whether a model drafted in the last step

    def cap(self, costs: CostModel, batch: int) -> float:
        """Returns the seconds that the next step may lose."""
        return costs.tuning.budget_steps / 4 * costs.plain_seconds(batch) if self.balance is None else self.balance

    def income(self, costs: CostModel, batch: int) -> float:
        """Returns the seconds that a plain step of ``batch`` requests adds."""
        return self.allowance * costs.plain_seconds(batch)

    def add(self, seconds: float) -> None:
        """Adds the income of a step that is not observed."""
        if self.balance is not None:
            self.balance += seconds

    def observe(self, contexts: Sequence[Context], steps: Sequence[StepOutput], costs: CostModel) -> None:
        """Enters a step: its allowance, and its gain or loss, by what ``costs`` knew before it."""
        plain = costs.plain_seconds(len(steps))
        if not plain:
            return
        balance = self.cap(costs, len(steps)) + self.allowance * steps[0].timings.total
        own = [step for context, step in zip(contexts, steps, strict=True) if context.depth is None]
        drafted = any(step.levels for step in own)
        if drafted or any(len(step.draft) for step in own):
            balance -= _loss(own, steps, plain, costs)
        elif any(step.budget for step in own):  # a search in vain
            balance -= steps[0].timings.propose
        if self._drafted and not drafted:
            balance -= costs.displacement.tail * plain
        self._drafted = drafted
        self.balance = min(balance, costs.tuning.budget_steps * plain)


def _loss(own: Sequence[StepOutput], steps: Sequence[StepOutput], plain: float, costs: CostModel) -> float:
    """Returns the seconds that a step took beyond those of plain decoding for the tokens of ``own``."""
    timings, batch = steps[0].timings, len(steps)
    rows = batch + sum(len(step.draft) for step in steps)
    without = rows - sum(len(step.draft) for step in own)
    base = plain if without == batch else costs.pass_seconds(without)
    if is_decode_only(steps):
        seconds, outlier = timings.total, costs.tuning.outlier_ratio
        if seconds > outlier * plain:  # a step is expected to take no less than a plain one
            seconds = min(seconds, outlier * (costs.pass_seconds(rows) + _drafting(steps, costs)))
        # Plain steps timed while the machine was slower would make a loss look like a gain.
        share = (timings.total - timings.propose) / timings.total
        base = min(base, seconds * share / costs.pass_ratio(rows, without))
    else:  # in a step with prefill only the added part is known
        seconds = plain + timings.propose + max(0.0, costs.pass_seconds(rows) - plain)
    return seconds - base * sum(len(step.tokens) for step in own) / len(own)


def _drafting(steps: Sequence[StepOutput], costs: CostModel) -> float:
    """Returns the expected seconds of drafting in a step."""
    timings, levels = steps[0].timings, [step.levels for step in steps if step.levels]
    if not levels or not costs.drafting.known:
        return timings.propose
    return costs.drafting.seconds(max(levels), len(levels)) + costs.drafting.missed(timings.missed_tokens)
