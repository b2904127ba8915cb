"""Steps without models: their seconds and the outcome of drafts are functions, and a controller decides in them."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from foretoken.control.base import Controller
from foretoken.control.ledger import Ledger
from foretoken.control.memory import MemoryWatch
from foretoken.control.policy import DraftPolicy
from foretoken.core.context import Context
from foretoken.core.draft import Draft, Sampled
from foretoken.core.sampling import SamplingLaw
from foretoken.core.step import StepOutput, Timings
from foretoken.core.streams import Streams
from foretoken.core.verdict import Verdict
from foretoken.costs.model import CostModel
from foretoken.costs.tuning import TUNING, Tuning
from foretoken.models.base import Scores
from foretoken.propose.base import Observation, Proposer
from foretoken.propose.union import Union, UnionMember

LEFT = 10_000  # tokens that each request may still emit
PLAIN = 0.020  # seconds of a plain step
Outcome = Callable[[int, int, int], bool]  # by sequence, tokens generated and depth: whether a draft token is right


def flat(rows: int) -> float:
    """A pass on a CPU: a further row costs three per cent of the first."""
    return PLAIN * (1.0 + 0.03 * (rows - 1))


def chance(share: float, seed: int = 0) -> Outcome:
    """Draft tokens are right with this probability."""
    numbers = random.Random(seed)
    return lambda sequence, position, depth: numbers.random() < share


class Scripted(Proposer):
    """Drafts chains with known outcomes: the text is all zeros, a wrong token is 1.

    Args:
        right: The outcome.
        copies: Its drafts are fixed candidates that cost nothing, otherwise they are sampled by a model.
    """

    def __init__(self, right: Outcome, copies: bool = False) -> None:
        self.right, self.costless, self.name = right, copies, "copies" if copies else "draft_model"

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        return [
            self._draft(*request) if request[1] else Draft.empty() for request in zip(contexts, budgets, strict=True)
        ]

    def _draft(self, context: Context, budget: int) -> Draft:
        accepted = 0
        while accepted < budget and self.right(context.id, context.generated, accepted):
            accepted += 1
        tokens = [0] * accepted + [1] * (budget - accepted)
        return Draft.chain(tokens, None if self.costless else Sampled(torch.empty(0)))


def policy(
    max_tokens: int = 16,
    allowance: float | None = None,
    constant: bool = False,
    memory: MemoryWatch | None = None,
    tuning: Tuning = TUNING,
) -> DraftPolicy:
    """Returns a draft policy with a cost model of its own."""
    made = DraftPolicy(CostModel(tuning), max_tokens)
    made.bound(max_tokens, None if allowance is None else Ledger(allowance), memory, constant)
    return made


@dataclass
class World:
    """Decodes under a controller.

    Attributes:
        controller: Decides.
        right: Outcome of the model's drafts.
        rows: Seconds of a pass by rows.
        step: Seconds of one draft token for all sequences.
        read: Seconds of a token that the model missed.
        copied: Outcome of copied text; None if nothing is copied.
        elapsed: Seconds so far.
        plain: Seconds that plain decoding would have taken.
        tokens: Tokens so far.
        drafted: Draft tokens of each step.
        by_model: Draft tokens of the model in each step.
    """

    controller: Controller
    right: Outcome
    rows: Callable[[int], float] = flat
    step: float = 0.0005
    read: float = 0.0
    copied: Outcome | None = None
    elapsed: float = 0.0
    plain: float = 0.0
    tokens: int = 0
    drafted: list[int] = field(default_factory=list)
    by_model: list[int] = field(default_factory=list)
    contexts: dict[int, Context] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._count = 0
        self._model = Scripted(lambda *at: self.right(*at))
        decides = self.controller if isinstance(self.controller, DraftPolicy) else DraftPolicy()
        sources = [UnionMember("draft_model", self._model)]
        if self.copied is not None:
            sources.insert(0, UnionMember("copies", Scripted(lambda *at: self.copied(*at), copies=True)))
        self.proposer = Union(sources, decides, "union")

    def add(self, prompt: int = 32, depth: int | None = None, law: SamplingLaw | None = None) -> int:
        """Adds a request. Returns its identifier."""
        context = Context(self._count, [0] * prompt, prompt, law or SamplingLaw(), Streams(0), depth=depth)
        self.contexts[self._count] = context
        self.controller.admit(context)
        self._count += 1
        return context.id

    def warm_up(self, costs: CostModel, depths: Sequence[int] = (1, 2, 3, 4, 6, 8, 16)) -> None:
        """Calibrates the cost model, which takes no time."""
        missed = Timings(self.step + 96 * self.read, 0.0, 0.0, 0.0, 1, missed_tokens=96)
        costs.drafting.observe(1, 1, missed.propose, missed.missed_tokens)
        passes = {rows: self.rows(rows) for rows in (1, *(depth + 1 for depth in depths))}
        costs.calibrate(passes, {depth: depth * self.step for depth in depths}, self.read)

    def end(self, identifier: int) -> None:
        context = self.contexts.pop(identifier)
        self.controller.forget(context)
        self.proposer.forget(context)

    def decode(self) -> list[int]:
        """Runs one step. Returns the number of draft tokens of each request."""
        contexts = list(self.contexts.values())
        budgets = self.controller.budgets(contexts, [LEFT] * len(contexts))
        drafts = self.proposer.propose(contexts, budgets)
        levels = [
            (budget if draft.levels is None else draft.levels) if budget else 0
            for budget, draft in zip(budgets, drafts, strict=True)
        ]
        missed = sum(context.missed_tokens for context, level in zip(contexts, levels, strict=True) if level)
        propose = max(levels) * self.step + missed * self.read
        prompts = sum(c.prompt_length for c in contexts if not c.generated)
        score = self.rows(sum(map(len, drafts)) + len(contexts)) + 0.001 * prompts
        timings = Timings(propose, score, 0.0, 0.0, len(contexts), missed_tokens=missed)
        steps = [self._emit(*request, timings) for request in zip(contexts, budgets, drafts, levels, strict=True)]
        emitted = sum(len(step.tokens) for step in steps)
        self.elapsed += timings.total
        self.plain += self.rows(len(contexts)) * emitted / len(contexts) + 0.001 * prompts
        self.tokens += emitted
        self.drafted.append(sum(map(len, drafts)))
        self.by_model.append(sum(levels))
        nothing = Scores(torch.zeros(1, 1))
        self.proposer.observe(contexts, [Observation(step, nothing) for step in steps])
        if not self.controller.resting:
            self.controller.observe(contexts, steps)
            if self.controller.costs is not None:
                self.controller.costs.observe(steps)
        return [len(draft) for draft in drafts]

    def run(self, tokens: int) -> None:
        """Decodes until ``tokens`` more tokens have arrived."""
        end = self.tokens + tokens
        while self.tokens < end:
            self.decode()

    def _emit(self, context: Context, budget: int, draft: Draft, levels: int, timings: Timings) -> StepOutput:
        position, path = context.generated, list[int]()
        for node, token in enumerate(draft.ids):
            if token or draft.parents[node] != (path[-1] if path else -1):
                break
            path.append(node)
        tokens = (0,) * (len(path) + 1)
        context.tokens.extend(tokens)
        if levels:
            context.num_proposer_tokens = len(context.tokens)
        return StepOutput(context.id, position, draft, Verdict(tuple(path), 0), tokens, timings, budget=budget)
