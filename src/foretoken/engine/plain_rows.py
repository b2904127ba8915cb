"""Tokens of steps without a draft: one call of the kernels for the rows of all sequences.

A sequence's request is prepared in its first step. Later steps set what has changed, because Python code that runs once
in a step is mostly not in the processor's caches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.exactness import Exactness
from foretoken.core.law import PointMass
from foretoken.core.native import sampling as native
from foretoken.core.native.sampling import Noise, TokenRow
from foretoken.core.streams import Purpose, Streams, purpose_key
from foretoken.engine.sequence import Sequence as Running
from foretoken.models.base import Scores
from foretoken.verify import DRAWING, Rule


class PlainRow:
    """The request for the token of a step without a draft.

    Args:
        context: The sequence.
        logprobs: Number of alternatives of the token, or None to compute no log-probabilities.
        logits: The row of the first step, [1, V].

    Attributes:
        row: The request; None where the kernels cannot choose the token.
    """

    def __init__(self, context: Context, logprobs: int | None, logits: Tensor) -> None:
        law, shared = context.law, context.exactness is Exactness.TRAJECTORY
        purpose = Purpose.SHARED if shared else Purpose.VERIFY
        noise = None if law.greedy else Noise(shared, purpose_key(context.streams.seed, purpose))
        self.row = law.token_row(logits, noise)
        self._context, self._vocabulary = context, logits.shape[1]
        self._history = context.history() if law.needs_history else None
        if self.row is not None and logprobs is not None:
            self.row.list_top(min(logprobs, self._vocabulary))

    @classmethod
    def of(cls, sequence: Running, rule: Rule, logits: Tensor) -> PlainRow | None:
        """Returns the request of a sequence; None if its verifier may choose another token than the kernels."""
        context = sequence.context
        if not isinstance(context.streams, Streams) or rule(PointMass(), context.exactness) not in DRAWING:
            return None
        if not native.for_rows(logits):
            return None
        result = cls(context, sequence.options.logprobs, logits)
        return None if result.row is None else result

    def update(self, logits: Tensor) -> TokenRow:
        """Returns the request for a row of logits, which the caller keeps alive."""
        row, context = self.row, self._context
        assert row is not None
        row.logits = logits.data_ptr()
        row.position = len(context.tokens) - context.prompt_length
        if self._history is not None:
            context.law.update_row(row, self._vocabulary, self._history)
        return row


class PlainRows:
    """The requests of all sequences of an engine.

    Args:
        rule: The engine's.
        vocabulary: Number of logits of a row.
    """

    def __init__(self, rule: Rule, vocabulary: int) -> None:
        self._rule, self._vocabulary = rule, vocabulary
        self._rows = dict[int, PlainRow | None]()
        self._kernels: native.Kernels | None = None
        self._threads = torch.get_num_threads()

    def forget(self, identifier: int) -> None:
        """Drops the request of a sequence."""
        self._rows.pop(identifier, None)

    def choose(
        self, sequences: Sequence[Running], drafts: Sequence[Draft], scores: Sequence[Scores]
    ) -> list[TokenRow | None]:
        """Computes the tokens of all sequences without a draft, and their log-probabilities.

        Returns:
            The row of each sequence; None where its verifier has to choose the token.
        """
        rows, requests = list[TokenRow | None](), list[TokenRow]()
        for sequence, draft, score in zip(sequences, drafts, scores, strict=True):
            row = None
            if not draft.parents and score.argmax is None:
                row = self._request(sequence, score.logits)
                if row is not None:
                    requests.append(row)
            rows.append(row)
        if requests:
            self._kernels = self._kernels or native.kernels()
            assert self._kernels is not None
            self._kernels.choose_tokens(requests, self._vocabulary, self._threads)
        return rows

    def _request(self, sequence: Running, logits: Tensor) -> TokenRow | None:
        identifier = sequence.context.id
        try:
            plain = self._rows.get(identifier)
            if plain is None:
                if identifier in self._rows:
                    return None
                plain = self._rows[identifier] = PlainRow.of(sequence, self._rule, logits)
            return None if plain is None else plain.update(logits)
        except Exception:  # raised again by the verifier
            return None
