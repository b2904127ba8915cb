"""A tiny exact model for tests and teaching: its distribution after any history takes a few lines to compute."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.core.streams import exponentials, random_seed_from
from foretoken.models.base import Handle, Model, Scores, growing

_LAYERS = 2
_WIDTH = 8


class ToyModel(Model):
    """A Markov model whose logits are hashed from the seed and the last tokens.

    Logits are float64 and the same in every process. The cache bookkeeping follows the contract as a real model's does,
    so a loop that works with this model makes the same calls to any other.

    Args:
        vocab_size: number of tokens.
        order: number of tokens that the next one depends on.
        seed: seed of the logits.
        sharpness: scales the logits; 0 gives the uniform distribution, 4 a nearly deterministic one.
        max_length: maximum length of a sequence in tokens.
    """

    def __init__(
        self, vocab_size: int = 8, order: int = 2, seed: int = 0, sharpness: float = 1.0, max_length: int = 4096
    ) -> None:
        if vocab_size < 1 or order < 0:
            raise InvalidRequest(f"a toy needs vocab_size >= 1 and order >= 0, got {vocab_size} and {order}")
        self.vocab_size, self.order, self.seed, self.sharpness = vocab_size, order, seed, sharpness
        self.max_length = max_length
        self.num_layers, self.hidden_size = _LAYERS, _WIDTH
        self.device, self.dtype = torch.device("cpu"), torch.float64
        self.batch_invariant = self.chunk_invariant = True
        self._mixture: tuple[ToyModel, ToyModel, float] | None = None
        self._rows: dict[tuple[int, ...], Tensor] = {}
        self._open: set[int] = set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def perturbed(self, strength: float, seed: int = 1) -> Self:
        """Returns a draft for this model: its logits lie ``strength`` of the way to an unrelated toy's."""
        if not 0.0 <= strength <= 1.0:
            raise InvalidRequest(
                f"strength must be from 0 (the same distribution) to 1 (an unrelated one), got {strength!r}"
            )
        neighbour = type(self)(self.vocab_size, self.order, self.seed, self.sharpness, self.max_length)
        other_seed = random_seed_from(self.seed, seed)
        other = type(self)(self.vocab_size, self.order, other_seed, self.sharpness, self.max_length)
        neighbour._mixture = (self, other, strength)
        return neighbour

    def logits(self, history: Sequence[int]) -> Tensor:
        """Returns the logits after ``history``, float64 [V]; the reference for ``score``."""
        tail = tuple(history[max(0, len(history) - self.order) :]) if self.order else ()
        row = self._rows.get(tail)
        if row is None:
            row = self._rows[tail] = self._compute(tail)
        return row

    def _compute(self, tail: tuple[int, ...]) -> Tensor:
        if self._mixture is not None:
            near, far, weight = self._mixture
            return (1 - weight) * near.logits(tail) + weight * far.logits(tail)
        noise = exponentials(random_seed_from(self.seed, len(tail), *tail), self.vocab_size)
        return -self.sharpness * noise.log()

    def probs(self, history: Sequence[int]) -> Tensor:
        """Returns the distribution of the next token at temperature 1, float64 [V]."""
        return self.logits(history).softmax(-1)

    def hidden(self, history: Sequence[int], layer: int) -> Tensor:
        """Returns a stand-in for ``hidden_states[layer]`` at the last token, float64 [hidden_size]."""
        tail = tuple(history[-max(1, self.order) :])
        return exponentials(random_seed_from(self.seed, -1 - layer, *tail), self.hidden_size).log()

    # the contract

    def open(
        self,
        prompt: Sequence[int],
        source: Sequence[int] = (),
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> Handle:
        if not prompt:
            raise InvalidRequest("the prompt is empty; at least one token is needed to continue from")
        slot = next(i for i in range(len(self._open) + 1) if i not in self._open)
        self._open.add(slot)
        return Handle(slot, list(prompt))

    def score(self, handles: Sequence[Handle], drafts: Sequence[Draft], taps: Sequence[int] = ()) -> list[Scores]:
        return [self._score(handle, draft, taps) for handle, draft in zip(handles, drafts, strict=True)]

    def _score(self, handle: Handle, draft: Draft, taps: Sequence[int]) -> Scores:
        self._check(handle)
        done = growing(handle, draft)
        first = handle.cached
        nodes = range(-1 if handle.pending else done, len(draft))
        reach = len(handle.tokens) + len(draft)
        if reach > self.max_length:
            raise InvalidRequest(f"a sequence reaches {reach} tokens, beyond this model's {self.max_length}")
        histories = [[*handle.tokens, *(draft.ids[i] for i in draft.path(node))] for node in nodes]
        handle.cached = len(handle.tokens)
        handle.nodes[:], handle.parents[:] = draft.ids, draft.parents
        computed = [handle.tokens[: at + 1] for at in range(first, len(handle.tokens) - 1)] + histories
        tapped = {layer: torch.stack([self.hidden(h, layer) for h in computed]) for layer in taps}
        return Scores(torch.stack([self.logits(h) for h in histories]), tapped, first, handle.slot)

    def commit(self, handles: Sequence[Handle], tokens: Sequence[Sequence[int]]) -> None:
        for handle, new in zip(handles, tokens, strict=True):
            self._check(handle)
            handle.advance(new)

    def close(self, handle: Handle) -> None:
        self._open.discard(handle.slot)
        handle.slot = -1

    def _check(self, handle: Handle) -> None:
        if handle.slot not in self._open:
            raise ValueError("this sequence is closed")
