"""Sampling parameters: turns logits into the distribution that is sampled from.

The order of operations is vLLM's: grammar, allowed tokens, bad words and min_tokens, logit bias, repetition, frequency
and presence penalties, temperature, min-p, top-k, top-p. Temperature 0 is the one-hot distribution of the argmax, the
lowest id on ties.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.core.distributions import at_tokens, not_finite
from foretoken.core.errors import InvalidRequest
from foretoken.core.history import History
from foretoken.core.native import sampling as native
from foretoken.core.restrictions import BadWords, Grammar

BLOCK = 32  # entries per block; ``largest`` compares the maxima of blocks first


def kth_largest(scores: Tensor, k: int) -> Tensor:
    """Returns the k-th largest score of each row. [rows, V] -> [rows, 1]

    On the CPU numpy's partition is used: torch's topk sorts all k entries.
    """
    if not scores.is_cpu:
        return scores.topk(k, dim=-1).values[..., -1:]
    return torch.from_numpy(np.partition(scores.numpy(), -k, axis=-1)[:, -k, None])


def largest(row: NDArray[Any], k: int) -> NDArray[np.int64]:
    """Returns the ids of the ``k`` largest entries and of entries that tie with the k-th, in rising order.

    The row is divided into blocks, each of every ``blocks``-th entry. At least k entries, and few others, reach the
    k-th largest of the blocks' maxima, so only those are partitioned. NaN is kept: the draw refuses it later.

    Args:
        row: [V], with at least k blocks.
        k: Number of entries.
    """
    blocks = row.size // BLOCK
    floor = np.partition(row[: blocks * BLOCK].reshape(BLOCK, blocks).max(0), -k)[-k]
    ids = np.flatnonzero(~(row < floor))
    return ids[~(row[ids] < np.partition(row[ids], -k)[-k])]


def nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Returns probabilities over the nucleus of each row: the smallest set of top tokens whose mass reaches ``top_p``.

    The nucleus has at least one token and equals that of ``nucleus_sorted``. On the CPU only the head of each row is
    sorted and normalized.

    Args:
        scores: [rows, V].
        top_p: Mass of the nucleus.
    """
    if not scores.is_cpu:
        return nucleus_sorted(scores, top_p).softmax(-1)
    result = torch.zeros_like(scores)
    for probs, row, target in zip(scores.softmax(-1).numpy(), scores, result, strict=True):
        ids = torch.from_numpy(_head(probs, top_p))
        target[ids] = row[ids].softmax(-1)
    return result


def _head(probs: NDArray[Any], top_p: float) -> NDArray[np.int64]:
    """Returns the ids of one row's nucleus: tokens preceded by less than ``top_p`` of the mass, lowest ids on ties.

    Apart from rounding, no token under (1 - top_p) / V belongs to it. Usually far fewer tokens are sorted.
    """
    for floor in (1e-3, (1.0 - top_p) / probs.size, 0.0):
        head = np.sort(probs[probs >= floor])[::-1]
        # torch sums a row in the same way: in float64, rounded at every entry.
        before = head.cumsum(dtype=np.float64).astype(head.dtype) - head
        count = int(np.searchsorted(before, head.dtype.type(top_p)))
        if 0 < count < head.size or floor == 0.0:
            break
    if count == 0:  # a row of NaN, which the draw refuses
        return np.arange(0)
    lowest = head[count - 1]
    ids = np.flatnonzero(probs >= lowest)
    if ids.size > count:
        tied = np.flatnonzero(probs[ids] == lowest)
        ids = np.delete(ids, tied[count - ids.size :])
    return ids


def nucleus_sorted(scores: Tensor, top_p: float | Tensor) -> Tensor:
    """Returns ``scores`` with -inf outside the nucleus, by sorting whole rows, lowest id first on ties.

    It needs no synchronization with the device.
    """
    ordered, ids = scores.softmax(-1).sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    dropped = torch.empty_like(before, dtype=torch.bool).scatter_(-1, ids, before >= top_p)
    return scores.masked_fill(dropped, -torch.inf)


@dataclass(frozen=True)
class SamplingLaw:
    """A ``Law`` with the usual sampling parameters, as a pure function."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # number of most probable tokens to keep; 0 keeps all
    top_p: float = 1.0  # probability mass of the nucleus to keep
    min_p: float = 0.0  # smallest probability to keep, relative to the largest
    presence_penalty: float = 0.0  # subtracted from the logits of generated tokens, as in vLLM
    frequency_penalty: float = 0.0  # subtracted once for each occurrence among the generated tokens, as in vLLM
    # divides positive and multiplies negative logits of prompt and generated tokens, as in vLLM
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, bias) pairs that are added to the logits
    allowed_ids: tuple[int, ...] = ()  # the only tokens that are possible; empty for all
    # token sequences whose last token is forbidden where the history ends with the tokens before it
    bad_words: Sequence[tuple[int, ...]] = BadWords()
    min_tokens: int = 0  # number of generated tokens before which ``end_ids`` are forbidden
    end_ids: tuple[int, ...] = ()  # ids that end a text
    # forbids every token that it does not allow; where it and ``allowed_ids`` allow only ``end_ids``, they are possible
    # before ``min_tokens``
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "bad_words", BadWords.of(self.bad_words))

    @cached_property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def with_temperature(self, temperature: float) -> "SamplingLaw":
        return replace(self, temperature=temperature)

    @cached_property
    def needs_history(self) -> bool:
        return self.penalizes or self._forbids

    @cached_property
    def adjusts(self) -> bool:
        """Whether anything changes the logits before a token is chosen."""
        return self.needs_history or bool(self.logit_bias)

    @property
    def takes_argmax(self) -> bool:
        return self.greedy and not self.adjusts

    @cached_property
    def penalizes(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @cached_property
    def _forbids(self) -> bool:
        few = self.grammar is not None or bool(self.allowed_ids) or bool(self.bad_words)
        return few or (self.min_tokens > 0 and bool(self.end_ids))

    def probs(self, logits: Tensor, histories: Sequence[History]) -> Tensor:
        scores = self._scores(logits, histories)
        if not self.greedy and (kernels := native.for_rows(scores)):
            return kernels.rows(scores, self.kept)
        if self.greedy:
            probs = torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
        elif scores.is_cpu and 0 < self.top_k <= scores.shape[-1] // BLOCK:
            probs = self._of_few(scores)
        else:
            probs = self._filtered(scores)
        return probs.masked_fill_(~scores.amax(-1, keepdim=True).isfinite(), torch.nan)

    def chances(self, logits: Tensor, histories: Sequence[History], tokens: Sequence[int]) -> list[float]:
        if not self.greedy and logits.dtype != torch.float64:
            scores = self._scores(logits, histories)
            if kernels := native.for_rows(scores):
                return kernels.chances(scores, tokens, self.kept)
        return at_tokens(self.probs(logits, histories), tokens)

    def choose(self, logits: Tensor, histories: Sequence[History], noise: native.Noise) -> int:
        token = self._chosen(logits, histories, noise)
        return -1 if token is None else token

    def token_row(self, logits: Tensor, noise: native.Noise | None) -> native.TokenRow | None:
        """See ``Law``. Subclasses that override ``probs`` or ``choose`` choose tokens by them."""
        if type(self).probs is not SamplingLaw.probs or type(self).choose is not SamplingLaw.choose:
            return None
        return self._token_row(logits, noise)

    def _token_row(self, logits: Tensor, noise: native.Noise | None) -> native.TokenRow | None:
        if logits.dtype != torch.float64:
            logits = logits.float()
        if not native.for_rows(logits):
            return None
        change = self._fixed_change(logits.shape[1]) if self.adjusts else None
        if self.greedy or noise is None:
            return native.TokenRow.of(logits, native.TokenSource.LIKELIEST, change)
        source = native.TokenSource.RACE if noise.races else native.TokenSource.FRACTION
        row = native.TokenRow.of(logits, source, change)
        row.noise, row.filter = noise.bits, self.kept.spec(logits.shape[1])
        return row

    def verify_chain(self, logits: Tensor, ids: Sequence[int], q: Tensor, key: int) -> tuple[int, int] | None:
        if self.greedy or self.adjusts or type(self).probs is not SamplingLaw.probs:
            return None
        kernels = native.for_rows(logits) if q.dtype is torch.float32 and q.is_cpu and q.is_contiguous() else None
        if kernels is None:
            return None
        accepted, token = kernels.verify_chain(logits, ids, q, self.kept, key)
        return (accepted, token) if token >= 0 else None

    @cached_property
    def changes_follow_tokens(self) -> bool:
        return self.grammar is None and self._banned is not None

    def changes_at(self, vocabulary: int, history: History) -> native.Adjustment:
        """Returns the changes of logits [vocabulary] at a node.

        Without ``changes_follow_tokens`` its mask and bans are those of ``possible_at``.
        """
        change = self._fixed_change(vocabulary)
        self._update(change, history)
        return change

    def update_row(self, row: native.TokenRow, vocabulary: int, history: History) -> None:
        if row.adjustment is not None:
            if not row.masks:
                self._limit(row.adjustment, vocabulary, history)
            self._update(row.adjustment, history)

    def possible_at(self, vocabulary: int, history: History) -> NDArray[np.bool_]:
        try:
            allowed, banned = self._limits(vocabulary, history)
        except InvalidRequest:  # the node may never be reached, see ``Law.probs``
            return np.zeros(vocabulary, np.bool_)
        possible = np.ones(vocabulary, np.bool_) if allowed is None else allowed.numpy().copy()
        possible[banned.numpy()] = False
        return possible

    def _chosen(self, logits: Tensor, histories: Sequence[History], noise: native.Noise | None) -> int | None:
        """Returns the token of the only row, -1 if none is possible, or None if the kernels cannot choose it."""
        row = self._token_row(logits, noise)
        if row is None or (kernels := native.kernels()) is None:
            return None
        if self.needs_history:
            self.update_row(row, logits.shape[1], histories[0])
        kernels.choose_tokens([row], logits.shape[1])
        return row.token

    @property
    def kept(self) -> native.Filter:
        """Temperature and filters, for the kernels."""
        return native.Filter(self.temperature, self.min_p, self.top_k, self.top_p)

    def best(self, logits: Tensor, histories: Sequence[History]) -> list[int]:
        """See ``Law``. Without kernels numpy's vectorized argmax takes NaN first, and the lowest id on ties."""
        if len(logits) == 1 and (token := self._chosen(logits, histories, None)) is not None:
            return [token]
        scores = self._scores(logits, histories)
        if kernels := native.for_rows(scores):
            return kernels.best(scores)
        if scores.is_cpu:
            rows = scores.numpy()
            return [i if math.isfinite(row[i]) else -1 for row, i in zip(rows, rows.argmax(-1).tolist(), strict=True)]
        ids = scores.argmax(-1, keepdim=True)  # NaN sorts as the largest entry
        best: list[int] = ids.where(scores.gather(-1, ids).isfinite(), -1)[:, 0].tolist()
        return best

    def refusal(self, logits: Tensor, history: History) -> InvalidRequest:
        if not logits.isnan().any():
            try:
                self._forbid(logits.clone(), history)
            except InvalidRequest as error:
                return error
        return not_finite()

    def _filtered(self, scores: Tensor) -> Tensor:
        """Applies temperature, min-p, top-k and top-p. Returns probabilities."""
        if self.temperature != 1.0 or self.min_p > 0.0 or self.top_k > 0:
            # Relative to the largest score, so that no temperature overflows, however small.
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
        """``_filtered`` for a small top-k and a large vocabulary: what follows top-k handles the kept tokens only."""
        result = torch.zeros_like(scores)
        for row, target in zip(scores, result, strict=True):
            ids = torch.from_numpy(largest(row.numpy(), self.top_k))
            target[ids] = self._filtered(row[ids][None])[0]
        return result

    def _scores(self, logits: Tensor, histories: Sequence[History]) -> Tensor:
        """Returns logits after grammar, bad words, biases and penalties. The largest is the greedy token.

        They are float32 (float64 for float64 logits), and ``logits`` itself where nothing changes them.
        """
        if logits.dtype != torch.float64:
            logits = logits.float()
        if not self.adjusts:
            return logits
        if self.needs_history and len(histories) != logits.shape[0]:
            raise ValueError(f"{len(histories)} histories for {logits.shape[0]} rows")
        if kernels := native.for_rows(logits):
            changes = [self._fixed_change(logits.shape[1]) for _ in range(logits.shape[0])]
            for change, history in zip(changes, histories, strict=True) if self.needs_history else ():
                self._limit(change, logits.shape[1], history)
                self._update(change, history)
            return kernels.adjusted(logits, changes)
        return self._adjust(logits.clone(), histories)

    def _limit(self, change: native.Adjustment, vocabulary: int, history: History) -> None:
        """Sets the mask and the banned tokens of a node, if they depend on the tokens before it."""
        if self.grammar is not None:
            mask = self._mask(vocabulary, history)
            if mask is None:
                change.allowed = None
            else:
                change.hold(allowed=mask)
        if self._banned is None:
            banned = BadWords.of(self.bad_words).banned(history.tokens, history.path)
            change.hold(banned=banned)
            change.banned_count = len(banned)

    def _update(self, change: native.Adjustment, history: History) -> None:
        """Sets the number of tokens without an end, and the counts of penalties."""
        if self.min_tokens:
            change.end_steps = self.min_tokens - history.generated
            change.end_count = len(self.end_ids) if change.end_steps > 0 else 0
        if self.penalizes:
            if history.counts is not None and not history.path:
                change.seen, change.generated, change.seen_count = history.counts.addresses(history.tokens)
            else:
                seen, generated = history.token_counts()
                change.hold(seen=seen, generated=generated)
                change.seen_count = len(seen)

    def _mask(self, vocabulary: int, history: History) -> NDArray[np.bool_] | None:
        """Returns the mask of the tokens allowed at a node, all False if that fails; None if all are allowed."""
        try:
            mask = self._allowed(vocabulary, history)
        except InvalidRequest:  # no token is possible; the node may never be reached, see ``Law.probs``
            return np.zeros(vocabulary, np.bool_)
        return None if mask is None else mask.numpy()

    def _fixed_change(self, vocabulary: int) -> native.Adjustment:
        change = native.Adjustment(
            repetition=self.repetition_penalty, frequency=self.frequency_penalty, presence=self.presence_penalty
        )
        if self.logit_bias:
            change.hold(biased=self._biases[0], biases=self._biases[1])
            change.biased_count = len(self.logit_bias)
        if self.allowed_ids:
            change.hold(allowed=self._listed_mask(vocabulary))
        if self._banned is not None and len(self._banned):
            change.hold(banned=self._banned)
            change.banned_count = len(self._banned)
        if self.min_tokens:
            change.hold(ends=self._end_array)
        return change

    @cached_property
    def _banned(self) -> NDArray[np.int64] | None:
        return BadWords.of(self.bad_words).single

    @cached_property
    def _end_array(self) -> NDArray[np.int64]:
        return np.array(self.end_ids, np.int64)

    @cached_property
    def _biases(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        ids, values = zip(*self.logit_bias, strict=True)
        return np.array(ids, np.int64), np.array(values, np.float32)

    def _adjust(self, logits: Tensor, histories: Sequence[History]) -> Tensor:
        """Applies grammar, bad words, biases and penalties row by row, in place."""
        for row in range(logits.shape[0]) if self._forbids else ():
            try:
                self._forbid(logits[row], histories[row])
            except InvalidRequest:  # the node may never be reached, see ``Law.probs``
                logits[row] = torch.nan
        if self.logit_bias:
            ids, values = zip(*self.logit_bias, strict=True)
            logits[:, list(ids)] += torch.tensor(values, dtype=logits.dtype, device=logits.device)
        if self.penalizes:
            self._penalize(logits, histories)
        return logits

    def _forbid(self, scores: Tensor, history: History) -> None:
        """Sets forbidden tokens in a node's scores [V] to -inf. Raises InvalidRequest if all are forbidden."""
        allowed, banned = self._limits(scores.shape[-1], history)
        if allowed is None:
            scores[banned] = -torch.inf
            possible = not len(banned) or bool((scores > -torch.inf).any())
        else:
            remaining = allowed.clone()
            remaining[banned] = False
            possible = bool(remaining.any())
            remaining = remaining.to(scores.device)
            scores.masked_fill_(~remaining, -torch.inf)
            # A draft with a smaller vocabulary may give all of them -inf: then all are equally probable.
            scores.masked_fill_(remaining & (scores == -torch.inf).all(), 0.0)
        if not possible:
            limits = {"structured_outputs": self.grammar is not None, "allowed_token_ids": bool(self.allowed_ids)}
            names = [*(name for name, is_set in limits.items() if is_set), "bad_words"]
            raise InvalidRequest(
                f"{', '.join(names)} and min_tokens together forbid every token at one position; allow at least one",
                param=names[0],
            )

    def _limits(self, vocabulary: int, history: History) -> tuple[Tensor | None, Tensor]:
        """Returns the mask of the tokens allowed at a node, None for all, and the banned tokens."""
        allowed = self._allowed(vocabulary, history)
        banned = torch.from_numpy(BadWords.of(self.bad_words).banned(history.tokens, history.path))
        if history.generated < self.min_tokens and _others(allowed, self.end_ids):
            banned = torch.cat([banned, torch.tensor(self.end_ids, dtype=torch.int64)])
        return allowed, banned[banned < vocabulary]  # a draft's vocabulary may lack some

    def _allowed(self, vocabulary: int, history: History) -> Tensor | None:
        """Returns the mask [V] of the tokens that the grammar and ``allowed_ids`` allow at a node; None for all."""
        allowed = None if self.grammar is None else self.grammar.allowed(history)
        if allowed is not None and len(allowed) != vocabulary:
            raise ValueError(f"a mask of {len(allowed)} tokens for logits of {vocabulary}")
        if self.allowed_ids:
            listed = self._listed_mask(vocabulary)
            allowed = torch.from_numpy(listed if allowed is None else allowed.numpy() & listed)
        return allowed

    def _listed_mask(self, vocabulary: int) -> NDArray[np.bool_]:
        if (listed := self._listed.get(vocabulary)) is None:
            listed = self._listed[vocabulary] = np.zeros(vocabulary, np.bool_)
            listed[[token for token in self.allowed_ids if token < vocabulary]] = True
        return listed

    @cached_property
    def _listed(self) -> dict[int, NDArray[np.bool_]]:
        return {}

    def _penalize(self, logits: Tensor, histories: Sequence[History]) -> None:
        for row, history in enumerate(histories):
            ids, times = history.token_counts()
            inside = ids < logits.shape[1]  # a draft's vocabulary may lack some
            seen, generated = (torch.from_numpy(array[inside]).to(logits.device) for array in (ids, times))
            values = logits[row, seen]
            if self.repetition_penalty != 1.0:
                up, down = values * self.repetition_penalty, values / self.repetition_penalty
                values = torch.where(values > 0, down, up)
            counted = self.frequency_penalty * generated.to(values.dtype) + self.presence_penalty
            logits[row, seen] = torch.where(generated > 0, values - counted, values)


def _others(allowed: Tensor | None, ids: Sequence[int]) -> bool:
    """Returns whether any token except ``ids`` is allowed."""
    return allowed is None or int(allowed.sum()) > int(allowed[[i for i in set(ids) if i < len(allowed)]].sum())
