"""Drafts with another tokenizer than the target's (2502.05202): by text, or by the tokens that both vocabularies have.

Either way the draft reads the text in its own tokens. They are kept up as the text grows, so that its cache holds all
but the last few of them from round to round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.models.base import Handle, Model, Scores
from foretoken.models.checkpoint import load_tokenizer, resolve
from foretoken.propose.base import Method, Observation, Proposer, Workshop
from foretoken.propose.draft_model import DraftModel, DraftModelConfig
from foretoken.propose.pieces import Pieces, Script

_ALGORITHMS = ("slem", "tli")
_MARGIN = 256  # places of the draft's window that are left for what it drafts, a quarter of a small one


@dataclass(frozen=True, slots=True)
class VocabularyConfig(DraftModelConfig):
    """algorithm: "slem" drafts text by argmax and cuts it into the target's tokens; "tli" drafts tokens that both
    vocabularies have, from the draft's law restricted to them. None: slem at temperature 0, else tli.

    The keys of a draft model apply to tli.
    """

    algorithm: str | None = None

    def __post_init__(self) -> None:
        DraftModelConfig.__post_init__(self)
        if self.algorithm not in (None, *_ALGORITHMS):
            raise InvalidRequest(f"algorithm must be one of {', '.join(_ALGORITHMS)}, or None, got {self.algorithm!r}")


class Reader:
    """One context as the draft reads it: its script and the draft's handle, which hold the same ids between rounds."""

    def __init__(
        self, model: Model, target: Pieces, draft: Pieces, tokens: Sequence[int], cache_salt: str | None = None
    ) -> None:
        self.model, self._cache_salt = model, cache_salt
        self.script = Script(target, draft, tokens)
        self.handle = self._open()
        self.fit(0)

    def commit(self, tokens: Sequence[int]) -> None:
        """The target's text went on. What the draft has cached stays so up to where its own tokens change."""
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
        """Make room for ``nodes`` draft nodes: a text that outgrows the draft's window loses its beginning."""
        most = self.model.max_length - max(min(_MARGIN, self.model.max_length // 4), nodes)
        if len(self.script.ids) > most:
            self.script.shorten(max(1, most // 2))
            self._reopen()

    def _reopen(self) -> None:
        self.model.close(self.handle)
        self.handle = self._open()

    def _open(self) -> Handle:
        return self.model.open(self.script.ids, cache_salt=self._cache_salt)


class Retokenised(Proposer):
    """SLEM: the draft's likeliest text, cut into the target's tokens. Fixed candidates, verified by the walk."""

    name = "slem"

    def __init__(self, model: Model, target: Pieces, draft: Pieces) -> None:
        self.model, self.target, self.draft = model, target, draft
        self._readers: dict[int, Reader] = {}
        silent = [i for i in range(model.vocab_size) if not _means(draft, i)]
        self._silent = torch.tensor(silent, dtype=torch.int64, device=model.device)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        writers = {
            i: _Writer(self._reader(context), budget)
            for i, (context, budget) in enumerate(zip(contexts, budgets, strict=True))
            if budget > 0
        }
        active = list(writers.values())
        while active:
            scores = self.model.score([w.reader.handle for w in active], [Draft.chain(w.ids) for w in active])
            last = torch.stack([score.logits[-1] for score in scores]).index_fill(-1, self._silent, -torch.inf)
            for writer, token in zip(active, last.argmax(-1).tolist(), strict=True):
                writer.ids.append(token)
            active = [w for w in active if len(w.ids) < w.steps and w.ids[-1] not in self.draft.specials]
        return [
            Draft.chain(self._cut(context, writers[i].ids)[: writers[i].budget]) if i in writers else Draft.empty()
            for i, context in enumerate(contexts)
        ]

    def observe(self, contexts: Sequence[Context], observations: Sequence[Observation]) -> None:
        for context, observation in zip(contexts, observations, strict=True):
            if context.id in self._readers:
                self._readers[context.id].commit(observation.step.tokens)

    def forget(self, context: Context) -> None:
        reader = self._readers.pop(context.id, None)
        if reader is not None:
            self.model.close(reader.handle)

    def _reader(self, context: Context) -> Reader:
        if context.id not in self._readers:
            reader = Reader(self.model, self.target, self.draft, context.tokens, context.cache_salt)
            self._readers[context.id] = reader
        return self._readers[context.id]

    def _cut(self, context: Context, ids: Sequence[int]) -> list[int]:
        """The target's tokens for what the draft wrote; only the last of ``ids`` may be special."""
        tokens = continued(self.target, context.tokens, self.draft.spell(ids))
        twin = self.target.special_ids.get(self.draft.specials.get(ids[-1], ""))
        return tokens if twin is None else [*tokens, twin]


@dataclass(slots=True)
class _Writer:
    """One sequence's draft while its text grows: as many steps as ``budget`` tokens of the target have had so far."""

    reader: Reader
    budget: int
    steps: int = 0
    ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.steps = min(2 * self.budget, ceil(self.budget * self.reader.script.rate))
        self.reader.fit(self.steps)


class Translated(Model):
    """A model as one of another vocabulary: its ids are the target's, and where a spelling is not shared, -inf.

    So whoever drafts with a model drafts with this one: the law made of a row is the draft's, restricted to the tokens
    that both have and normalised (TLI, 2502.05202, algorithm 4).
    """

    def __init__(self, model: Model, target: Pieces, draft: Pieces, vocab_size: int) -> None:
        self.model, self.target, self.draft = model, target, draft
        self.vocab_size, self.max_length = vocab_size, 1 << 40  # whatever the text's length: see Reader.fit
        self.num_layers, self.hidden_size = model.num_layers, model.hidden_size
        self.device, self.dtype, self.rows_independent = model.device, model.dtype, model.rows_independent
        self._twins = [_twin(target, draft, token, model.vocab_size) for token in range(vocab_size)]
        shared = sum(twin is not None for twin in self._twins)
        if shared == 0:
            raise InvalidRequest(
                "the draft's vocabulary and the target's have no token in common; use algorithm 'slem'"
            )
        nothing = model.vocab_size  # the column of -inf behind the draft's own
        columns = [nothing if twin is None else twin for twin in self._twins]
        self._columns = torch.tensor(columns, dtype=torch.int64, device=model.device)
        self._readers: dict[int, Reader] = {}
        self._opened = 0

    def open(self, prompt: Sequence[int], source: Sequence[int] = (), cache_salt: str | None = None) -> Handle:
        self._opened += 1
        self._readers[self._opened] = Reader(self.model, self.target, self.draft, prompt, cache_salt)
        return Handle(self._opened, list(prompt))

    def score(self, handles: Sequence[Handle], drafts: Sequence[Draft], taps: Sequence[int] = ()) -> list[Scores]:
        readers = [self._readers[handle.slot] for handle in handles]
        for reader, draft in zip(readers, drafts, strict=True):
            if not reader.handle.nodes:
                reader.fit(len(draft))
        inner = [reader.handle for reader in readers]
        scores = self.model.score(inner, [self._translate(draft) for draft in drafts], taps)
        return [Scores(self._widen(score.logits), score.taps, score.first) for score in scores]

    def commit(self, handles: Sequence[Handle], tokens: Sequence[Sequence[int]]) -> None:
        for handle, new in zip(handles, tokens, strict=True):
            handle.advance(new)
            self._readers[handle.slot].commit(new)

    def close(self, handle: Handle) -> None:
        reader = self._readers.pop(handle.slot, None)
        if reader is not None:
            self.model.close(reader.handle)

    def _translate(self, draft: Draft) -> Draft:
        return Draft(torch.tensor([self._twins[token] or 0 for token in draft.ids], dtype=torch.int64), draft.parents)

    def _widen(self, logits: Tensor) -> Tensor:
        """[rows, V of the draft] to [rows, V of the target]"""
        return F.pad(logits, (0, 1), value=-torch.inf).index_select(-1, self._columns)


class Vocabulary(Proposer):
    """Both algorithms over one model; which of them drafts for a request follows from its law, unless it was chosen."""

    name = "vocabulary"

    def __init__(
        self, model: Model, target: Pieces, draft: Pieces, vocab_size: int, config: VocabularyConfig | None = None
    ) -> None:
        self.config = config or VocabularyConfig()
        self.members: dict[str, Proposer] = {}
        if self.config.algorithm != "tli":
            self.members["slem"] = Retokenised(model, target, draft)
        if self.config.algorithm != "slem":
            self.members["tli"] = DraftModel(Translated(model, target, draft, vocab_size), self.config)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        drafts = [Draft.empty()] * len(contexts)
        for name, member in self.members.items():
            own = [i for i, context in enumerate(contexts) if self._algorithm(context) == name]
            made = member.propose([contexts[i] for i in own], [budgets[i] for i in own]) if own else []
            for i, draft in zip(own, made, strict=True):
                drafts[i] = draft
        return drafts

    def observe(self, contexts: Sequence[Context], observations: Sequence[Observation]) -> None:
        for member in self.members.values():  # who does not know a context lets it pass
            member.observe(contexts, observations)

    def forget(self, context: Context) -> None:
        for member in self.members.values():
            member.forget(context)

    def _algorithm(self, context: Context) -> str:
        return self.config.algorithm or ("slem" if context.law.greedy else "tli")


def continued(pieces: Pieces, tokens: Sequence[int], text: bytes) -> list[int]:
    """Ids for ``text`` after ``tokens``: as the tokenizer cuts both together, if it leaves those before as they are."""
    end = len(tokens)
    start = end - sum(1 for _ in takewhile(pieces.piece, reversed(tokens[max(0, end - 8) :])))
    before = list(tokens[start:])
    together = pieces.encode(pieces.spell(before) + text)
    return together[len(before) :] if together[: len(before)] == before else pieces.encode(text)


def _means(pieces: Pieces, token: int) -> bool:
    return token < len(pieces.spelled) and (bool(pieces.spelled[token]) or token in pieces.specials)


def _twin(target: Pieces, draft: Pieces, token: int, vocab_size: int) -> int | None:
    """The draft's id for what the target's ``token`` spells, or for the special token of the same name."""
    if token >= len(target.spelled):
        return None
    piece = target.spelled[token]
    twin = draft.ids.get(piece) if piece else draft.special_ids.get(target.specials.get(token, ""))
    return twin if twin is not None and twin < vocab_size else None


def build(config: VocabularyConfig, workshop: Workshop) -> Vocabulary:
    """The draft that "model" names, with the tokenizer beside it."""
    if workshop.model is None:
        raise InvalidRequest("method 'vocabulary' needs a draft: pass draft_model= or 'model' in speculative_config")
    if workshop.target.takes_source:
        raise InvalidRequest(
            "method 'vocabulary' spells the whole text for its draft, which does not see what an encoder reads; "
            "take a draft with the target's tokenizer"
        )
    draft = Pieces(load_tokenizer(resolve(workshop.model)))
    target, size = Pieces(workshop.tokenizer), workshop.target.vocab_size
    return Vocabulary(workshop.load(workshop.model), target, draft, size, config)


METHOD = Method(VocabularyConfig, build)
