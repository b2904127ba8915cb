"""Wrong verifiers for the negative control: an audit that does not find them proves nothing.

All of them are one exact rule with one part replaced. The rule verifies children one after another, as recursive
rejection sampling does (2305.09781), for every kind of draft: a fixed candidate x counts as sampled from a one-hot
distribution, so it is accepted with probability p(x), and x is removed from p when it is rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.core.context import Exactness
from foretoken.core.draft import Draft
from foretoken.core.law import PointMass, ProposalLaw, Sampled, TopPlusSampled
from foretoken.core.streams import Stream
from foretoken.core.verdict import Verdict
from foretoken.verify import Rule, Verifier, choose
from foretoken.verify.residual import excess, normalized, ratio
from foretoken.verify.rows import Probs

Accept = Callable[[float, float], float]
Reshape = Callable[[Tensor], Tensor]


def fair(p: float, q: float) -> float:
    """Returns min(1, p/q)."""
    return min(1.0, ratio(p, q))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Returns norm((p - q)+), or p where no mass is left."""
    left, mass = excess(p, q)
    return left / mass if mass > 0.0 else p


def independent_draw(stream: Stream, p: float, child: int, depth: int) -> bool:
    """Accepts with probability ``p`` by a random number that nothing else uses."""
    return stream.bernoulli(p, index=child)


def unchanged(row: Tensor) -> Tensor:
    """Returns ``row`` unchanged."""
    return row


def sequential(
    *,
    accept: Accept = fair,
    reject: Callable[[Tensor, Tensor], Tensor] = residual,
    decide: Callable[[Stream, float, int, int], bool] = independent_draw,
    target: Reshape = unchanged,
    drafted: Reshape = unchanged,
    bonus: Reshape = unchanged,
) -> Verifier:
    """Returns the rule with replaceable parts.

    Args:
        accept: (p(x), q(x)) -> acceptance probability.
        reject: (p, q) -> distribution to sample from after a rejection.
        decide: Turns the probability into a decision.
        target: Transforms p.
        drafted: Transforms q.
        bonus: Transforms the distribution of the bonus token.
    """

    def verify(draft: Draft, probs: Probs, stream: Stream) -> Verdict:
        node, depth = -1, 0
        while True:
            p, children = target(probs[node + 1].double()), draft.children[node + 1]
            if not children and node >= 0:
                p = bonus(p)
            chosen = None
            for at, child in enumerate(children):
                q = drafted(_law_of(draft, node, at, p))
                token = draft.ids[child]
                if decide(stream, accept(float(p[token]), float(q[token])), child, depth):
                    chosen = child
                    break
                p = reject(p, q)
            if chosen is None:
                return Verdict(draft.path(node), stream.categorical(p, index=depth))
            node, depth = chosen, depth + 1

    return verify


def _law_of(draft: Draft, node: int, at: int, p: Tensor) -> Tensor:
    """Returns the distribution of child number ``at`` of ``node`` given its earlier siblings, float64 [V]."""
    tokens = [draft.ids[child] for child in draft.children[node + 1]]
    law = draft.law
    if isinstance(law, PointMass) or (isinstance(law, TopPlusSampled) and at < len(tokens) - 1):
        return F.one_hot(torch.tensor(tokens[at], device=p.device), p.shape[-1]).double()
    q = law.probs[node + 1].double().clone()
    if not isinstance(law, Sampled):
        q[tokens[:at]] = 0.0
    return normalized(q)


def planted(verifier: Verifier) -> Rule:
    """Returns a rule that uses ``verifier`` in the distribution grade and the right verifier elsewhere."""

    def rule(law: ProposalLaw, exactness: Exactness) -> Verifier:
        return verifier if exactness is Exactness.DISTRIBUTION else choose(law, exactness)

    return rule


PLANTS: Mapping[str, Rule] = {
    "a rejected token is replaced by a draw from p": planted(sequential(reject=lambda p, q: p)),
    "drafts are accepted with 2 p/q": planted(sequential(accept=lambda p, q: min(1.0, 2.0 * ratio(p, q)))),
}
"""The errors that an audit plants: the commonest mistake, and the commonest shortcut."""
