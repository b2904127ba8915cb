"""A smaller model drafts (2211.17192, 2302.01318): a chain or a tree, drawn, ranked, or with the target's own noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.core.context import Context, Exactness
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.core.streams import Purpose
from foretoken.models.base import Handle, Model
from foretoken.models.checkpoint import load_tokenizer, resolve
from foretoken.propose.base import Method, Observation, Proposer, Workshop
from foretoken.propose.drawn_tree import DrawnTree
from foretoken.propose.growers import Chain, Drawn, Fixed, Grower

Shape = Literal["chain", "top_k", "sampled", "greedy_multi"]


@dataclass(frozen=True, slots=True)
class DraftModelConfig:
    """How a draft model drafts.

    draft_temperature: the draft's own; None takes the request's, 0 drafts by argmax.
    tree: "chain"; "top_k", the likeliest candidates re-ranked over all levels (EAGLE-2); "sampled", siblings drawn
    without replacement; "greedy_multi", the likeliest ones and one drawn. Greedy requests and those of the trajectory
    grade have fixed candidates: of any tree they get "top_k".
    num_steps: the greatest depth, and so the passes of the draft; None is the whole budget, for trees at most 8.
    top_k: siblings at most, and nodes expanded on a level at most.
    """

    draft_temperature: float | None = None
    tree: Shape = "chain"
    num_steps: int | None = None
    top_k: int = 4

    def __post_init__(self) -> None:
        value = self.draft_temperature
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and 0.0 <= value < math.inf):
            raise InvalidRequest(f"draft_temperature must be a number of at least 0, or None, got {value!r}")
        if self.tree not in get_args(Shape):
            raise InvalidRequest(f"tree must be one of {', '.join(get_args(Shape))}, got {self.tree!r}")
        for name in ("num_steps", "top_k"):
            count = getattr(self, name)
            if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
                raise InvalidRequest(f"{name} must be an integer of at least 1, got {count!r}")

    def steps(self, budget: int) -> int:
        """The greatest depth of a draft of ``budget`` nodes."""
        return min(budget, self.num_steps or (budget if self.tree == "chain" else 8))


class DraftModel(Proposer):
    """Drafts with ``model``, all sequences of a round in one pass per level.

    In the distribution grade tokens are drawn from the draft's law under the request's own parameters and the
    rows travel with them. In the trajectory grade they are drawn with the noise the target will use
    (2408.07978), so that both pick the same token wherever their laws agree.
    """

    name = "draft_model"

    def __init__(self, model: Model, config: DraftModelConfig | None = None, vocab_size: int | None = None) -> None:
        """vocab_size: the target's; logits of another width (padded vocabularies of one family) are cut or filled."""
        self.model = model
        self.config = config or DraftModelConfig()
        self.vocab_size = vocab_size or model.vocab_size
        self._handles: dict[int, Handle] = {}

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        growers = {
            i: self._grower(context, budget)
            for i, (context, budget) in enumerate(zip(contexts, budgets, strict=True))
            if budget > 0 and len(context.tokens) + self._rows(budget) <= self.model.max_length
        }
        while active := [grower for grower in growers.values() if not grower.done]:
            scores = self.model.score([g.handle for g in active], [g.growing() for g in active])
            for grower, score in zip(active, scores, strict=True):
                grower.extend(self._fit(score.logits))
        return [growers[i].draft() if i in growers else Draft.empty() for i in range(len(contexts))]

    def observe(self, contexts: Sequence[Context], observations: Sequence[Observation]) -> None:
        known = [(self._handles[c.id], o.step.tokens) for c, o in zip(contexts, observations, strict=True)
                 if c.id in self._handles]  # fmt: skip
        if known:
            handles, tokens = zip(*known, strict=True)
            self.model.commit(handles, tokens)

    def replace(self, model: Model) -> None:
        """Draft with another model from the next round on; it reads the contexts anew."""
        for handle in self._handles.values():
            self.model.close(handle)
        self._handles.clear()
        self.model = model

    def forget(self, context: Context) -> None:
        handle = self._handles.pop(context.id, None)
        if handle is not None:
            self.model.close(handle)

    def _fit(self, logits: Tensor) -> Tensor:
        """[rows, V] of the draft to the target's V: ids beyond either vocabulary are never drafted."""
        missing = self.vocab_size - logits.shape[-1]
        return F.pad(logits, (0, missing), value=-torch.inf) if missing else logits

    def _rows(self, budget: int) -> int:
        """Cache rows that a draft of ``budget`` nodes may need: of a tree, more are expanded than kept."""
        return budget if self.config.tree == "chain" else max(budget, self.config.steps(budget) * self.config.top_k)

    def _grower(self, context: Context, budget: int) -> Grower:
        if context.id not in self._handles:
            self._handles[context.id] = self.model.open(context.tokens)
        handle, config, law = self._handles[context.id], self.config, context.law
        if config.draft_temperature is not None and not law.greedy:
            law = law.with_temperature(config.draft_temperature)
        steps, shared = config.steps(budget), context.exactness is Exactness.TRAJECTORY
        streams, position = context.streams, context.generated
        stream = streams.shared(position) if shared else streams.private(Purpose.DRAFT, position)
        if config.tree == "chain":
            return Chain(context, handle, steps, law, stream, drawn=not shared and not law.greedy)
        if law.greedy:  # which of the others would be the target's argmax is a question at temperature 1
            return Fixed(context, handle, budget, steps, config.top_k, law.with_temperature(1.0), None)
        if shared or config.tree == "top_k":
            return Fixed(context, handle, budget, steps, config.top_k, law, stream if shared else None)
        tree = DrawnTree(kind=config.tree, budget=budget, steps=steps, width=config.top_k, stream=stream)
        return Drawn(context, handle, law, tree)


def check_vocabulary(tokenizer: Any, draft: Path) -> None:
    """Refuse a draft whose token ids mean other strings than the target's. Raises InvalidRequest."""
    if not any(draft.glob("tokenizer*")):
        return  # a bare draft is taken at its word; the row widths are reconciled by the proposer
    mine, theirs = tokenizer.get_vocab(), load_tokenizer(draft).get_vocab()
    different = sum(1 for token in mine if token in theirs and mine[token] != theirs[token])
    missing = len(mine.keys() ^ theirs.keys())
    if different or missing:
        raise InvalidRequest(
            f"vocabulary mismatch: {draft.name} ({len(theirs)} tokens) and its target ({len(mine)} tokens) disagree on "
            f"{different + missing}; share the target's tokenizer, or use the method 'vocabulary'"
        )


def build(config: DraftModelConfig, workshop: Workshop) -> DraftModel:
    """The draft that "model" names."""
    if workshop.model is None:
        raise InvalidRequest("method 'draft_model' needs a draft: pass draft_model= or 'model' in speculative_config")
    draft = resolve(workshop.model)
    check_vocabulary(workshop.tokenizer, draft)
    return DraftModel(workshop.load(draft), config, workshop.target.vocab_size)


METHOD = Method(DraftModelConfig, build)
