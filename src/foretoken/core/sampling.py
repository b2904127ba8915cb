"""From logits to the law that is sampled. Every parameter lives here and nowhere else.

The order is vLLM's: grammar, bad words and min_tokens, logit bias, repetition, frequency and presence penalties,
temperature, min-p, top-k, top-p. Temperature 0 is the one-hot law of the argmax, the lowest id on ties.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from foretoken.core.bad_words import BadWords
from foretoken.core.errors import InvalidRequest
from foretoken.core.filters import BLOCK, kth_largest, largest, nucleus
from foretoken.core.grammar import Grammar
from foretoken.core.native import laws as native


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

    @property
    def needs_history(self) -> bool:
        """Whether rows with the same logits may have different laws; if not, histories may be left out."""
        ...

    def best(self, logits: Tensor, histories: Sequence[History]) -> list[int]:
        """Each row's likeliest token, the lowest id on ties: of a greedy law the only one.

        -1 where no token can come.
        """
        ...

    def probs(self, logits: Tensor, histories: Sequence[History]) -> Tensor:
        """[rows, V] logits to [rows, V] probabilities, float32 (float64 stays float64).

        A row is NaN where no token can come: all are forbidden there, or the logits are not finite. Such a node ends
        the request with an error when it is reached, and not before: a draft has no children there, and a verifier
        gives them probability 0.
        """
        ...

    def chances(self, logits: Tensor, histories: Sequence[History], tokens: Sequence[int]) -> list[float]:
        """The probability of ``tokens[r]`` in row r, as ``probs`` has it."""
        return _at(self.probs(logits, histories), tokens)

    def refusal(self, logits: Tensor, history: History) -> InvalidRequest:
        """The error that ends a request at a node where no token can come. logits: [V]"""
        return not_finite()

    def with_temperature(self, temperature: float) -> Law:
        """The same law at another temperature: a draft may run hotter or colder than its target."""
        ...


class Rows:
    """The laws at the root and at every node of a draft, each computed when it is first asked for.

    Reads as the tensor [n+1, V] would: ``rows[i]`` is one law, [V], and ``shape``. A verifier that stops early
    never pays for the rows below. ``history(i)`` is the history of row i; it is asked for only where the law looks.

    A row where no token can come is NaN, as in ``Law.probs``. So is one whose law raises: the node may be rejected, and
    then it must not matter. ``refusal(i)`` is the error for a request that reaches row i.
    """

    def __init__(self, law: Law, logits: Tensor, history: Callable[[int], History]) -> None:
        self.shape = logits.shape
        self._law, self._logits, self._history = law, logits, history
        self._known: dict[int, Tensor] = {}
        self._best: list[int] | None = None
        self._errors: dict[int, Exception] = {}

    def __getitem__(self, row: int) -> Tensor:
        known = self._known.get(row)
        if known is None:
            try:
                known = self._law.probs(self._logits[row : row + 1], self._histories(row))[0]
            except Exception as error:
                self._errors[row] = error
                known = torch.full(self.shape[1:], torch.nan)
            self._known[row] = known
        return known

    def chances(self, rows: Sequence[int], tokens: Sequence[int]) -> Iterator[float]:
        """The probability of ``tokens[i]`` in row ``rows[i]``, without all the others of the row.

        NaN where no token can come.

        All are had at once where no row has a law of its own, else one by one as they are asked for.
        """
        if self._law.needs_history:
            for row, token in zip(rows, tokens, strict=True):
                yield self._chance(row, token)
        elif rows:
            whole = list(rows) == list(range(rows[0], rows[0] + len(rows)))
            logits = self._logits[rows[0] : rows[0] + len(rows)] if whole else self._logits[list(rows)]
            yield from self._law.chances(logits, (), tokens)

    def certain(self, row: int) -> int | None:
        """The only token that row ``row`` can draw if the law is greedy, -1 where none can come; None otherwise.

        No one-hot row is made for it.
        """
        if not self._law.greedy:
            return None
        try:
            if self._logits.is_cpu:
                return self._law.best(self._logits[row : row + 1], self._histories(row))[0]
            if self._best is None:  # elsewhere every wait costs more than the rows: all of them in one
                self._best = self._law.best(self._logits, self._histories(*range(self.shape[0])))
        except Exception as error:
            self._errors[row] = error
            return -1
        return self._best[row]

    def refusal(self, row: int) -> Exception:
        """Why no token can come at ``row``."""
        return self._errors.get(row) or self._law.refusal(self._logits[row], self._history(row))

    def _chance(self, row: int, token: int) -> float:
        try:
            return self._law.chances(self._logits[row : row + 1], self._histories(row), [token])[0]
        except Exception as error:
            self._errors[row] = error
            return math.nan

    def _histories(self, *rows: int) -> Sequence[History]:
        return [self._history(row) for row in rows] if self._law.needs_history else ()


@dataclass(frozen=True)
class SamplingLaw:
    """The usual sampling parameters as one pure function.

    Penalties follow vLLM: presence and frequency count generated tokens, repetition the prompt's too.
    ``bad_words`` are token sequences whose last token is forbidden when the ones before it are the tail of
    the history. ``end_ids`` cannot come before ``min_tokens`` have been generated. What ``grammar`` refuses cannot come
    at all; where it leaves ``end_ids`` alone, they may come early.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = BadWords()
    min_tokens: int = 0
    end_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "bad_words", BadWords.of(self.bad_words))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def with_temperature(self, temperature: float) -> SamplingLaw:
        return replace(self, temperature=temperature)

    @property
    def needs_history(self) -> bool:
        """Whether rows with the same logits may have different laws."""
        return self.penalises or self._forbids

    @property
    def penalises(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def _forbids(self) -> bool:
        return self.grammar is not None or bool(self.bad_words) or (self.min_tokens > 0 and bool(self.end_ids))

    def probs(self, logits: Tensor, histories: Sequence[History]) -> Tensor:
        """[rows, V] logits to probabilities; row r is judged with ``histories[r]``."""
        scores = self._scores(logits, histories)
        if not self.greedy and (kernels := native.for_rows(scores)):
            return kernels.rows(scores, self._kept)
        if self.greedy:
            probs = torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
        elif scores.is_cpu and 0 < self.top_k <= scores.shape[-1] // BLOCK:
            probs = self._of_few(scores)
        else:
            probs = self._filtered(scores)
        return probs.masked_fill_(~scores.amax(-1, keepdim=True).isfinite(), torch.nan)

    def chances(self, logits: Tensor, histories: Sequence[History], tokens: Sequence[int]) -> list[float]:
        """See ``Law``."""
        if not self.greedy and logits.dtype != torch.float64:
            scores = self._scores(logits, histories)
            if kernels := native.for_rows(scores):
                return kernels.chances(scores, tokens, self._kept)
        return _at(self.probs(logits, histories), tokens)

    @property
    def _kept(self) -> native.Filter:
        return native.Filter(self.temperature, self.min_p, self.top_k, self.top_p)

    def best(self, logits: Tensor, histories: Sequence[History]) -> list[int]:
        """See ``Law``. On the CPU numpy compares many numbers at once; it too takes the lowest id on ties."""
        scores = self._scores(logits, histories)
        if scores.is_cpu:
            rows = scores.numpy()
            return [i if math.isfinite(row[i]) else -1 for row, i in zip(rows, rows.argmax(-1).tolist(), strict=True)]
        ids = scores.argmax(-1, keepdim=True)  # NaN counts as the largest entry
        best: list[int] = ids.where(scores.gather(-1, ids).isfinite(), -1)[:, 0].tolist()
        return best

    def refusal(self, logits: Tensor, history: History) -> InvalidRequest:
        """See ``Law``."""
        if not logits.isnan().any():
            try:
                self._forbid(logits.clone(), history)
            except InvalidRequest as error:
                return error
        return not_finite()

    def _filtered(self, scores: Tensor) -> Tensor:
        """Temperature and what follows it."""
        if self.temperature != 1.0 or self.min_p > 0.0 or self.top_k > 0:
            # Relative to the top, so that no temperature, however small, overflows.
            scores = scores - scores.amax(-1, keepdim=True)
        if self.temperature != 1.0:
            scores /= self.temperature
        if self.min_p > 0.0:
            floor = scores.amax(-1, keepdim=True) + torch.tensor(self.min_p, dtype=scores.dtype).log()
            scores.masked_fill_(scores < floor, -torch.inf)
        if 0 < self.top_k < scores.shape[-1]:
            scores.masked_fill_(scores < kth_largest(scores, self.top_k), -torch.inf)
        return nucleus(scores, self.top_p) if self.top_p < 1.0 else scores.softmax(-1)

    def _of_few(self, scores: Tensor) -> Tensor:
        """``_filtered`` where top-k leaves few of many tokens: after that only those few are looked at."""
        found = torch.zeros_like(scores)
        for row, target in zip(scores, found, strict=True):
            ids = torch.from_numpy(largest(row.numpy(), self.top_k))
            target[ids] = self._filtered(row[ids][None])[0]
        return found

    def _scores(self, logits: Tensor, histories: Sequence[History]) -> Tensor:
        """Logits after all that speaks of single tokens, before temperature: the largest is the greedy token.

        float32, float64 stays float64; ``logits`` itself where nothing changes it.
        """
        if logits.dtype != torch.float64:
            logits = logits.float()
        if self.needs_history or self.logit_bias:
            return self._adjust(logits.clone(), histories)
        return logits

    def _adjust(self, logits: Tensor, histories: Sequence[History]) -> Tensor:
        """Everything that speaks of single tokens, row by row, in place."""
        if self.needs_history and len(histories) != logits.shape[0]:
            raise ValueError(f"{len(histories)} histories for {logits.shape[0]} rows")
        for row in range(logits.shape[0]) if self._forbids else ():
            try:
                self._forbid(logits[row], histories[row])
            except InvalidRequest:  # the node may never be reached: see ``Law.probs``
                logits[row] = torch.nan
        if self.logit_bias:
            ids, values = zip(*self.logit_bias, strict=True)
            logits[:, list(ids)] += torch.tensor(values, dtype=logits.dtype, device=logits.device)
        if self.penalises:
            self._penalise(logits, histories)
        return logits

    def _forbid(self, scores: Tensor, history: History) -> None:
        """-inf, in place, for all that cannot come at one node. scores: [V]. Raises InvalidRequest if that is all."""
        allowed = None if self.grammar is None else self.grammar.allowed(history)
        banned = BadWords.of(self.bad_words).banned(history.tokens, history.path)
        if history.generated < self.min_tokens and _others(allowed, self.end_ids):
            banned = torch.cat([banned, torch.tensor(self.end_ids, dtype=torch.int64)])
        if allowed is None:
            scores[banned] = -torch.inf
            possible = not len(banned) or bool((scores > -torch.inf).any())
        else:
            left = allowed.clone()
            left[banned] = False
            possible = bool(left.any())
            left = left.to(scores.device)
            scores.masked_fill_(~left, -torch.inf)
            # A draft may know none of them, its vocabulary being smaller: then each is as good as any.
            scores.masked_fill_(left & (scores == -torch.inf).all(), 0.0)
        if not possible:
            named = "bad_words and min_tokens" if allowed is None else "structured_outputs, bad_words and min_tokens"
            raise InvalidRequest(f"{named} together forbid every token at one place; allow at least one")

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


def not_finite() -> InvalidRequest:
    """The error for logits that make no distribution."""
    return InvalidRequest(
        "the model computed logits that are NaN or infinite, so no token can be drawn; check the checkpoint's weights, "
        "or load the model in another dtype"
    )


def _at(probs: Tensor, tokens: Sequence[int]) -> list[float]:
    """Entry ``tokens[r]`` of row r."""
    found: list[float] = probs[range(len(tokens)), list(tokens)].tolist()
    return found


def _others(allowed: Tensor | None, ids: Sequence[int]) -> bool:
    """Whether anything but ``ids`` is allowed."""
    if allowed is None:
        return True
    rest = allowed.clone()
    rest[list(ids)] = False
    return bool(rest.any())
