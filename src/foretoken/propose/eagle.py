"""EAGLE (2401.15077, 2406.16858, 2503.01840): a small layer on the target's own hidden states drafts a dynamic tree.

Candidates are ranked as EAGLE-2 does; where the request draws they are drawn too, so that verification can use the law
that they were drawn from. In the trajectory grade they lead the race with the noise that the target will use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from foretoken.core.context import Context, Exactness
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.core.streams import Purpose
from foretoken.models.heads.eagle_net import EagleNet, HeadHandle
from foretoken.models.heads.loading import load_eagle
from foretoken.models.heads.taps import Reading
from foretoken.propose.base import Method, Needs, Observation, Proposer, Workshop
from foretoken.propose.draft_model import Shape
from foretoken.propose.drawn_tree import DrawnTree
from foretoken.propose.growers import Chain, Drawn, Fixed, Grower
from foretoken.propose.tree import Candidates, likeliest

STEPS = 8
# A greedy target goes to the argmax of logits that the head's are off from, so guesses are ranked as if sharper: what
# was best on the bundled pair. Compare ``tree.RACE_SCALE``.
GREEDY_SCALE = 0.7


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """How the head drafts.

    tree: as for a draft model; "sampled" by default, which accepted most where requests draw. Greedy requests and those
    of the trajectory grade get "top_k" of any tree.
    num_steps: the greatest depth, and so the passes of the head; None is the whole budget, for trees at most 8.
    top_k: siblings at most, and nodes expanded on a level at most.
    """

    tree: Shape = "sampled"
    num_steps: int | None = None
    top_k: int = 8

    def __post_init__(self) -> None:
        if self.tree not in get_args(Shape):
            raise InvalidRequest(f"tree must be one of {', '.join(get_args(Shape))}, got {self.tree!r}")
        for name in ("num_steps", "top_k"):
            count: Any = getattr(self, name)
            wrong = isinstance(count, bool) or not isinstance(count, int) or count < 1
            if wrong and not (name == "num_steps" and count is None):
                raise InvalidRequest(f"{name} must be an integer of at least 1, got {count!r}")

    def steps(self, budget: int) -> int:
        """The greatest depth of a draft of ``budget`` nodes."""
        return min(budget, self.num_steps or (budget if self.tree == "chain" else STEPS))


@dataclass(slots=True)
class _Ranked(Fixed):
    """For a greedy request: the likeliest of the draft's own tokens. net: knows which of the target's they are."""

    net: EagleNet | None = None

    def extend(self, logits: Tensor) -> None:
        assert self.net is not None
        scores, ids = likeliest((logits / GREEDY_SCALE).softmax(-1), self.width)
        self.tree.expand(Candidates(scores, self.net.target_ids(ids)), self.width, self.budget)
        self.level += 1


class Eagle(Proposer):
    """Drafts with ``net`` from the target's layers ``taps``; all sequences of a round share a pass per level.

    The round that computes a sequence's prompt goes without a draft: nothing is known before the target's pass.
    """

    def __init__(
        self, net: EagleNet, taps: Sequence[int], config: EagleConfig | None = None, reading: Reading | None = None
    ) -> None:
        """reading: how the head's ids of layers were understood, where that had to be measured."""
        self.name = "eagle3" if net.joined else "eagle"
        self.net, self.config, self.reading = net, config or EagleConfig(), reading
        self.taps = tuple(taps)
        self.needs = Needs(tuple(sorted(set(taps))))
        self._handles: dict[int, HeadHandle] = {}

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        growers = {
            i: (handle := self._handles[context.id], self._grower(context, handle, budget))
            for i, (context, budget) in enumerate(zip(contexts, budgets, strict=True))
            if budget > 0 and context.id in self._handles and len(context.tokens) + budget <= self.net.max_length
        }
        active = list(growers.values())
        if active:
            self._extend(active, self.net.catch_up([handle for handle, _ in active]))
        while active := [(handle, grower) for handle, grower in active if not grower.done]:
            drafts = [grower.growing() for _, grower in active]
            self._extend(active, self.net.grow([handle for handle, _ in active], drafts))
        return [growers[i][1].draft() if i in growers else Draft.empty() for i in range(len(contexts))]

    def observe(self, contexts: Sequence[Context], observations: Sequence[Observation]) -> None:
        """Give every sequence its newly committed tokens and the target's features before them."""
        fresh = [self._committed(context, seen) for context, seen in zip(contexts, observations, strict=True)]
        if fresh:
            features = self.net.features(torch.cat([raw for _, _, raw in fresh]))
            parts = features.split([len(raw) for _, _, raw in fresh])
            for (handle, tokens, _), part in zip(fresh, parts, strict=True):
                self.net.extend(handle, tokens, part)

    def forget(self, context: Context) -> None:
        handle = self._handles.pop(context.id, None)
        if handle is not None:
            self.net.close(handle)

    # a round

    def _grower(self, context: Context, handle: HeadHandle, budget: int) -> Grower:
        config, law, steps = self.config, context.law, self.config.steps(budget)
        shared = context.exactness is Exactness.TRAJECTORY
        streams, position = context.streams, context.generated
        stream = streams.shared(position) if shared else streams.private(Purpose.DRAFT, position)
        if config.tree == "chain":
            return Chain(context, handle, steps, law, stream, drawn=not shared and not law.greedy)
        if law.greedy:
            sizes = (budget, steps, config.top_k)
            if law.needs_history:
                return Fixed(context, handle, *sizes, law.with_temperature(1.0), None)
            return _Ranked(context, handle, *sizes, law, None, net=self.net)
        if shared or config.tree == "top_k":
            return Fixed(context, handle, budget, steps, config.top_k, law, stream if shared else None)
        tree = DrawnTree(kind=config.tree, budget=budget, steps=steps, width=config.top_k, stream=stream)
        return Drawn(context, handle, law, tree)

    def _extend(self, active: Sequence[tuple[HeadHandle, Grower]], rows: Sequence[Tensor]) -> None:
        """rows: for each, logits [new, Vd] over the draft's vocabulary."""
        for (_, grower), logits in zip(active, rows, strict=True):
            grower.extend(logits if isinstance(grower, _Ranked) else self.net.to_target(logits))

    # the truth

    def _committed(self, context: Context, seen: Observation) -> tuple[HeadHandle, list[int], Tensor]:
        """-> the sequence, its new tokens, and the target's states [n, taps * Ht] at the tokens before them"""
        step, scores = seen.step, seen.scores
        if context.id not in self._handles:
            self._handles[context.id] = self.net.open()
        known = len(scores.taps[self.taps[0]]) - len(step.draft)  # rows of committed tokens, then the draft's
        rows = [*range(known), *(known + node for node in step.verdict.path[: len(step.tokens) - 1])]
        raw = torch.cat([scores.taps[layer][rows] for layer in self.taps], dim=-1)
        start = scores.first + 1
        return self._handles[context.id], context.tokens[start : start + len(rows)], raw


def build(config: EagleConfig, workshop: Workshop) -> Eagle:
    """The head that "model" names, or the one that comes with the target."""
    loaded = load_eagle(workshop.target, workshop.tokenizer, workshop.model, workshop.path)
    return Eagle(loaded.net, loaded.taps, config, loaded.reading)


METHOD = Method(EagleConfig, build, tokens=8)
