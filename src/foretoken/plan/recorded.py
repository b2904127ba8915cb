"""A target that says again what it wrote: real proposers and the real engine run over it without a pass.

Where the text is greedy, or the candidates are fixed, this is not a model of a run but the run. A greedy target goes on
with its text whatever is proposed. The walk draws y from p at every node it reaches and goes where y is; the text is
such draws, so the paths that it takes through fixed candidates are taken with the probabilities of any other run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.models.base import Handle, Model, Scores, growing
from foretoken.plan.texts import SampledText, told

_NEVER = -1e30  # finite, so that no parameter of a law makes NaN of it


@dataclass(frozen=True, slots=True)
class Recording:
    """A text, and the target's hidden states at its tokens: by layer, [len(whole) - 1, H]."""

    text: SampledText
    taps: dict[int, Tensor] = field(default_factory=dict)


def record(target: Model, texts: Sequence[SampledText], taps: Sequence[int] = ()) -> list[Recording]:
    """One teacher-forced pass for each text, none where no states are asked for."""
    if not taps:
        return [Recording(text) for text in texts]
    found = []
    for text in texts:
        pieces = [piece.taps for piece in told(target, text, taps)]
        found.append(Recording(text, {layer: torch.cat([piece[layer] for piece in pieces]) for layer in taps}))
    return found


class Recorded(Model):
    """In the place of ``target``. A prompt of several recordings opens each in turn.

    Rows put all mass on the recorded token. Below a guess that the text does not confirm they mean nothing, and so do
    the hidden states there: no verdict reaches them.
    """

    def __init__(self, target: Model, recordings: Sequence[Recording]) -> None:
        self.vocab_size, self.max_length = target.vocab_size, target.max_length
        self.num_layers, self.hidden_size = target.num_layers, target.hidden_size
        self.device, self.dtype = target.device, target.dtype
        self.batch_invariant, self.source_length = True, target.source_length
        self._recordings: dict[tuple[tuple[int, ...], tuple[int, ...]], deque[Recording]] = {}
        for recording in recordings:
            text = recording.text
            self._recordings.setdefault((text.prompt, text.source), deque()).append(recording)
        self._open: dict[int, Recording] = {}
        self._slots = 0

    def open(self, prompt: Sequence[int], source: Sequence[int] = (), cache_salt: str | None = None) -> Handle:
        """Raises InvalidRequest for a prompt that was not recorded."""
        known = self._recordings.get((tuple(prompt), tuple(source)))
        if known is None:
            raise InvalidRequest(f"a prompt of {len(prompt)} tokens was not recorded; replay those that were")
        self._slots += 1
        self._open[self._slots] = known[0]
        known.rotate(-1)
        return Handle(self._slots, list(prompt))

    def score(self, handles: Sequence[Handle], drafts: Sequence[Draft], taps: Sequence[int] = ()) -> list[Scores]:
        return [self._score(handle, draft, taps) for handle, draft in zip(handles, drafts, strict=True)]

    def _score(self, handle: Handle, draft: Draft, taps: Sequence[int]) -> Scores:
        recording = self._open[handle.slot]
        done, first = growing(handle, draft), handle.cached
        nodes = range(-1 if handle.pending else done, len(draft))
        whole, root = recording.text.whole, len(handle.tokens)
        places = self._places(draft, whole, root)
        logits = torch.full((len(nodes), self.vocab_size), _NEVER, device=self.device)
        for row, node in enumerate(nodes):
            at = root if node < 0 else places[node]
            logits[row, whole[at] if at is not None and at < len(whole) else 0] = 0.0
        handle.cached = root
        handle.nodes[:], handle.parents[:] = draft.ids, draft.parents
        computed = [*range(first, root), *(None if (at := places[n]) is None else at - 1 for n in nodes if n >= 0)]
        return Scores(logits, {layer: _rows(recording.taps[layer], computed) for layer in taps}, first)

    def _places(self, draft: Draft, whole: Sequence[int], root: int) -> list[int | None]:
        """For each node the length of the text up to and with it, None off the text."""
        places: list[int | None] = []
        for token, parent in zip(draft.ids, draft.parents, strict=True):
            at = root if parent < 0 else places[parent]
            follows = at is not None and at < len(whole) and whole[at] == token
            places.append(at + 1 if follows and at is not None else None)
        return places

    def commit(self, handles: Sequence[Handle], tokens: Sequence[Sequence[int]]) -> None:
        for handle, new in zip(handles, tokens, strict=True):
            handle.advance(new)

    def close(self, handle: Handle) -> None:
        self._open.pop(handle.slot, None)


def _rows(states: Tensor, places: Sequence[int | None]) -> Tensor:
    """The rows at ``places``, zeros where there is none. [places, H]"""
    known = [at if at is not None and at < len(states) else -1 for at in places]
    rows = states[known]
    rows[[i for i, at in enumerate(known) if at < 0]] = 0
    return rows
