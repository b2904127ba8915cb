"""Tokens per step of a draft model's chains: every draft length from one pass of draft and target over the text.

Given a text that the target sampled, the distribution of a step on it is known. With r_i = q_i(x_i) / p_i(x_i) at the
text's tokens after the step's beginning and P_k = r_1 ... r_k, at least k draft tokens are accepted with probability

    token rejection      S_k = prod min(1, r_i)
    block verification   S_k = min(1, P_1, ..., P_k)
    fixed candidates     S_k = [x_i = argmax q_i for all i <= k]

(Block: draft and text agree on k tokens with probability q_1 ... q_k w_k, w_k = min(1, w_{k-1} / r_k), over the text's
own p_1 ... p_k. Under all three rules the tokens after an accepted one have the target's distribution, so later tokens
of the text tell nothing more about S_k.) The probability that a step begins at each token follows, and with it the
expected number of steps. Nothing is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from foretoken.core.distributions import Law
from foretoken.core.positions import PositionCounts
from foretoken.models.base import Model
from foretoken.plan.tally import AcceptanceEstimate, StepTally
from foretoken.plan.texts import SampledText, text_distributions, text_logits

Reals = NDArray[np.float64]

_HUGE = 1e200  # products of ratios are clipped here, far above the 1 at which they count


@dataclass(frozen=True, slots=True)
class TextProbabilities:
    """Probabilities of the n tokens of one text."""

    text: SampledText
    p: Reals  # the target's, [n]
    q: Reals  # the draft's, [n]
    fixed: bool  # whether the draft proposes the argmax of q instead of a sample from q

    @property
    def acceptance(self) -> float:
        """Mean acceptance of one draft token over the text: mean min(1, q/p)."""
        return float(survival(self, 1)[1].mean())


def token_distributions(model: Model, text: SampledText, law: Law, vocab: int) -> Tensor:
    """Returns the model's distribution of each of the text's tokens, [n, vocab], from one teacher-forced pass.

    Logits of another width than ``vocab`` are cut, or filled with -inf.
    """
    logits = text_logits(model, text)
    logits = F.pad(logits, (0, vocab - logits.shape[-1]), value=-torch.inf)
    return text_distributions(logits, text, law)


def text_probabilities(text: SampledText, p: Tensor, q: Tensor, fixed: bool) -> TextProbabilities:
    """Returns the probabilities of the text's tokens in the distributions ``p`` and ``q``, [n, V] each."""
    tokens = torch.tensor(text.tokens, device=p.device)[:, None]

    def chosen(probs: Tensor) -> Reals:
        values: Reals = probs.gather(1, tokens.to(probs.device))[:, 0].double().cpu().numpy()
        return values

    return TextProbabilities(text, chosen(p), chosen(q), fixed)


def survival(text: TextProbabilities, depth: int, rejection: str = "block") -> Reals:
    """Returns S[k, t] (see the module) of steps that begin before token t, [depth + 1, n]. 0 beyond the text's end."""
    count = len(text.q)
    p = np.ones(count) if text.fixed else text.p
    ratios = np.concatenate([np.divide(text.q, p, out=np.zeros(count), where=p > 0), np.zeros(depth)])
    if text.fixed or rejection == "token":
        ratios = np.minimum(ratios, 1.0)
    product, reach = np.ones(count), [np.ones(count)]
    for k in range(depth):
        product = np.minimum(product * ratios[k : k + count], _HUGE)
        reach.append(np.minimum(reach[-1], product))
    return np.array(reach)


def step_starts(reach: Reals) -> tuple[Reals, Reals]:
    """Returns the probability pi_t that a step begins at each token, [n], and P(N = 1), P(N = 2), ..., [n, depth + 1].

    N is the number of tokens of a step, the target's own included. A step that begins at t is followed by one at t + N:
    pi_0 = 1 and pi_{t+m} += pi_t (S_{m-1} - S_m). The sum of pi is the expected number of steps that emit the text.

    Args:
        reach: ``survival``, [depth + 1, n].
    """
    lengths = -np.diff(reach, axis=0, append=0.0).T
    count, sizes = lengths.shape
    begins = np.zeros(count + sizes)
    begins[0] = 1.0
    for t in range(count):
        begins[t + 1 : t + sizes + 1] += begins[t] * lengths[t]
    return begins[:count], lengths


def chain_estimate(
    texts: Sequence[TextProbabilities], depth: int, rejection: str = "block", max_length: int | None = None
) -> AcceptanceEstimate:
    """Returns the estimate for chains of ``depth`` tokens over one text per request.

    rejection: "block" or "token". max_length: of the draft model's sequences, beyond which it drafts nothing.
    """
    return AcceptanceEstimate(tuple(_tally(text, depth, rejection, max_length) for text in texts), "distribution")


def _tally(probabilities: TextProbabilities, depth: int, rejection: str, max_length: int | None) -> StepTally:
    text, at = probabilities.text, np.arange(len(probabilities.text.tokens))
    drafted = np.minimum(depth, text.limit - at - 1)  # by a step that begins at each token
    if max_length is not None:
        drafted[len(text.prompt) + at + depth > max_length] = 0
    reach = survival(probabilities, depth, rejection) * (np.arange(depth + 1)[:, None] <= drafted)
    begins, lengths = step_starts(reach)
    begins[0] = 0.0  # the prompt's step
    emitted = (np.minimum(np.arange(1, depth + 2), len(at) - at[:, None]) * lengths).sum(1)  # the text's end ends it
    longest = int(drafted[1:].max(initial=0))
    positions = PositionCounts(
        [float(begins[drafted > position].sum()) for position in range(longest)],
        (reach[1:] @ begins)[:longest].tolist(),
    )
    sizes = {int(size): float(begins[drafted == size].sum()) for size in np.unique(drafted[1:])}
    return StepTally(float(begins @ emitted), float(begins.sum()), positions, sizes)
