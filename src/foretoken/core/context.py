"""One sequence as proposers and laws see it: what is committed, how to judge, which random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.core.draft import Draft
from foretoken.core.exactness import Exactness as Exactness
from foretoken.core.sampling import History, Law
from foretoken.core.streams import Streams


@dataclass(eq=False, slots=True)
class Context:
    """The live record of one sequence; only the engine appends to ``tokens``.

    depth: drafted tokens a round that the request asked for; None leaves it to the controller.
    method: who is to draft, of several that are loaded; None leaves it to the engine.
    prediction: the tokens of a text that the client expects to come out, or something like it.
    source: what an encoder-decoder's encoder reads; ``tokens`` are then the decoder's alone.
    cache_salt: the scope of everything that is kept across requests. Requests share KV blocks and proposers' stores
    only with requests of the same salt; None is a scope like any other.
    """

    id: int
    tokens: list[int]
    prompt_length: int
    law: Law
    streams: Streams
    exactness: Exactness = Exactness.DISTRIBUTION
    depth: int | None = None
    prediction: tuple[int, ...] = ()
    method: str | None = None
    source: tuple[int, ...] = ()
    cache_salt: str | None = None

    @property
    def generated(self) -> int:
        """Tokens generated so far: the position of the next one in its streams."""
        return len(self.tokens) - self.prompt_length

    def history(self, drafted: Sequence[int] = ()) -> History:
        """The history of the node below which ``drafted`` tokens hang."""
        return History(self.tokens, self.prompt_length, tuple(drafted))

    def histories(self, draft: Draft) -> list[History]:
        """One history per row of a pass over ``draft``: the root's, then each node's own."""
        return [self.history_at(draft, row) for row in range(len(draft) + 1)]

    def history_at(self, draft: Draft, row: int) -> History:
        """The history of one row: 0 is the root's, row i + 1 node i's."""
        return self.history([draft.ids[i] for i in draft.path(row - 1)])
