"""Tokens per pass of a draft model's chains, all depths from one pass of draft and target over the text.

Given a text that the target drew, the law of a round on it is known. With r_i = q_i(x_i) / p_i(x_i) at the text's
tokens after the round's beginning and P_k = r_1 ... r_k, at least k drafted tokens are accepted with probability

    token rejection      S_k = prod min(1, r_i)
    block verification   S_k = min(1, P_1, ..., P_k)
    fixed candidates     S_k = [x_i = argmax q_i for all i <= k]

(Block: draft and text agree on k tokens with probability q_1 ... q_k w_k, w_k = min(1, w_{k-1} / r_k), over the text's
own p_1 ... p_k. Under all three the tokens after an accepted one have the target's law, so nothing more is known of S_k
from the text beyond.) Where rounds begin follows, and so does their expected number: nothing is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from foretoken.core.distributions import Law
from foretoken.models.base import Model
from foretoken.plan.formulas.theory import text_survival
from foretoken.plan.tally import AcceptanceEstimate, StepTally, count
from foretoken.plan.texts import Piece, SampledText, laws, told

Reals = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Ratios:
    """Of one text: p(x) and q(x) at each of its tokens, [n]. fixed: the draft is q's argmax, else drawn from q."""

    text: SampledText
    p: Reals
    q: Reals
    fixed: bool

    @property
    def acceptance(self) -> float:
        """What a drawn draft has accepted of the text, a mean over its places: mean min(1, q/p)."""
        return float(accepted(self, 1)[1].mean())


def rows(model: Model, text: SampledText, law: Law, vocab: int) -> Tensor:
    """[n, vocab]: the law of each of the text's tokens, in one pass; logits of another width are cut or filled."""
    return torch.cat(list(laws(text, (_fitted(piece, vocab) for piece in told(model, text)), law)))


def ratios(text: SampledText, p: Tensor, q: Tensor, fixed: bool) -> Ratios:
    """From the laws of ``text``, [n, V] each."""
    tokens = torch.tensor(text.tokens, device=p.device)[:, None]

    def chosen(law: Tensor) -> Reals:
        found: Reals = law.gather(1, tokens.to(law.device))[:, 0].double().cpu().numpy()
        return found

    return Ratios(text, chosen(p), chosen(q), fixed)


def _fitted(piece: Piece, vocab: int) -> Piece:
    missing = vocab - piece.logits.shape[-1]
    return replace(piece, logits=F.pad(piece.logits, (0, missing), value=-torch.inf)) if missing else piece


def accepted(found: Ratios, depth: int, rejection: str = "block") -> Reals:
    """S[k, t], see the module, for rounds that begin before token t; 0 where the text ends sooner. [depth + 1, n]"""
    p = np.ones_like(found.p) if found.fixed else found.p
    block = rejection == "block" and not found.fixed
    reach = text_survival(torch.from_numpy(p), torch.from_numpy(found.q), depth, block).numpy()
    return np.concatenate([np.ones((1, len(p))), reach.T])


def expected(
    found: Sequence[Ratios], depth: int, rejection: str = "block", window: int | None = None
) -> AcceptanceEstimate:
    """Of chains of ``depth``. window: the draft's greatest length, beyond which it does not draft."""
    return AcceptanceEstimate(tuple(_expected(each, depth, rejection, window) for each in found), "law")


def _expected(found: Ratios, depth: int, rejection: str, window: int | None) -> StepTally:
    text, size = found.text, len(found.text.tokens)
    survival = accepted(found, depth, rejection)
    begins = np.zeros(size)  # P(a round begins here)
    begins[0] = 1.0
    tally = StepTally()
    for at in range(size):
        left = size - at
        deep = min(depth, text.limit - at - 1)
        if window is not None and len(text.prompt) + at + depth > window:
            deep = 0
        known = survival[: min(deep, left) + 1, at]  # what reaches the text's end ends the request, however deep
        lengths = np.append(known[:-1] - known[1:], known[-1])  # P(the round emits 1, 2, ... tokens)
        onward = min(len(lengths), left - 1)
        begins[at + 1 : at + 1 + onward] += begins[at] * lengths[:onward]
        if at:
            emitted = float((np.minimum(np.arange(1, len(lengths) + 1), left) * lengths).sum())
            _tell(tally, float(begins[at]), emitted, deep, known)
    return tally


def _tell(tally: StepTally, weight: float, emitted: float, deep: int, known: Reals) -> None:
    """A round that begins with probability ``weight``."""
    tally.rounds += weight
    tally.tokens += weight * emitted
    count(tally.sizes, deep, weight)
    for position in range(deep):
        count(tally.drafted_at, position, weight)
    for position, survives in enumerate(known[1:]):
        count(tally.accepted_at, position, weight * float(survives))
