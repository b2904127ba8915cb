"""Whoever guesses tokens. A proposer sees contexts and hidden states as data and may be wrong, late or absent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretoken.control.passes import Passes
from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.step import Step
from foretoken.models.base import Model, Scores


@dataclass(frozen=True, slots=True)
class Needs:
    """What a proposer wants from the target, as data: hidden-state taps by layer index.

    rounds: it learns from rounds as they really went, from the rows of rejected guesses or from the time they took.
    """

    taps: tuple[int, ...] = ()
    rounds: bool = False

    @staticmethod
    def union(needs: Iterable[Needs]) -> Needs:
        """What all of them together want."""
        all_needs = list(needs)
        taps = tuple(sorted({tap for one in all_needs for tap in one.taps}))
        return Needs(taps, any(one.rounds for one in all_needs))


@dataclass(frozen=True, slots=True)
class Observation:
    """The truth about one sequence after a round: the step, and all that the target said in it."""

    step: Step
    scores: Scores


class Proposer:
    """Base of every proposer; this one proposes nothing, which is plain decoding.

    costless: drafts come from texts and tables, take no time to speak of, and are fixed candidates.
    learns: they depend on earlier requests, so that nobody may make one up.
    """

    name: str = "none"
    needs: Needs = Needs()
    costless: bool = False
    learns: bool = False

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        """At most ``budgets[i]`` nodes for ``contexts[i]``; budgets were decided before anything is drawn."""
        return [Draft.empty() for _ in contexts]

    def join(self, context: Context) -> int:
        """The target begins to read the text, perhaps again. -> of so many of its first tokens no states are needed"""
        return len(context.tokens)

    def read(self, contexts: Sequence[Context], scores: Sequence[Scores]) -> None:
        """A piece of each text was computed that is not its last one: the target's states there."""

    def observe(self, contexts: Sequence[Context], observations: Sequence[Observation]) -> None:
        """Called after every round with what was emitted; contexts already hold the new tokens."""

    def forget(self, context: Context) -> None:
        """The sequence is over or set aside, for whatever reason; calling it for an unknown one does nothing."""

    @property
    def row_bytes(self) -> int:
        """Bytes that its own keys and values of one token take."""
        return 0

    def keep(self, limit: int) -> None:
        """Hold at most ``limit`` bytes of keys and values; see ``Model.keep``."""

    @staticmethod
    def keep_among(members: Iterable[Proposer], limit: int) -> None:
        """``limit`` bytes for several, each by what its tokens take."""
        members = list(members)
        each = max(1, sum(member.row_bytes for member in members))
        for member in members:
            member.keep(limit * member.row_bytes // each)


class Wrapper(Proposer):
    """``inner`` with something added: whatever a subclass does not say goes there."""

    def __init__(self, inner: Proposer) -> None:
        self.inner = inner
        self.name, self.needs, self.costless, self.learns = inner.name, inner.needs, inner.costless, inner.learns

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        return self.inner.propose(contexts, budgets)

    def join(self, context: Context) -> int:
        return self.inner.join(context)

    def read(self, contexts: Sequence[Context], scores: Sequence[Scores]) -> None:
        self.inner.read(contexts, scores)

    def observe(self, contexts: Sequence[Context], observations: Sequence[Observation]) -> None:
        self.inner.observe(contexts, observations)

    def forget(self, context: Context) -> None:
        self.inner.forget(context)

    @property
    def row_bytes(self) -> int:
        return self.inner.row_bytes

    def keep(self, limit: int) -> None:
        self.inner.keep(limit)


@dataclass(frozen=True)
class Workshop:
    """What a method is built with.

    target, tokenizer, path: the model to speed up, its tokenizer and its folder (None for a live module).
    model: what the configuration names under "model": a draft, heads, a datastore.
    load: another model, with the target's dtype, device and backend.
    member: another method from its own configuration, for mixtures.
    passes: what the target's passes take, as everybody in the engine learns of them.
    """

    target: Model
    tokenizer: Any
    path: Path | None
    model: str | Path | None
    load: Callable[[str | Path], Model]
    member: Callable[[Mapping[str, Any]], Proposer]
    passes: Passes = field(default_factory=Passes)


@dataclass(frozen=True)
class Method:
    """A way to propose, as users name it.

    config: a frozen dataclass; its fields are the keys that ``speculative_config`` takes for it.
    build: makes the proposer of a ``config`` and a ``Workshop``.
    tokens: drafted nodes a round unless the user says otherwise.
    """

    config: type[Any]
    build: Callable[[Any, Workshop], Proposer]
    tokens: int = 4
