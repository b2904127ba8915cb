"""From logits to the law that is sampled. Every parameter lives here and nowhere else.

The order is vLLM's: bad words and min_tokens, logit bias, repetition, frequency and presence penalties,
temperature, min-p, top-k, top-p. Temperature 0 is the one-hot law of the argmax, the lowest id on ties.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from foretoken.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class History:
    """All tokens before one tree node: the committed ones and the drafted path to it."""

    tokens: Sequence[int]  # prompt and output; grows as the sequence does
    prompt_length: int
    path: tuple[int, ...] = ()

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length + len(self.path)

    def tail(self, count: int) -> tuple[int, ...]:
        """The last ``count`` tokens."""
        if count <= len(self.path):
            return self.path[len(self.path) - count :]
        return (*self.tokens[len(self.tokens) - (count - len(self.path)) :], *self.path)


class Law(Protocol):
    """Logits and the history of each row's node to one probability row each."""

    @property
    def greedy(self) -> bool:
        """Whether every row is one-hot."""
        ...

    def probs(self, logits: Tensor, histories: Sequence[History]) -> Tensor:
        """[rows, V] logits to [rows, V] probabilities, float32 (float64 stays float64)."""
        ...

    def with_temperature(self, temperature: float) -> Law:
        """The same law at another temperature: a draft may run hotter or colder than its target."""
        ...


@dataclass(frozen=True)
class SamplingLaw:
    """The usual sampling parameters as one pure function.

    Penalties follow vLLM: presence and frequency count generated tokens, repetition the prompt's too.
    ``bad_words`` are token sequences whose last token is forbidden when the ones before it are the tail of
    the history. ``end_ids`` cannot come before ``min_tokens`` have been generated.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    end_ids: tuple[int, ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def with_temperature(self, temperature: float) -> SamplingLaw:
        return replace(self, temperature=temperature)

    @property
    def needs_history(self) -> bool:
        """Whether rows with the same logits may have different laws."""
        return self.penalises or bool(self.bad_words) or (self.min_tokens > 0 and bool(self.end_ids))

    @property
    def penalises(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    def probs(self, logits: Tensor, histories: Sequence[History]) -> Tensor:
        """[rows, V] logits to probabilities; row r is judged with ``histories[r]``."""
        if logits.dtype != torch.float64:
            logits = logits.float()
        if self.needs_history or self.logit_bias:
            logits = self._adjust(logits.clone(), histories)
        if self.greedy:
            return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        # Relative to the top, so that no temperature, however small, overflows.
        logits = (logits - logits.amax(-1, keepdim=True)) / self.temperature
        if self.min_p > 0.0:
            floor = logits.amax(-1, keepdim=True) + torch.tensor(self.min_p, dtype=logits.dtype).log()
            logits = logits.masked_fill(logits < floor, -torch.inf)
        if 0 < self.top_k < logits.shape[-1]:
            kth = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < kth, -torch.inf)
        if self.top_p < 1.0:
            logits = _nucleus(logits, self.top_p)
        return logits.softmax(-1)

    def _adjust(self, logits: Tensor, histories: Sequence[History]) -> Tensor:
        """Everything that speaks of single tokens, row by row, in place."""
        if self.needs_history and len(histories) != logits.shape[0]:
            raise ValueError(f"{len(histories)} histories for {logits.shape[0]} rows")
        for row in range(logits.shape[0]) if self.needs_history else ():
            history = histories[row]
            banned = [w[-1] for w in self.bad_words if history.tail(len(w) - 1) == w[:-1]]
            if history.generated < self.min_tokens:
                banned += self.end_ids
            logits[row, banned] = -torch.inf
            if banned and not bool((logits[row] > -torch.inf).any()):
                raise InvalidRequest(
                    "bad_words and min_tokens together forbid every token at one place; allow at least one"
                )
        if self.logit_bias:
            ids, values = zip(*self.logit_bias, strict=True)
            logits[:, list(ids)] += torch.tensor(values, dtype=logits.dtype, device=logits.device)
        if self.penalises:
            self._penalise(logits, histories)
        return logits

    def _penalise(self, logits: Tensor, histories: Sequence[History]) -> None:
        counts: Counter[int] = Counter()
        seen: set[int] = set()
        base: History | None = None
        for row, history in enumerate(histories):
            if base is None or base.tokens is not history.tokens:
                base = history
                counts = Counter(history.tokens[history.prompt_length :])
                seen = set(history.tokens) if self.repetition_penalty != 1.0 else set()
            own = counts + Counter(history.path)
            if self.repetition_penalty != 1.0:
                ids = sorted(seen.union(history.path))
                values = logits[row, ids]
                up, down = values * self.repetition_penalty, values / self.repetition_penalty
                logits[row, ids] = torch.where(values > 0, down, up)
            if own:
                ids, times = list(own), torch.tensor(list(own.values()), dtype=logits.dtype, device=logits.device)
                logits[row, ids] -= self.frequency_penalty * times + self.presence_penalty


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of most probable tokens whose mass reaches ``top_p``, at least one."""
    ordered, ids = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    dropped = torch.empty_like(before, dtype=torch.bool).scatter_(-1, ids, before >= top_p)
    return logits.masked_fill(dropped, -torch.inf)
