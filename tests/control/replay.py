"""Replays recorded streams in simulated seconds: real sources and the real policy, measured costs, no model.

A stream has the tokens of a text and what a draft model would have done at each of them (benchmarks/record_streams.py),
so every draft's outcome is known, and the text is the same whatever is drafted.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foretoken.control.base import Controller
from foretoken.control.fixed import Fixed
from foretoken.control.ledger import Ledger
from foretoken.control.policy import DraftPolicy
from foretoken.core.context import Context
from foretoken.core.draft import Draft, PointMass, Sampled, log_scores
from foretoken.core.sampling import SamplingLaw
from foretoken.core.step import StepOutput, Timings
from foretoken.core.streams import Streams
from foretoken.core.verdict import Verdict
from foretoken.costs.model import CostModel
from foretoken.models.base import Scores
from foretoken.propose.base import Observation, Proposer
from foretoken.propose.suffix import Suffix, SuffixConfig
from foretoken.propose.union import Union, UnionMember

KINDS = ("code", "editing", "repetition", "chat")
DEPTHS = (1, 2, 4, 6, 8, 12, 16)


@dataclass(frozen=True)
class Machine:
    """Seconds of a target on a machine.

    Attributes:
        passes: Milliseconds by rows.
        level: Milliseconds of one draft token of the model; None if there is no draft model.
        start: Milliseconds of a draft beside its tokens.
        step: Milliseconds of a step beside its pass.
        search: Milliseconds of a search for text to copy, decisions included.
        displaced: Share by which a pass behind the model's drafts takes longer. It falls within twelve plain steps.
    """

    passes: Mapping[int, float]
    level: float | None = None
    start: float = 0.0
    step: float = 0.15
    search: float = 0.1
    displaced: float = 0.0

    def rows(self, rows: float) -> float:
        """Returns the seconds of a pass."""
        return float(np.interp(rows, list(self.passes), list(self.passes.values()))) / 1e3

    def drafting(self, levels: int) -> float:
        return (self.start + levels * self.level) / 1e3 if levels and self.level is not None else 0.0

    def factor(self, since: int) -> float:
        """Returns the seconds of a pass ``since`` steps after drafting, relative to a settled one."""
        return 1.0 + self.displaced * max(0.0, 1.0 - since / 12) ** 2

    @property
    def plain(self) -> float:
        """Seconds of a step without draft."""
        return self.rows(1) + self.step / 1e3


# Two cores of a Zen 5, context of some hundred tokens.
SMOLLM2 = Machine({1: 2.3, 2: 2.45, 4: 2.85, 8: 3.6, 16: 5.4, 33: 9.5})
HEADED = Machine(SMOLLM2.passes, level=0.17, start=0.4)  # with its EAGLE-3 head
WIDENED = Machine({1: 13.5, 2: 13.7, 4: 14.2, 8: 15.5, 16: 19.5, 33: 33.0})
BUNDLED = Machine({1: 0.95, 2: 1.05, 4: 1.15, 8: 1.35, 16: 1.8, 33: 2.8}, level=0.11)
WIDE_HEADED = Machine(WIDENED.passes, level=0.25, start=0.6)
# Two cores of a shared Xeon, whose caches the head's weights displace.
DISPLACED = Machine({1: 3.0, 2: 3.35, 4: 3.9, 8: 5.4, 16: 8.7, 33: 16.0}, level=0.2, start=0.9, displaced=0.5)
SCALED = Machine({1: 50.0, 4: 52.0, 8: 55.5, 16: 59.5, 33: 94.5}, level=0.9)


@cache
def streams(pair: str) -> list[dict[str, Any]]:
    """Returns the recorded streams of "bundled" or "smollm2"."""
    recorded: list[dict[str, Any]] = json.loads((Path(__file__).parent / "streams.json").read_text())[pair]
    return recorded


def stream(pair: str, kind: str, temperature: float) -> dict[str, Any]:
    """Returns one recorded stream."""
    return next(s for s in streams(pair) if (s["kind"], s["temperature"]) == (kind, temperature))


class RecordedDraft(Proposer):
    """Drafts what the draft model would have drafted."""

    name = "draft_model"

    def __init__(self) -> None:
        self.stream: dict[str, Any] = {}
        self.right: list[bool] = []

    def begin(self, recorded: dict[str, Any]) -> None:
        """Starts a text."""
        self.stream, numbers = recorded, random.Random(1)
        sampled = [numbers.random() < chance for chance in recorded["accepted"]]
        self.right = sampled if recorded["temperature"] else [bool(right) for right in recorded["right"]]

    def ends_early(self, context: Context) -> bool:
        return context.law.greedy

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        return [self._draft(c, b) if b else Draft.empty() for c, b in zip(contexts, budgets, strict=True)]

    def _draft(self, context: Context, budget: int) -> Draft:
        start, agrees, reach = context.generated, True, 1.0
        tokens: list[int] = []
        claims: list[float] = []
        while len(tokens) < budget:
            at = start + len(tokens)
            known = agrees and at < len(self.right)
            agrees = known and self.right[at]
            tokens.append(self.stream["tokens"][at] if agrees else -2)
            claims.append(max(0.01, self.stream["claims"][at]) if known else 0.5)
            if context.end is not None and context.law.greedy:
                reach *= context.end.rate(claims[-1])
                if reach < context.end.minimum(len(tokens) - 1):
                    break
        law = None if context.law.greedy else Sampled(torch.empty(0))
        levels = len(tokens) if len(tokens) < budget else None
        scores = log_scores(accumulate(claims, mul)) if context.law.greedy else None
        return Draft(tuple(tokens), Draft.chain(tokens).parents, law or PointMass(), scores, levels)


@dataclass
class Replay:
    """Texts one after another, under one controller.

    Attributes:
        machine: Seconds.
        controller: Decides.
        proposer: Drafts.
        seconds: Seconds so far.
        tokens: Tokens so far.
        steps: Steps so far.
        longest: Largest number of draft tokens of a step.
        since: Steps since the model drafted.
    """

    machine: Machine
    controller: Controller
    proposer: Proposer
    model: RecordedDraft | None = None
    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    drafted: list[int] = field(default_factory=list)
    since: int = 12

    @staticmethod
    def policy(machine: Machine, max_tokens: int = 16) -> Replay:
        """Returns the default: the union of copied text and the draft model, if there is one."""
        costs = CostModel()
        policy = DraftPolicy(costs, max_tokens)
        policy.bound(max_tokens, Ledger(0.01))
        sources, model = [UnionMember("suffix", _suffix())], None
        drafting: dict[int, float] = {}
        if machine.level is not None:
            model = RecordedDraft()
            sources.append(UnionMember("draft_model", model))
            drafting = {depth: machine.drafting(depth) for depth in DEPTHS}
        passes = {d + 1: (machine.rows(d + 1) + machine.step / 1e3) * machine.factor(0) for d in (0, *DEPTHS)}
        costs.calibrate(passes, drafting, settled=machine.plain)
        return Replay(machine, policy, Union(sources, policy, "auto"), model)

    @staticmethod
    def constant(machine: Machine, source: str, tokens: int) -> Replay:
        """Returns a constant draft length of one source."""
        model = RecordedDraft() if source == "draft_model" else None
        return Replay(machine, Fixed(tokens), model or _suffix(), model)

    def run(self, recorded: Mapping[str, Any], first: int = 0, count: int | None = None) -> Replay:
        """Replays a text, or ``count`` tokens of it."""
        stop = len(recorded["tokens"]) if count is None else first + count
        text = dict(recorded) | {
            k: recorded[k][first:stop] for k in ("tokens", "claims", "right", "accepted") if k in recorded
        }
        prompt = [*recorded["prompt"], *recorded["tokens"][:first]]
        law = SamplingLaw(temperature=recorded["temperature"])
        context = Context(self.steps, list(prompt), len(prompt), law, Streams(0))
        if self.model:
            self.model.begin(text)
        self.controller.admit(context)
        while context.generated < len(text["tokens"]):
            self._step(context, text["tokens"])
        self.controller.forget(context)
        self.proposer.forget(context)
        return self

    def _step(self, context: Context, tokens: Sequence[int]) -> None:
        position = context.generated
        left = len(tokens) - position
        (budget,) = self.controller.budgets([context], [left - 1])
        searches = budget > 0 and (not isinstance(self.controller, DraftPolicy) or self.controller.searches(context, 1))
        (draft,) = self.proposer.propose([context], [budget])
        path, at = list[int](), -1
        while (children := [c for c in draft.children[at + 1] if draft.ids[c] == tokens[position + len(path)]]) and len(
            path
        ) < left - 1:
            at = children[0]
            path.append(at)
        emitted = tuple(tokens[position : position + len(path) + 1])
        levels = (budget if draft.levels is None else draft.levels) if budget and self.model else 0
        propose = self.machine.drafting(levels) + searches * self.machine.search / 1e3
        self.since = 0 if levels else self.since + 1
        score = (self.machine.rows(1 + len(draft)) + self.machine.step / 1e3) * self.machine.factor(self.since)
        timings = Timings(propose, score, 0.0, 0.0, 1)
        context.tokens.extend(emitted)
        end = "length" if context.generated == len(tokens) else None
        step = StepOutput(context.id, position, draft, Verdict(tuple(path), emitted[-1]), emitted, timings, end, budget)
        self.seconds, self.tokens, self.steps = self.seconds + timings.total, self.tokens + len(emitted), self.steps + 1
        self.drafted.append(len(draft))
        context.num_proposer_tokens = len(context.tokens)
        self.proposer.observe([context], [Observation(step, Scores(torch.zeros(len(draft) + 1, 1)))])
        if not self.controller.resting:
            self.controller.observe([context], [step])
            if self.controller.costs is not None:
                self.controller.costs.observe([step])

    @property
    def speedup(self) -> float:
        """Speed over plain decoding."""
        return self.machine.plain * self.tokens / self.seconds


def best_constant(machine: Machine, texts: Sequence[Mapping[str, Any]]) -> float:
    """Returns the speedup of the best constant draft length of any source, plain decoding included."""
    sources = ("suffix",) if machine.level is None else ("suffix", "draft_model")
    speedups = [1.0]
    for source in sources:
        for length in (1, 2, 4, 8, 16):
            replay = Replay.constant(machine, source, length)
            for text in texts:
                replay.run(text)
            speedups.append(replay.speedup)
    return max(speedups)


def _suffix() -> Suffix:
    return Suffix(SuffixConfig(suffix_decoding_max_cached_requests=0))
