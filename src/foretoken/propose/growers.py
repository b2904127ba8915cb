"""One sequence's draft while a model grows it: a chain, a tree of fixed candidates, or a drawn tree.

All are driven alike: until ``done`` the model scores ``growing()`` and ``extend`` gets the logits of what is new in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.law import PointMass, ProposalLaw, Sampled
from foretoken.core.sampling import Law, Rows
from foretoken.core.streams import Stream
from foretoken.models.base import Handle
from foretoken.propose.drawn_tree import DrawnTree
from foretoken.propose.tree import Growth, Tree, likeliest, racing


class Grower(Protocol):
    """See the module. ``handle`` is the sequence's place in the model that drafts."""

    handle: Handle

    @property
    def done(self) -> bool:
        """Nothing is left to score."""
        ...

    def growing(self) -> Draft:
        """What the model is to score."""
        ...

    def extend(self, logits: Tensor) -> None:
        """logits: [rows, V] of the nodes of ``growing()`` that were not scored before, the root's at first."""
        ...

    def draft(self) -> Draft:
        """What has grown."""
        ...


@dataclass(slots=True)
class Chain:
    """Drawn tokens, each the argmax of a greedy law; drawn: they are draws whose law the verifier needs."""

    context: Context
    handle: Handle
    budget: int
    law: Law
    stream: Stream
    drawn: bool
    tokens: list[int] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return len(self.tokens) >= self.budget

    def growing(self) -> Draft:
        return Draft.chain(self.tokens)

    def extend(self, logits: Tensor) -> None:
        rows = Rows(self.law, logits, lambda row: self.context.history(self.tokens))
        certain = rows.certain(0)
        if certain is not None:
            self.tokens.append(certain)
            return
        self.tokens.append(self.stream.categorical(rows[0], len(self.tokens)))
        if self.drawn:
            self.rows.append(rows[0])

    def draft(self) -> Draft:
        law: ProposalLaw = Sampled(torch.stack(self.rows)) if self.rows else PointMass()
        return Draft.chain(self.tokens, law)


@dataclass(slots=True)
class Fixed:
    """The likeliest candidates, re-ranked over all levels; noise: the shared one that the target's draws will use."""

    context: Context
    handle: Handle
    budget: int
    steps: int
    width: int
    law: Law
    noise: Stream | None
    tree: Tree = field(default_factory=Tree)
    level: int = 0

    @property
    def done(self) -> bool:
        return self.level >= self.steps or not self.tree.frontier

    def growing(self) -> Draft:
        return self.tree.growing()

    def extend(self, logits: Tensor) -> None:
        probs = _laws(self.law, logits, self.context, self.tree)
        found = racing(probs, self.width, self.noise, self.level) if self.noise else likeliest(probs, self.width)
        self.tree.expand(found, self.width, self.budget)
        self.level += 1

    def draft(self) -> Draft:
        return self.tree.pruned(self.budget)


@dataclass(slots=True)
class Drawn:
    """A tree whose nodes are drawn; its law travels with it."""

    context: Context
    handle: Handle
    law: Law
    tree: DrawnTree

    @property
    def done(self) -> bool:
        return not self.tree.frontier

    def growing(self) -> Draft:
        return self.tree.growing()

    def extend(self, logits: Tensor) -> None:
        self.tree.expand(_laws(self.law, logits, self.context, self.tree))

    def draft(self) -> Draft:
        return self.tree.finished()


def _laws(law: Law, logits: Tensor, context: Context, tree: Growth) -> Tensor:
    """[frontier, V]: the law at each node of the frontier, judged with its own history."""
    histories = [context.history(tree.path(node)) for node in tree.frontier] if law.needs_history else ()
    return law.probs(logits, histories)
