"""Target distributions at the nodes of a draft: the interface ``Law``, and rows that are computed lazily."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.core.errors import InvalidRequest
from foretoken.core.history import History
from foretoken.core.native.sampling import Noise, TokenRow


class Law(Protocol):
    """Sampling parameters as a function: turns logits into probabilities, one row per node, given its history."""

    @property
    def greedy(self) -> bool:
        """Whether every row is one-hot."""
        ...

    @property
    def needs_history(self) -> bool:
        """Whether equal logits may give different probabilities. If not, histories may be omitted."""
        ...

    @property
    def takes_argmax(self) -> bool:
        """Whether ``best`` returns the argmax of unchanged logits, so that a model may compute it in place of them."""
        return False

    def best(self, logits: Tensor, histories: Sequence[History]) -> list[int]:
        """Returns each row's most probable token, the lowest id on ties; -1 where no token is possible."""
        ...

    def probs(self, logits: Tensor, histories: Sequence[History]) -> Tensor:
        """Returns probabilities, float32 [rows, V] (float64 for float64 logits).

        A row is NaN where no token is possible: all are forbidden, or the logits are not finite. Such a node ends the
        request with an error only when it is reached: a draft has no children there, and a verifier gives them
        probability 0.

        Args:
            logits: [rows, V].
            histories: One per row.
        """
        ...

    def chances(self, logits: Tensor, histories: Sequence[History], tokens: Sequence[int]) -> list[float]:
        """Returns the probability of ``tokens[r]`` in row r, equal to that of ``probs``."""
        return at_tokens(self.probs(logits, histories), tokens)

    def choose(self, logits: Tensor, histories: Sequence[History], noise: Noise) -> int:
        """Returns the token that ``noise`` draws from ``probs`` of the only row, without returning the row.

        -1 where no token is possible, or where the row is needed.
        """
        return -1

    def verify_chain(self, logits: Tensor, ids: Sequence[int], q: Tensor, key: int) -> tuple[int, int] | None:
        """Returns the number of accepted tokens and the token behind them; None if the kernels cannot verify them.

        Args:
            logits: [n+1, V].
            ids: The drafted chain [n].
            q: [n, V] or more rows, the distributions that its tokens were sampled from.
            key: Of the verification's ``PrivateStream``.
        """
        return None

    @property
    def changes_follow_tokens(self) -> bool:
        """Whether the kernels know the changes at a draft's nodes from those at its root and the tokens between."""
        return False

    def token_row(self, logits: Tensor, noise: Noise | None) -> TokenRow | None:
        """Returns the request with which the kernels choose a row's token, before ``update_row``; None if they cannot.

        Args:
            logits: [1, V].
            noise: The number of the draw; None for the most probable token.
        """
        return None

    def update_row(self, row: TokenRow, vocabulary: int, history: History) -> None:
        """Sets what depends on the history in a result of ``token_row``, for a law that ``needs_history``.

        With ``row.masks`` the mask and banned tokens of the root are not set.
        """
        return

    def possible_at(self, vocabulary: int, history: History) -> NDArray[np.bool_]:
        """Returns the mask [vocabulary] of the tokens that are possible at a node; all of them here."""
        return np.ones(vocabulary, np.bool_)

    def refusal(self, logits: Tensor, history: History) -> InvalidRequest:
        """Returns the error that ends a request at a node where no token is possible. logits: [V]"""
        return not_finite()

    def with_temperature(self, temperature: float) -> "Law":
        """Returns the same parameters at another temperature, for a draft with a temperature of its own."""
        ...


class NodeDistributions:
    """The target's distributions at the root and at every node of a draft, each computed on first use.

    It is indexed like the tensor [n+1, V]: ``rows[i]`` is one distribution, [V]. The rows below the node where a
    verifier stops are not computed.

    A row where no token is possible is NaN, as in ``Law.probs``. So is a row whose law raises, because the node may be
    rejected, and then the error must have no effect. ``refusal(i)`` is the error for a request that reaches row i.

    Args:
        law: Sampling parameters of the request.
        logits: [n+1, V]. Row 0 at the root, row i + 1 at node i.
        history: Returns the history of a row. Called only if ``law.needs_history``.
        argmax: The argmax of each row in place of its logits, for a law with ``takes_argmax``; -1 where there is none.
    """

    def __init__(
        self, law: Law, logits: Tensor, history: Callable[[int], History], argmax: Sequence[int] | None = None
    ) -> None:
        self.shape = (len(logits if argmax is None else argmax), logits.shape[1])
        self._law, self._logits, self._history = law, logits, history
        self._known: dict[int, Tensor] = {}
        self._argmax, self._best = argmax, argmax
        self._errors: dict[int, Exception] = {}

    def __getitem__(self, row: int) -> Tensor:
        probs = self._known.get(row)
        if probs is None and self._argmax is not None:
            probs = self._known[row] = torch.zeros(self.shape[1])
            token = self._argmax[row]
            probs[token if token >= 0 else slice(None)] = 1.0 if token >= 0 else torch.nan
        if probs is None:
            try:
                probs = self._law.probs(self._logits[row : row + 1], self._histories(row))[0]
            except Exception as error:
                self._errors[row] = error
                probs = torch.full(self.shape[1:], torch.nan)
            self._known[row] = probs
        return probs

    def chances(self, rows: Sequence[int], tokens: Sequence[int]) -> Iterator[float]:
        """Yields the probability of ``tokens[i]`` in row ``rows[i]``, NaN where no token is possible.

        No other entries of the rows are computed. All are computed at once where the law needs no history, else one by
        one as the iterator advances.
        """
        if self._argmax is not None:
            yield from (float(self[row][token]) for row, token in zip(rows, tokens, strict=True))
        elif self._law.needs_history:
            for row, token in zip(rows, tokens, strict=True):
                yield self._chance(row, token)
        elif rows:
            contiguous = list(rows) == list(range(rows[0], rows[0] + len(rows)))
            logits = self._logits[rows[0] : rows[0] + len(rows)] if contiguous else self._logits[list(rows)]
            yield from self._law.chances(logits, (), tokens)

    def certain(self, row: int) -> int | None:
        """Returns the token of a greedy law at ``row``, -1 where none is possible, or None for another law.

        No one-hot row is computed for it.
        """
        if not self._law.greedy:
            return None
        if self._best is not None:
            return self._best[row]
        try:
            if self._logits.is_cpu:
                return self._law.best(self._logits[row : row + 1], self._histories(row))[0]
            # On a device a synchronization costs more than the rows, so all rows take one.
            self._best = self._law.best(self._logits, self._histories(*range(self.shape[0])))
        except Exception as error:
            self._errors[row] = error
            return -1
        return self._best[row]

    def verify_chain(self, ids: Sequence[int], q: Tensor, key: int) -> tuple[int, int] | None:
        """Returns ``Law.verify_chain`` for these rows; None if Python has to verify the chain."""
        if self._known or self._argmax is not None or self._law.needs_history:
            return None
        return self._law.verify_chain(self._logits, ids, q, key)

    def draw(self, row: int, noise: Noise) -> int:
        """Returns ``Law.choose`` at ``row``; -1 where its distribution is known already."""
        if row in self._known:
            return -1
        try:
            return self._law.choose(self._logits[row : row + 1], self._histories(row), noise)
        except Exception:  # raised again by ``__getitem__``
            return -1

    def refusal(self, row: int) -> Exception:
        """Returns the reason that no token is possible at ``row``."""
        if self._argmax is not None:
            return not_finite()
        return self._errors.get(row) or self._law.refusal(self._logits[row], self._history(row))

    def _chance(self, row: int, token: int) -> float:
        try:
            return self._law.chances(self._logits[row : row + 1], self._histories(row), [token])[0]
        except Exception as error:
            self._errors[row] = error
            return math.nan

    def _histories(self, *rows: int) -> Sequence[History]:
        return [self._history(row) for row in rows] if self._law.needs_history else ()


def not_finite() -> InvalidRequest:
    """Returns the error for logits that do not define a distribution."""
    return InvalidRequest(
        "the model computed logits that are NaN or infinite, so no token can be sampled; check the checkpoint's "
        "weights, or load the model in another dtype"
    )


def at_tokens(probs: Tensor, tokens: Sequence[int]) -> list[float]:
    entries: list[float] = probs[range(len(tokens)), list(tokens)].tolist()
    return entries
