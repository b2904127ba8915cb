"""A smaller model drafts (2211.17192, 2302.01318): a chain or a tree, drawn, ranked, or with the target's own noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.control import stops
from foretoken.control.stops import Stop
from foretoken.core.checks import number
from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.models.base import Handle, Model, Scores
from foretoken.models.checkpoint import load_tokenizer, resolve
from foretoken.params import LARGEST, SMALLEST
from foretoken.propose.base import Method, Observation, Proposer, Workshop
from foretoken.propose.growers import Grower, GrowthConfig, begin

PIECE = 1024  # tokens of a text that are read in one round, so that the others hardly wait


@dataclass(frozen=True, slots=True)
class DraftModelConfig(GrowthConfig):
    """How a draft model drafts.

    draft_temperature: the draft's own; None takes the request's, 0 drafts by argmax.
    draft_stop: where a chain ends before its budget is spent: "entropy", "margin", "learned", or {"rule": one of these}
    with the rule's own keys; None nowhere.
    """

    draft_temperature: float | None = None
    draft_stop: str | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        GrowthConfig.__post_init__(self)
        number("draft_temperature", self.draft_temperature, 0.0, LARGEST, optional=True)
        if 0.0 < (self.draft_temperature or 0.0) < SMALLEST:
            raise InvalidRequest(
                f"draft_temperature must be 0 (greedy) or at least {SMALLEST:g}, got {self.draft_temperature}"
            )
        stops.check(self.draft_stop)
        if self.draft_stop is not None and self.tree != "chain":
            raise InvalidRequest(f"draft_stop ends chains, and tree is {self.tree!r}; leave one of them out")


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
        self.stop: Stop | None = stops.make(self.config.draft_stop, model)
        self._handles: dict[int, Handle] = {}
        self._drafts: dict[int, Draft] = {}  # whose outcome the stop is to learn

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        growers: dict[int, tuple[Handle, Grower]] = {}
        behind: list[Handle] = []
        for i, (context, budget) in enumerate(zip(contexts, budgets, strict=True)):
            if budget > 0 and self._fits(context, budget):
                handle = self._handle(context)
                if len(handle.tokens) == len(context.tokens):
                    growers[i] = handle, self._grower(context, budget)
                else:
                    behind.append(handle)
        if behind:
            self.model.score(behind, [Draft.empty()] * len(behind))
        taps = (self.model.num_layers,) if self.stop is not None and self.stop.hidden else ()
        while active := [(handle, grower) for handle, grower in growers.values() if not grower.done]:
            drafts = [grower.growing() for _, grower in active]
            scores = self.model.score([handle for handle, _ in active], drafts, taps)
            for (_, grower), score in zip(active, scores, strict=True):
                grower.extend(score.logits, self._hidden(score))
        made = [growers[i][1].draft() if i in growers else Draft.empty() for i in range(len(contexts))]
        if self.stop is not None:
            self._drafts.update((contexts[i].id, made[i]) for i in growers)
        return made

    def observe(self, contexts: Sequence[Context], observations: Sequence[Observation]) -> None:
        if self.stop is not None:
            for context, observation in zip(contexts, observations, strict=True):
                # In a mixture another member's draft may have been verified.
                if self._drafts.pop(context.id, None) is observation.step.draft:
                    self.stop.observe(context, observation.step)
        known = [
            (handle, observation.step.tokens)
            for context, observation in zip(contexts, observations, strict=True)
            if (handle := self._handles.get(context.id)) is not None
            and len(handle.tokens) + len(observation.step.tokens) == len(context.tokens)
        ]
        if known:
            handles, tokens = zip(*known, strict=True)
            self.model.commit(handles, tokens)

    @property
    def row_bytes(self) -> int:
        return self.model.row_bytes

    def keep(self, limit: int) -> None:
        self.model.keep(limit)

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
        if self.stop is not None:
            self._drafts.pop(context.id, None)
            self.stop.forget(context)

    def _hidden(self, score: Scores) -> Tensor | None:
        """The last states of the rows that have logits, [rows, H], if they were asked for."""
        states = score.taps.get(self.model.num_layers)
        return None if states is None else states[-len(score.logits) :]

    def _fit(self, logits: Tensor) -> Tensor:
        """[rows, V] of the draft to the target's V: ids beyond either vocabulary are never drafted."""
        missing = self.vocab_size - logits.shape[-1]
        return F.pad(logits, (0, missing), value=-torch.inf) if missing else logits

    def _fits(self, context: Context, budget: int) -> bool:
        """Whether the draft can read the text, with what it drafts, and what an encoder reads beside it."""
        length = len(context.tokens) + self._rows(budget)
        return length <= self.model.max_length and len(context.source) <= self.model.source_length

    def _rows(self, budget: int) -> int:
        """Cache rows that a draft of ``budget`` nodes may need: of a tree, more are expanded than kept."""
        return budget if self.config.tree == "chain" else max(budget, self.config.steps(budget) * self.config.top_k)

    def _handle(self, context: Context) -> Handle:
        """The sequence's place; a long text is read a piece a round, and nothing is drafted before its end."""
        handle = self._handles.get(context.id)
        if handle is None:
            handle = self.model.open(context.tokens, context.source, context.cache_salt)
            self._handles[context.id] = handle
            handle.truncate(handle.cached + PIECE)
        elif not handle.pending:
            start = len(handle.tokens)
            self.model.commit([handle], [context.tokens[start : start + PIECE]])
        return handle

    def _grower(self, context: Context, budget: int) -> Grower:
        law, own = context.law, self.config.draft_temperature
        if own is not None and not law.greedy:
            law = law.with_temperature(own)
        gate = None if self.stop is None else self.stop.begin(context)
        return begin(self.config, context, budget, self._fit, law, gate=gate)


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
    model = workshop.load(draft)
    if model.takes_source != workshop.target.takes_source:
        kinds = ("a decoder", "an encoder-decoder")
        raise InvalidRequest(
            f"{draft.name} is {kinds[model.takes_source]} and its target {kinds[workshop.target.takes_source]}; "
            "take a draft of the target's kind"
        )
    model.share(workshop.target)
    return DraftModel(model, config, workshop.target.vocab_size)


METHOD = Method(DraftModelConfig, build)
