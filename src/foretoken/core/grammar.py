"""What a text has to be, as a sampling law asks it: which tokens may come next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from foretoken.core.sampling import History


class Grammar(Protocol):
    """A set of texts that may be generated. One object serves one sequence, whose tokens only ever grow.

    The answer depends on nothing but the history, so target, draft and plain decoding get the same one.
    """

    def allowed(self, history: History) -> Tensor | None:
        """bool [V]: the tokens that may come at this node, at least one; None: every token may.

        It is judged by what was generated and the drafted path to the node; the prompt does not count. Raises
        InvalidRequest where no token may come.
        """
        ...
