"""The interface of online training: samples of a target's text, and a differentiable copy that learns from them."""

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.core.artifacts import MODEL

_FLOOR = 1e-6


class TopLogprobs(NamedTuple):
    """The most probable tokens of some rows: ids int64 [..., k], and their natural log-probabilities [..., k]."""

    ids: Tensor
    log_p: Tensor


@dataclass(frozen=True, slots=True)
class TargetSpan:
    """A span of tokens with the target's distributions."""

    tokens: NDArray[np.int64]  # [T]
    ids: NDArray[np.int64]  # [n, k], the k most probable tokens after each of the last n tokens
    log_p: NDArray[np.float32]  # [n, k], their natural log-probabilities
    # [T, F], the bits in bfloat16 of the target's states at the tokens, for a learner that reads them
    states: NDArray[np.uint16] | None = None

    @property
    def nbytes(self) -> int:
        states = 0 if self.states is None else self.states.nbytes
        return self.tokens.nbytes + self.ids.nbytes + self.log_p.nbytes + states

    def __len__(self) -> int:
        return len(self.ids)


def padded_tokens(spans: Sequence[TargetSpan]) -> Tensor:
    """Returns the tokens of all spans, int64 [spans, longest]; zeros follow the shorter ones."""
    ids = torch.zeros(len(spans), max(len(span.tokens) for span in spans), dtype=torch.int64)
    for row, span in zip(ids, spans, strict=True):
        row[: len(span.tokens)] = torch.from_numpy(span.tokens)
    return ids


def overlap(logits: Tensor, top: TopLogprobs) -> Tensor:
    """Returns sum min(p, q) of every row [...]: the acceptance probability of a token sampled from q.

    Tokens outside the top k of p count as one bucket, so the result is an upper bound.

    Args:
        logits: logits of q [..., V].
        top: top tokens of p.
    """
    logits = logits.float()
    q = (logits.gather(-1, top.ids) - logits.logsumexp(-1, keepdim=True)).exp()
    p = top.log_p.exp()
    return torch.minimum(p, q).sum(-1) + torch.minimum((1 - p.sum(-1)).clamp_min(0), (1 - q.sum(-1)).clamp_min(0))


class Learner(ABC):
    """Trains a differentiable copy of a drafter in float32.

    Args:
        module: the copy.
        learning_rate: learning rate of AdamW.
        batch: spans per update.
        seed: seed for choosing spans.

    Attributes:
        taps: the target's layers whose states the spans must have, in this order.
        reads_logits: whether the spans have the target's distributions. Else they have its tokens, as distributions of
            one token, which take no time to collect.
        artifact: kind of the saved checkpoint.
        pause: is called after each optimizer step with its seconds.
    """

    taps: tuple[int, ...] = ()
    reads_logits = True
    artifact = MODEL

    def __init__(self, module: Any, learning_rate: float, batch: int, seed: int = 0) -> None:
        self.module = module
        self.pause: Callable[[float], None] = lambda seconds: None
        self._optimizer = torch.optim.AdamW(module.parameters(), lr=learning_rate, weight_decay=0.0)
        self._batch, self._random = batch, np.random.default_rng(seed)

    def learn(self, spans: Sequence[TargetSpan], steps: int) -> None:
        """Makes ``steps`` updates on random batches of ``spans`` with the loss -log sum min(p, q).

        sum min(p, q) is the acceptance probability itself. The KL divergence is a better loss for an untrained draft,
        but makes a draft worse that was trained for acceptance: the two losses have different optima if the draft is
        too small to match the target.
        """
        with torch.inference_mode(False), torch.enable_grad():
            for _ in range(steps):
                started = time.perf_counter()
                chosen = self._random.choice(len(spans), min(self._batch, len(spans)), replace=False)
                accepted = self.overlaps([spans[i] for i in chosen])
                (-accepted.clamp_min(_FLOOR).log().mean()).backward()
                torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
                self._optimizer.step()
                self._optimizer.zero_grad(set_to_none=True)
                self.pause(time.perf_counter() - started)

    @torch.no_grad()
    def acceptance(self, spans: Sequence[TargetSpan]) -> float:
        """Returns the mean of sum min(p, q) over all rows: the probability that a sampled token is accepted."""
        rows = [self.overlaps(spans[i : i + self._batch]) for i in range(0, len(spans), self._batch)]
        return float(torch.cat(rows).mean())

    def snapshot(self) -> Any:
        """Returns weights and optimizer state for ``restore``."""
        return copy.deepcopy((self.module.state_dict(), self._optimizer.state_dict()))

    def restore(self, snapshot: Any) -> None:
        self.module.load_state_dict(snapshot[0])
        self._optimizer.load_state_dict(snapshot[1])

    @abstractmethod
    def overlaps(self, spans: Sequence[TargetSpan]) -> Tensor:
        """Returns sum min(p, q) of every row of the spans, [rows]."""

    @abstractmethod
    def version(self) -> Any:
        """Returns the present drafter on the runtime; later updates do not change it."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Saves an ordinary checkpoint in an existing empty ``folder``."""
