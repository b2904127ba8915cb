"""Whoever guesses tokens. A proposer sees contexts and hidden states as data and may be wrong, late or absent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

    def observe(self, contexts: Sequence[Context], observations: Sequence[Observation]) -> None:
        """Called after every round with what was emitted; contexts already hold the new tokens."""

    def forget(self, context: Context) -> None:
        """The sequence is over, for whatever reason; calling it for an unknown one does nothing."""


@dataclass(frozen=True)
class Workshop:
    """What a method is built with.

    target, tokenizer, path: the model to speed up, its tokenizer and its folder (None for a live module).
    model: what the configuration names under "model": a draft, heads, a datastore.
    load: another model, with the target's dtype, device and backend.
    member: another method from its own configuration, for mixtures.
    """

    target: Model
    tokenizer: Any
    path: Path | None
    model: str | Path | None
    load: Callable[[str | Path], Model]
    member: Callable[[Mapping[str, Any]], Proposer]


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
