"""Drafts with another tokenizer than the target's (2502.05202): by text, or by the tokens that both vocabularies share.

In both algorithms the draft model sees the text in its own tokens. They are updated as the text grows, so that its KV
cache holds all but the last few of them from step to step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from math import ceil

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.core.native.sampling import Adjustment, drawing
from foretoken.models.base import Handle, Model, Scores
from foretoken.models.chains import ChainRequest
from foretoken.models.formats.checkpoint import load_tokenizer, resolve
from foretoken.models.formats.memory import give_back
from foretoken.propose.base import BuildContext, Method, ModelProposer, Observation, Proposer
from foretoken.propose.draft_model import DraftModel, DraftModelConfig
from foretoken.propose.pieces import Pieces, Script

_ALGORITHMS = ("slem", "tli")
_MARGIN = 256  # positions of the draft's context window reserved for drafting; of a small window a quarter


@dataclass(frozen=True, slots=True)
class VocabularyConfig(DraftModelConfig):
    """The keys of a draft model, which apply to tli, and the algorithm."""

    # "slem" drafts text by argmax and cuts it into the target's tokens; "tli" drafts tokens that both vocabularies
    # share, from the draft's distribution restricted to them; None is slem at temperature 0, else tli
    algorithm: str | None = None

    def __post_init__(self) -> None:
        DraftModelConfig.__post_init__(self)
        if self.algorithm not in (None, *_ALGORITHMS):
            raise InvalidRequest(f"algorithm must be one of {', '.join(_ALGORITHMS)}, or None, got {self.algorithm!r}")


class RetokenizedSequence:
    """One context in the draft's tokens: its script and the draft's handle, which hold the same ids between steps."""

    def __init__(
        self, model: Model, target: Pieces, draft: Pieces, tokens: Sequence[int], cache_salt: str | None = None
    ) -> None:
        self.model, self._cache_salt = model, cache_salt
        self.script = Script(target, draft, tokens)
        self.handle = self._open()
        self.fit(0)

    def commit(self, tokens: Sequence[int]) -> None:
        """Appends the target's tokens. The draft's KV cache is kept up to where its own tokens change."""
        start = self.script.extend(tokens)
        ids, held = self.script.ids, self.handle.tokens
        pairs = zip(ids[start:], held[start:], strict=False)
        same = min(start + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)), len(ids) - 1)
        if same == 0:
            self._reopen()
            return
        if same < len(held):
            self.handle.truncate(same)
        self.model.commit([self.handle], [ids[same:]])

    def fit(self, nodes: int) -> None:
        """Makes room for ``nodes`` draft nodes: a text that outgrows the draft's context window loses its beginning."""
        max_ids = self.model.max_length - max(min(_MARGIN, self.model.max_length // 4), nodes)
        if len(self.script.ids) > max_ids:
            self.script.shorten(max(1, max_ids // 2))
            self._reopen()

    def _reopen(self) -> None:
        self.model.close(self.handle)
        self.handle = self._open()

    def _open(self) -> Handle:
        return self.model.open(self.script.ids, cache_salt=self._cache_salt)


class SlemProposer(Proposer):
    """SLEM: drafts the draft model's likeliest text, cut into the target's tokens, as fixed candidates."""

    name = "slem"

    def __init__(self, model: Model, target: Pieces, draft: Pieces) -> None:
        self.model, self.target, self.draft = model, target, draft
        self._sequences: dict[int, RetokenizedSequence] = {}
        self._unspellable = np.array([i for i in range(model.vocab_size) if not _is_spellable(draft, i)], np.int64)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        text_drafts = {
            i: _TextDraft(self._sequence(context), budget)
            for i, (context, budget) in enumerate(zip(contexts, budgets, strict=True))
            if budget > 0
        }
        if text_drafts:
            self._draft(list(text_drafts.values()))
        return [
            Draft.chain(self._cut(context, text_drafts[i].ids)[: text_drafts[i].budget])
            if i in text_drafts
            else Draft.empty()
            for i, context in enumerate(contexts)
        ]

    def _draft(self, active: list["_TextDraft"]) -> None:
        """Drafts the likeliest ids of each text up to a special token, in one call if the model can."""
        if self.model.drafts_chains and (drawing() is not None or not self.model.adapts_levels):
            requests = [ChainRequest(w.steps, changes=self._bans) for w in active]
            chains = self.model.chains([w.sequence.handle for w in active], requests, self.model.vocab_size)
            for text_draft, chain in zip(active, chains, strict=True):
                special = (at for at, token in enumerate(chain.tokens, 1) if token in self.draft.specials)
                text_draft.ids += chain.tokens[: next(special, None)]
            return
        while active:
            scores = self.model.score([w.sequence.handle for w in active], [Draft.chain(w.ids) for w in active])
            last = torch.stack([score.logits[-1] for score in scores])
            last.index_fill_(-1, torch.from_numpy(self._unspellable), -torch.inf)
            for text_draft, token in zip(active, last.argmax(-1).tolist(), strict=True):
                text_draft.ids.append(token)
            active = [w for w in active if len(w.ids) < w.steps and w.ids[-1] not in self.draft.specials]

    def _bans(self, vocabulary: int) -> Adjustment:
        """Returns the changes of logits: ids without a spelling are banned."""
        change = Adjustment(repetition=1.0, banned_count=len(self._unspellable))
        change.hold(banned=self._unspellable)
        return change

    def observe(self, contexts: Sequence[Context], observations: Sequence[Observation]) -> None:
        for context, observation in zip(contexts, observations, strict=True):
            if context.id in self._sequences:
                self._sequences[context.id].commit(observation.step.tokens)

    def forget(self, context: Context) -> None:
        sequence = self._sequences.pop(context.id, None)
        if sequence is not None:
            self.model.close(sequence.handle)

    def _sequence(self, context: Context) -> RetokenizedSequence:
        if context.id not in self._sequences:
            sequence = RetokenizedSequence(self.model, self.target, self.draft, context.tokens, context.cache_salt)
            self._sequences[context.id] = sequence
        return self._sequences[context.id]

    def _cut(self, context: Context, ids: Sequence[int]) -> list[int]:
        """Returns the target's tokens for the draft's text. Only the last of ``ids`` may be special."""
        if not ids:  # no token was possible
            return []
        tokens = continued(self.target, context.tokens, self.draft.spell(ids))
        special = self.target.special_ids.get(self.draft.specials.get(ids[-1], ""))
        return tokens if special is None else [*tokens, special]


@dataclass(slots=True)
class _TextDraft:
    """One sequence's draft text while it grows, for as many steps as ``budget`` target tokens have taken so far."""

    sequence: RetokenizedSequence
    budget: int
    steps: int = 0
    ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.steps = min(2 * self.budget, ceil(self.budget * self.sequence.script.rate))
        self.sequence.fit(self.steps)


class SharedTokenModel(Model):
    """A model presented with the target's vocabulary: logits are -inf for tokens that are not shared.

    Any drafter can use it: the distribution made of a row is the draft's, restricted to the shared tokens and
    normalized (TLI, 2502.05202, algorithm 4).
    """

    def __init__(self, model: Model, target: Pieces, draft: Pieces, vocab_size: int) -> None:
        self.model, self.target, self.draft = model, target, draft
        self.vocab_size, self.max_length = vocab_size, 1 << 40  # any length: see RetokenizedSequence.fit
        self.num_layers, self.hidden_size = model.num_layers, model.hidden_size
        self.device, self.dtype, self.batch_invariant = model.device, model.dtype, model.batch_invariant
        self._draft_ids = [_draft_id(target, draft, token, model.vocab_size) for token in range(vocab_size)]
        shared = sum(index is not None for index in self._draft_ids)
        if shared == 0:
            raise InvalidRequest(
                "the draft's vocabulary and the target's have no token in common; use algorithm 'slem'"
            )
        nothing = model.vocab_size  # a column of -inf after the draft's own
        columns = [nothing if index is None else index for index in self._draft_ids]
        self._columns = torch.tensor(columns, dtype=torch.int64)
        self._sequences: dict[int, RetokenizedSequence] = {}
        self._opened = 0

    def open(
        self,
        prompt: Sequence[int],
        source: Sequence[int] = (),
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> Handle:
        self._opened += 1
        self._sequences[self._opened] = RetokenizedSequence(self.model, self.target, self.draft, prompt, cache_salt)
        return Handle(self._opened, list(prompt))

    def score(self, handles: Sequence[Handle], drafts: Sequence[Draft], taps: Sequence[int] = ()) -> list[Scores]:
        sequences = [self._sequences[handle.slot] for handle in handles]
        for sequence, draft in zip(sequences, drafts, strict=True):
            if not sequence.handle.nodes:
                sequence.fit(len(draft))
        inner = [sequence.handle for sequence in sequences]
        scores = self.model.score(inner, [self._translate(draft) for draft in drafts], taps)
        return [Scores(self._widen(score.logits), score.taps, score.first) for score in scores]

    def commit(self, handles: Sequence[Handle], tokens: Sequence[Sequence[int]]) -> None:
        for handle, new in zip(handles, tokens, strict=True):
            handle.advance(new)
            self._sequences[handle.slot].commit(new)

    def close(self, handle: Handle) -> None:
        sequence = self._sequences.pop(handle.slot, None)
        if sequence is not None:
            self.model.close(sequence.handle)

    def _translate(self, draft: Draft) -> Draft:
        return Draft(tuple(self._draft_ids[token] or 0 for token in draft.ids), draft.parents)

    def _widen(self, logits: Tensor) -> Tensor:
        """Returns [rows, V of the draft] as [rows, V of the target]."""
        return F.pad(logits, (0, 1), value=-torch.inf).index_select(-1, self._columns)


class Vocabulary(ModelProposer):
    """Both algorithms over one model. Unless configured, a request's law decides between them."""

    name = "vocabulary"

    def __init__(
        self, model: Model, target: Pieces, draft: Pieces, vocab_size: int, config: VocabularyConfig | None = None
    ) -> None:
        self.config, self.model = config or VocabularyConfig(), model
        self.members: dict[str, Proposer] = {}
        if self.config.algorithm != "tli":
            self.members["slem"] = SlemProposer(model, target, draft)
        if self.config.algorithm != "slem":
            self.members["tli"] = DraftModel(SharedTokenModel(model, target, draft, vocab_size), self.config)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        drafts = [Draft.empty()] * len(contexts)
        for name, member in self.members.items():
            indices = [i for i, context in enumerate(contexts) if self._algorithm(context) == name]
            results = member.propose([contexts[i] for i in indices], [budgets[i] for i in indices]) if indices else []
            for i, draft in zip(indices, results, strict=True):
                drafts[i] = draft
        return drafts

    def observe(self, contexts: Sequence[Context], observations: Sequence[Observation]) -> None:
        for member in self.members.values():  # a member ignores contexts that it did not draft for
            member.observe(contexts, observations)

    def forget(self, context: Context) -> None:
        for member in self.members.values():
            member.forget(context)

    def _algorithm(self, context: Context) -> str:
        return self.config.algorithm or ("slem" if context.law.greedy else "tli")


def continued(pieces: Pieces, tokens: Sequence[int], text: bytes) -> list[int]:
    """Returns ids for ``text`` after ``tokens``: tokenized together, unless that changes the ids of ``tokens``."""
    end = len(tokens)
    start = end - sum(1 for _ in takewhile(pieces.piece, reversed(tokens[max(0, end - 8) :])))
    before = list(tokens[start:])
    together = pieces.encode(pieces.spell(before) + text)
    return together[len(before) :] if together[: len(before)] == before else pieces.encode(text)


def _is_spellable(pieces: Pieces, token: int) -> bool:
    return token < len(pieces.spelled) and (bool(pieces.spelled[token]) or token in pieces.specials)


def _draft_id(target: Pieces, draft: Pieces, token: int, vocab_size: int) -> int | None:
    """Returns the draft's id for the bytes of the target's ``token``, or for the special token of the same name."""
    if token >= len(target.spelled):
        return None
    piece = target.spelled[token]
    index = draft.ids.get(piece) if piece else draft.special_ids.get(target.specials.get(token, ""))
    return index if index is not None and index < vocab_size else None


def build(config: VocabularyConfig, build_context: BuildContext) -> Vocabulary:
    if build_context.model is None:
        raise InvalidRequest("method 'vocabulary' needs a draft: pass draft_model= or 'model' in speculative_config")
    if build_context.target.takes_source:
        raise InvalidRequest(
            "method 'vocabulary' retokenizes the text for its draft, which does not see the encoder's source; "
            "take a draft with the target's tokenizer"
        )
    tokenizer = load_tokenizer(resolve(build_context.model))
    model = build_context.load_draft(build_context.model, config.draft_window)
    target, size = Pieces(build_context.tokenizer), build_context.target.vocab_size
    draft = Pieces(tokenizer, model.vocab_size)
    give_back()  # reading took three times the memory
    return Vocabulary(model, target, draft, size, config)


METHOD = Method(VocabularyConfig, build, takes_draft_model=True)
