"""Interface of a grammar: the tokens that may come next."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from foretoken.core.history import History


class Grammar(Protocol):
    """A set of permitted outputs. One object serves one sequence, whose tokens are only appended to.

    The result depends on the history alone, so target, draft and plain decoding get the same one.
    """

    def allowed(self, history: History) -> Tensor | None:
        """Returns the tokens allowed at a node, bool [V] with at least one True. None allows every token.

        Only generated tokens and the draft path to the node count, not the prompt. Raises InvalidRequest if no token is
        allowed.
        """
        ...
