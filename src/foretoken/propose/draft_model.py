"""A smaller model drafts (2211.17192, 2302.01318): chains and trees, sampled, ranked, or with the target's noise."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.core.artifacts import heads_method
from foretoken.core.checks import number
from foretoken.core.context import Context
from foretoken.core.distributions import Law
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.models.base import Handle, Model, Scores
from foretoken.models.chains import DraftStop
from foretoken.models.formats.checkpoint import load_config, load_vocabulary, resolve, vocabulary_size
from foretoken.models.heads.files import mask_token, no_mask_token
from foretoken.params import LARGEST, SMALLEST
from foretoken.propose.base import BuildContext, Method, ModelProposer, Observation
from foretoken.propose.chain import draft_at_once
from foretoken.propose.growers import Grower, GrowthConfig, begin, grow_at_once, is_drawn
from foretoken.propose.scores import check_stop, make_stop

_log = logging.getLogger(__name__)
PREFILL_CHUNK = 1024  # tokens of the draft's prefill per step; bounds the latency added to other requests


@dataclass(frozen=True, slots=True)
class DraftModelConfig(GrowthConfig):
    """Shape and parameters of a draft model's drafts."""

    draft_temperature: float | None = None  # the draft's own temperature; None takes the request's, 0 drafts by argmax
    # score of each next token, by which a chain ends before its budget is spent: "entropy", "margin", "learned", or
    # {"rule": one of these} with its own keys; None is the draft's own probability, of greedy chains
    draft_stop: str | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        GrowthConfig.__post_init__(self)
        number("draft_temperature", self.draft_temperature, 0.0, LARGEST, optional=True)
        if 0.0 < (self.draft_temperature or 0.0) < SMALLEST:
            raise InvalidRequest(
                f"draft_temperature must be 0 (greedy) or at least {SMALLEST:g}, got {self.draft_temperature}"
            )
        check_stop(self.draft_stop)
        if self.draft_stop is not None and self.tree != "chain":
            raise InvalidRequest(f"draft_stop ends chains, and tree is {self.tree!r}; leave one of them out")


class DraftModel(ModelProposer):
    """Drafts with ``model``, all sequences of a step in one pass per level, or all levels in one call.

    In the distribution grade, tokens are sampled from the draft's distribution under the request's own parameters, and
    the rows travel with them. In the trajectory grade they are sampled with the noise that the target will use
    (2408.07978), so that both pick the same token wherever their distributions agree.
    vocab_size: The target's vocabulary size. Logits of another width (padded vocabularies of one family) are cut or
    filled.
    """

    name = "draft_model"

    def __init__(self, model: Model, config: DraftModelConfig | None = None, vocab_size: int | None = None) -> None:
        self.model = model
        self.config = config or DraftModelConfig()
        self.vocab_size = vocab_size or model.vocab_size
        self.stop: DraftStop | None = make_stop(self.config.draft_stop, model)
        self._handles: dict[int, Handle] = {}
        self._unreadable: set[int] = set()  # sequences with a token that the draft model lacks

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        growers: dict[int, tuple[Handle, Grower]] = {}
        levels: list[int] = []
        prefilling: list[Handle] = []
        for i, (context, budget) in enumerate(zip(contexts, budgets, strict=True)):
            law = self._law(context)
            drawn = is_drawn(context, law)
            if budget > 0 and (shape := self._shape(context, budget, drawn)) is not None:
                handle = self._handle(context)
                if len(handle.tokens) == len(context.tokens):
                    growers[i] = handle, self._grower(shape, context, law, budget)
                    levels.append(shape.steps(budget, drawn))
                else:
                    prefilling.append(handle)
        if prefilling:
            self.model.score(prefilling, [Draft.empty()] * len(prefilling))
        drafted = dict(zip(growers, self._grow(list(growers.values()), levels), strict=True)) if growers else {}
        return [drafted.get(i, Draft.empty()) for i in range(len(contexts))]

    def ends_early(self, context: Context) -> bool:
        return self.model.adapts_levels and (self.stop is not None or context.law.greedy)

    def observe(self, contexts: Sequence[Context], observations: Sequence[Observation]) -> None:
        known = [
            (handle, observation.step.tokens)
            for context, observation in zip(contexts, observations, strict=True)
            if (handle := self._handles.get(context.id)) is not None
            and len(handle.tokens) + len(observation.step.tokens) == len(context.tokens)
            and self._reads(context)
        ]
        if known:
            handles, tokens = zip(*known, strict=True)
            self.model.commit(handles, tokens)

    def replace(self, model: Model) -> None:
        """Drafts with another model from the next step on; it prefills the contexts again."""
        for handle in self._handles.values():
            self.model.close(handle)
        self._handles.clear()
        self._unreadable.clear()
        self.model = model

    def forget(self, context: Context) -> None:
        handle = self._handles.pop(context.id, None)
        if handle is not None:
            self.model.close(handle)
        self._unreadable.discard(context.id)

    def _grow(self, active: Sequence[tuple[Handle, Grower]], levels: Sequence[int]) -> list[Draft]:
        """Returns the drafts of all sequences, grown a level with each pass, or all levels in one call.

        levels: Maximum depth of each draft.
        """
        drafts = draft_at_once(self.model, active, self.vocab_size)
        growers = [grower for _, grower in active]
        active = [pair for pair, draft in zip(active, drafts, strict=True) if draft is None]
        taps = (self.model.num_layers,) if self.stop is not None and self.stop.hidden else ()
        while active := [(handle, grower) for handle, grower in active if not grower.done]:
            nodes = [grower.growing() for _, grower in active]
            scores = self.model.score([handle for handle, _ in active], nodes, taps)
            for (_, grower), score in zip(active, scores, strict=True):
                grower.extend(score.logits, self._hidden(score))
        return [grower.draft() if draft is None else draft for draft, grower in zip(drafts, growers, strict=True)]

    def _hidden(self, score: Scores) -> Tensor | None:
        """Returns the last states of the rows that have logits, [rows, H], if they were tapped."""
        states = score.taps.get(self.model.num_layers)
        return None if states is None else states[-len(score.logits) :]

    def _fit(self, logits: Tensor) -> Tensor:
        """Returns logits [rows, V] cut or filled to the target's V; ids beyond either vocabulary are not drafted."""
        missing = self.vocab_size - logits.shape[-1]
        return F.pad(logits, (0, missing), value=-torch.inf) if missing else logits

    def _shape(self, context: Context, budget: int, drawn: bool) -> GrowthConfig | None:
        """Returns the growth of a draft that fits the draft's context window; None if none fits or a token is unknown.

        A tree expands more nodes than it keeps, so it is less deep near the end of the window.
        """
        config, room = self.config, self.model.max_length - len(context.tokens)
        if budget > room or len(context.source) > self.model.source_length or not self._reads(context):
            return None
        if config.is_chain(drawn) or config.steps(budget) * config.top_k <= room:
            return config
        return replace(config, num_steps=room // config.top_k) if room >= config.top_k else None

    def _reads(self, context: Context) -> bool:
        """Returns whether the draft model has an embedding for every token; if not, the sequence's cache is freed."""
        if context.id in self._unreadable:
            return False
        handle = self._handles.get(context.id)
        start = 0 if handle is None else len(handle.tokens)
        if self.model.reads(context.tokens[start:]) and (handle is not None or self.model.reads(context.source)):
            return True
        self._unreadable.add(context.id)
        if handle is not None:
            self.model.close(self._handles.pop(context.id))
        return False

    def _handle(self, context: Context) -> Handle:
        """Returns the sequence's handle. Each step prefills one chunk of a long text; drafting starts after that."""
        handle = self._handles.get(context.id)
        if handle is None:
            adapter = context.adapter if context.adapter in self.model.adapters else None
            handle = self.model.open(context.tokens, context.source, context.cache_salt, adapter)
            self._handles[context.id] = handle
            handle.truncate(handle.cached + PREFILL_CHUNK)
        elif not handle.pending:
            start = len(handle.tokens)
            self.model.commit([handle], [context.tokens[start : start + PREFILL_CHUNK]])
        return handle

    def _law(self, context: Context) -> Law:
        own = self.config.draft_temperature
        return context.law if own is None or context.law.greedy else context.law.with_temperature(own)

    def _grower(self, shape: GrowthConfig, context: Context, law: Law, budget: int) -> Grower:
        return begin(shape, context, budget, self._fit, law, stop=self.stop)


class ParallelDraftModel(DraftModel):
    """Drafts all levels in one pass (PARD, 2504.18583): a mask token stands for each token that is not drafted yet.

    mask_token: The token that the draft was trained to predict from, of its own vocabulary.
    """

    def __init__(
        self, model: Model, mask_token: int, config: DraftModelConfig | None = None, vocab_size: int | None = None
    ) -> None:
        super().__init__(model, config, vocab_size)
        if self.stop is not None:
            raise InvalidRequest(
                "draft_stop ends a draft between passes, and parallel_drafting has only one; choose one"
            )
        self.mask_token = mask_token

    def ends_early(self, context: Context) -> bool:
        return False

    def _grow(self, active: Sequence[tuple[Handle, Grower]], levels: Sequence[int]) -> list[Draft]:
        handles = [handle for handle, _ in active]
        if stale := [handle for handle in handles if handle.nodes]:  # of a step that was abandoned
            self.model.commit(stale, [[]] * len(stale))
        masks = [Draft.chain([self.mask_token] * (depth - 1)) for depth in levels]
        for (_, grower), score in zip(active, self.model.score(handles, masks), strict=True):
            grow_at_once(grower, score.logits)
        return [grower.draft() for _, grower in active]


@dataclass(frozen=True, slots=True)
class DraftMethodConfig(DraftModelConfig):
    """Keys of the method "draft_model"."""

    # whether the draft predicts all positions in one pass; none: if its config.json names the mask token of one
    parallel_drafting: bool | None = None


def check_vocabulary(tokenizer: Any, target_size: int, draft: Path) -> None:
    """Refuses a draft model that has other tokens than the target at the target's token ids.

    Tokens that only the draft has are never read and only ever rejected. A token that only the target has, such as one
    that was added to it later, needs a padding row in the draft's embedding.

    Args:
        target_size: The target's vocabulary size; the tokenizer's ids beyond it are ignored.
        draft: The draft's folder or GGUF file.

    Raises:
        InvalidRequest: Both have tokens that differ.
        ModelLoadError: The draft's configuration or tokenizer cannot be loaded.
    """
    ids = load_vocabulary(draft) or {}
    tokens = {i: token for token, i in ids.items()}
    size = vocabulary_size(draft) or max(tokens, default=target_size - 1) + 1
    target_ids = {token: i for token, i in tokenizer.get_vocab().items() if i < target_size}
    different = sorted(
        (i, token)
        for token, i in (target_ids if ids != target_ids or size < target_size else {}).items()
        if i >= size or ids.get(token, i) != i or tokens.get(i, token) != token
    )
    if different:
        i, token = different[0]
        raise InvalidRequest(
            f"vocabulary mismatch: {draft.name} has other tokens than its target at {len(different)} of "
            f"{len(target_ids)} token ids; {i} is {token!r} in the target and {tokens.get(i, 'no token')!r} in the "
            "draft; take a draft with the target's tokenizer, or use the method 'vocabulary'"
        )


def build(config: DraftMethodConfig, build_context: BuildContext) -> DraftModel:
    if build_context.model is None:
        raise InvalidRequest("method 'draft_model' needs a draft: pass draft_model= or 'model' in speculative_config")
    draft = resolve(build_context.model)
    if method := heads_method(load_config(draft)):
        raise InvalidRequest(
            f"{draft} holds no model that drafts alone, but a part of one that reads its target's states; use method "
            f"{method!r} with this model"
        )
    check_vocabulary(build_context.tokenizer, build_context.target.vocab_size, draft)
    model = build_context.load_draft(draft, config.draft_window)
    if model.takes_source != build_context.target.takes_source:
        kinds = ("a decoder", "an encoder-decoder")
        raise InvalidRequest(
            f"{draft.name} is {kinds[model.takes_source]} and its target {kinds[build_context.target.takes_source]}; "
            "take a draft of the target's kind"
        )
    model.share(build_context.target)
    vocab_size = build_context.target.vocab_size
    mask = _mask_token(config, draft, model.vocab_size)
    if mask is not None:
        return ParallelDraftModel(model, mask, config, vocab_size)
    if config.parallel_drafting:
        raise no_mask_token(draft)
    return DraftModel(model, config, vocab_size)


def _mask_token(config: DraftMethodConfig, draft: Path, vocab: int) -> int | None:
    """Returns the mask token to draft in parallel with; None to draft token by token.

    Raises ModelLoadError if ``parallel_drafting`` is true, and config.json names no token of the vocabulary.
    """
    if config.parallel_drafting is False:
        return None
    try:
        return mask_token(load_config(draft), vocab, draft)
    except ModelLoadError as error:
        if config.parallel_drafting:
            raise
        _log.warning("%s; it drafts token by token", error)
        return None


METHOD = Method(DraftMethodConfig, build, takes_draft_model=True)
