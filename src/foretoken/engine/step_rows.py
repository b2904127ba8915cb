"""Tokens of steps with a draft of fixed candidates or none: one call of the kernels for all sequences.

A sequence's request is prepared in its first step. Later steps set what has changed, because Python code that runs once
in a step is mostly not in the processor's caches.
"""

from array import array
from collections.abc import Callable, Sequence
from ctypes import addressof, c_void_p

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.core.context import Context
from foretoken.core.draft import (
    Draft,
    LawElsewhere,
    PointMass,
    SampledElsewhere,
    TopPlusSampledElsewhere,
    WithoutReplacementElsewhere,
)
from foretoken.core.native import sampling as native
from foretoken.core.native.sampling import DraftNodes, Noise, TokenRow
from foretoken.core.streams import Purpose, Streams, purpose_key
from foretoken.core.verdict import Exactness
from foretoken.engine.sequence import ComputedTokens
from foretoken.engine.sequence import Sequence as Running
from foretoken.models.base import Scores, no_logits
from foretoken.models.device_drafts import UnreadDraft
from foretoken.models.device_logits import DeviceRows, TokenChooser
from foretoken.verify import DRAWING, VERIFIERS, Rule

# Laws of drafts, and verifiers that devices have for them.
ON_DEVICES: tuple[tuple[type[LawElsewhere], str], ...] = (
    (SampledElsewhere, "block"),
    (SampledElsewhere, "token"),
    (WithoutReplacementElsewhere, "traversal"),
    (WithoutReplacementElsewhere, "recursive"),
    (TopPlusSampledElsewhere, "greedy-multi"),
)


class SequenceRow:
    """The request for the tokens of one sequence's steps.

    Args:
        logprobs: Number of alternatives of the token, or None to compute no log-probabilities.
        vocabulary: Number of logits of a row.

    Attributes:
        row: The request; None if the kernels cannot choose the token.
        on_device: Laws of sampled drafts that a device may verify.
    """

    def __init__(self, context: Context, logprobs: int | None, vocabulary: int) -> None:
        law, shared = context.law, context.exactness is Exactness.TRAJECTORY
        self._follows = law.changes_follow_tokens
        purpose = Purpose.SHARED if shared else Purpose.VERIFY
        noise = None if law.greedy else Noise(shared, purpose_key(context.streams.seed, purpose))
        self.row = law.token_row(no_logits(vocabulary), noise)
        self._context, self._vocabulary = context, vocabulary
        self._history = context.history() if law.needs_history else None
        self._nodes, self._levels, self._path = DraftNodes(), list[TokenRow](), array("i")
        self._held: tuple[object, ...] = ()  # arrays that the nodes point to
        self.on_device = set[type[LawElsewhere]]()
        if self.row is not None:
            self.row.tensor = None  # each step has its own logits
            if logprobs is not None:
                self.row.list_top(min(logprobs, self._vocabulary))

    @classmethod
    def of(cls, sequence: Running, rule: Rule, scores: Scores) -> "SequenceRow | None":
        """Returns the request of a sequence; None if its verifier may choose another token than the kernels."""
        context = sequence.context
        if not isinstance(context.streams, Streams) or rule(PointMass(), context.exactness) not in DRAWING:
            return None
        if isinstance(scores.rows, Tensor) and not native.for_rows(scores.rows):
            return None
        result = cls(context, sequence.options.logprobs, scores.vocab)
        if result.row is None:
            return None
        for law, name in () if sequence.options.explain else ON_DEVICES:
            if rule(law(lambda: no_logits(1)), context.exactness) is VERIFIERS[name]:
                result.on_device.add(law)
                result.row.tokenwise |= name in ("token", "recursive")
        return result

    def update(self, draft: Draft, scores: Scores) -> TokenRow | None:
        """Returns the request for a draft; None if its verifier has to choose the tokens.

        scores: The target's, which the caller keeps alive.
        """
        row, context = self.row, self._context
        assert row is not None
        row.below = None
        row.logits, count, stride = scores.memory
        row.unread = draft if isinstance(draft, UnreadDraft) and self._stays(draft, scores) else None
        if row.unread is None:
            draft = draft.read()
        if draft.limit:
            if row.unread is None and type(draft.law) is not PointMass:
                return None
            if count < draft.limit + 1 or not (self._follows or scores.chooser):
                return None
            row.below = self._below(draft, stride)
        row.position = len(context.tokens) - context.prompt_length
        row.masks = self._masks(draft) if scores.chooser and not self._follows else ()
        if self._history is not None:
            context.law.update_row(row, self._vocabulary, self._history)
        return row

    def _masks(self, draft: Draft) -> list[NDArray[np.bool_]]:
        """Returns the masks of possible tokens at the root and at the nodes of a draft, for a device."""
        paths: list[list[int]] = [[]]
        for token, parent in zip(*draft.peek(), strict=True):
            paths.append([*paths[parent + 1], token])
        law, history = self._context.law, self._context.history
        return [law.possible_at(self._vocabulary, history(path)) for path in paths]

    def _stays(self, draft: UnreadDraft, scores: Scores) -> bool:
        """Returns whether tokens are chosen on the device before the host reads the draft."""
        assert self.row is not None
        if not draft.unread or not isinstance(scores.rows, DeviceRows):
            return False
        if draft.source.law is not None and draft.source.law not in self.on_device:
            return False
        self.row.node = scores.rows.node_address
        return scores.chooser is not None and self.row.node > 0

    def _below(self, draft: Draft, stride: int) -> int:
        """Returns the address of the nodes of a draft. stride: number of elements from one row to the next."""
        assert self.row is not None
        unread, count, nodes = self.row.unread is not None, draft.limit, self._nodes
        deepest = (draft.tree_depth or count) if unread else max(draft.depths)
        while len(self._levels) < deepest:
            self._levels.append(self.row.at_node())
        ids = array("q", bytes(8 * count) if unread else draft.ids)
        parents = array("i", bytes(4 * count) if unread else draft.parents)
        self._path = array("i", bytes(4 * deepest))
        pointers = (c_void_p * deepest)(*map(addressof, self._levels[:deepest]))
        self._held = ids, parents, pointers
        nodes.ids, nodes.parents = ids.buffer_info()[0], parents.buffer_info()[0]
        nodes.path = self._path.buffer_info()[0]
        nodes.rows, nodes.stride = addressof(pointers), stride
        nodes.nodes, nodes.deepest = count, deepest
        return addressof(nodes)

    def result(self) -> ComputedTokens | None:
        """Returns the tokens that the kernels have computed; None if the last one is not possible."""
        row = self.row
        assert row is not None
        if not row.below:
            return None if row.token < 0 else ComputedTokens((), (row,))
        count = self._nodes.path_count
        rows = (row, *self._levels[:count])
        return None if rows[-1].token < 0 else ComputedTokens(tuple(self._path[:count]), rows)


class StepRows:
    """The requests of all sequences of an engine. rule: The engine's."""

    def __init__(self, rule: Rule) -> None:
        self._rule, self._vocabulary = rule, 0
        self._rows = dict[int, SequenceRow | None]()
        self._kernels: native.Kernels | None = None
        self._threads = torch.get_num_threads()

    def forget(self, identifier: int) -> None:
        self._rows.pop(identifier, None)

    def choose(
        self, sequences: Sequence[Running], drafts: Sequence[Draft], scores: Sequence[Scores]
    ) -> Callable[[], list[ComputedTokens | None]]:
        """Computes the tokens of all sequences whose draft has fixed candidates or none, and their log-probabilities.

        Returns a function that waits for the tokens, and returns those of each sequence; None if its verifier has to
        choose them.
        """
        requests, chosen = dict[TokenChooser, list[TokenRow]](), list[SequenceRow | None]()
        for sequence, draft, score in zip(sequences, drafts, scores, strict=True):
            held = None
            if score.has_logits and (row := self._request(sequence, draft, score)) is not None:
                held = self._rows[sequence.context.id]
                requests.setdefault(score.chooser or self._host(), []).append(row)
            chosen.append(held)
        waits = [chooser.choose_tokens(rows, self._vocabulary, self._threads) for chooser, rows in requests.items()]

        def tokens() -> list[ComputedTokens | None]:
            for wait in filter(None, waits):
                wait()
            return [None if row is None else row.result() for row in chosen]

        return tokens

    def _host(self) -> TokenChooser:
        """Returns the compiled kernels, without which there is no request."""
        self._kernels = self._kernels or native.kernels()
        assert self._kernels is not None
        return self._kernels

    def _request(self, sequence: Running, draft: Draft, scores: Scores) -> TokenRow | None:
        identifier = sequence.context.id
        try:
            row = self._rows.get(identifier)
            if row is None:
                if identifier in self._rows:
                    return None
                row = self._rows[identifier] = SequenceRow.of(sequence, self._rule, scores)
                self._vocabulary = scores.vocab
            return None if row is None else row.update(draft, scores)
        except Exception:  # raised again by the verifier
            return None
