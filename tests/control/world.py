"""Steps without models: what they take and which guesses are right is made up, and a controller decides in it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from foretoken.control.base import Controller
from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.part import DraftPart
from foretoken.core.sampling import SamplingLaw
from foretoken.core.step import StepOutput, Timings
from foretoken.core.streams import Streams
from foretoken.core.verdict import Verdict
from foretoken.costs.model import CostModel

ROOM = 10_000
PLAIN = 0.020


def flat(rows: int) -> float:
    """A pass on a CPU: a row more costs three per cent of the first."""
    return PLAIN * (1.0 + 0.03 * (rows - 1))


@dataclass
class Script(Controller):
    """These depths, one after another."""

    depths: list[int]
    costs: CostModel

    def budgets(self, contexts, max_draft_tokens):
        return [self.depths.pop(0)] * len(contexts)


@dataclass
class World:
    """Time passes as the functions say; ``elapsed`` is what it took, ``plain`` what plain decoding would have taken.

    step: seconds of one draft step for all sequences. read: seconds a token that the proposer missed.
    right: whether a guess is, by sequence, tokens generated, and depth. free_right, free_step: the same of what drafts
    without a model, and the seconds of such a draft.
    """

    controller: Controller
    right: Callable[[int, int, int], bool]
    rows: Callable[[int], float] = flat
    step: float = 0.0005
    read: float = 0.0
    free_right: Callable[[int, int, int], bool] | None = None
    free_step: float = 0.0
    elapsed: float = 0.0
    plain: float = 0.0
    tokens: int = 0
    drafted: list[int] = field(default_factory=list)
    by_model: list[int] = field(default_factory=list)
    contexts: dict[int, Context] = field(default_factory=dict)
    made: int = 0

    def add(self, prompt: int = 32, depth: int | None = None, law: SamplingLaw | None = None) -> int:
        context = Context(self.made, [0] * prompt, prompt, law or SamplingLaw(), Streams(0), depth=depth)
        self.contexts[self.made] = context
        self.made += 1
        return context.id

    def warm_up(self, costs: CostModel, depths: Sequence[int] = (0, 0, 0, 1, 1, 2, 3, 4, 6, 8)) -> None:
        """As an ``LLM`` does before the first request; it takes no time."""
        inner, self.controller = self.controller, Script(list(depths), costs)
        member = self.add(prompt=96)
        for _ in depths:
            self.decode()
        self.end(member)
        costs.discount()
        self.controller, self.elapsed, self.plain, self.tokens = inner, 0.0, 0.0, 0
        self.drafted, self.by_model = [], []

    def end(self, identifier: int) -> None:
        self.controller.forget(self.contexts.pop(identifier))

    def decode(self) -> list[int]:
        """One step. Returns the budgets."""
        contexts = list(self.contexts.values())
        budgets = self.controller.budgets(contexts, [ROOM] * len(contexts))
        asked = [(c, budget) for c, budget in zip(contexts, budgets, strict=True) if budget]
        missed = sum(context.missed_tokens for context, _ in asked if context.part is not DraftPart.FREE)
        propose = (
            max((budget for c, budget in asked if c.part is not DraftPart.FREE), default=0) * self.step
            + missed * self.read
        )
        propose += self.free_step * bool(asked)
        prompts = sum(c.prompt_length for c in contexts if not c.generated)
        score = self.rows(sum(budgets) + len(contexts)) + 0.001 * prompts
        timings = Timings(propose, score, 0.0, 0.0, len(contexts), missed_tokens=missed)
        steps = [self._emit(context, budget, timings) for context, budget in zip(contexts, budgets, strict=True)]
        emitted = sum(len(step.tokens) for step in steps)
        self.elapsed += timings.total
        self.plain += self.rows(len(contexts)) * emitted / len(contexts) + 0.001 * prompts
        self.tokens += emitted
        self.drafted.append(sum(budgets))
        self.by_model.append(sum(budget for context, budget in asked if context.part is not DraftPart.FREE))
        if not self.controller.resting:
            self.controller.observe(contexts, steps)
            if self.controller.costs is not None:
                self.controller.costs.observe(steps)
        return budgets

    def run(self, tokens: int) -> None:
        """Decodes until that many more tokens have arrived."""
        end = self.tokens + tokens
        while self.tokens < end:
            self.decode()

    def _emit(self, context: Context, budget: int, timings: Timings) -> StepOutput:
        position = context.generated
        accepted = 0
        right = self.free_right if context.part is DraftPart.FREE and self.free_right else self.right
        while accepted < budget and right(context.id, position, accepted):
            accepted += 1
        tokens = (0,) * (accepted + 1)
        context.tokens.extend(tokens)
        if budget and context.part is not DraftPart.FREE:
            context.num_proposer_tokens = len(context.tokens)
        draft = Draft.chain([0] * budget) if budget else Draft.empty()
        verdict = Verdict(tuple(range(accepted)), 0)
        part = context.part
        return StepOutput(context.id, position, draft, verdict, tokens, timings, budget=budget, part=part)


def chance(share: float, seed: int = 0) -> Callable[[int, int, int], bool]:
    """Guesses are right so often."""
    numbers = random.Random(seed)
    return lambda sequence, position, depth: numbers.random() < share
