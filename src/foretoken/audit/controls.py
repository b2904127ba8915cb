"""Wrong verifiers, to be found: an audit that does not find one cannot vouch for anything.

All are one rule with one part replaced. It judges children one after another, as recursive rejection does (2305.09781),
whatever the draft's law: a fixed candidate counts as drawn from the one-hot law, so it is accepted with p(x) and leaves
p without x. As it stands it is exact.
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
from foretoken.verify.residual import excess, normalised, ratio
from foretoken.verify.rows import Probs

Accept = Callable[[float, float], float]
Reshape = Callable[[Tensor], Tensor]


def fair(p: float, q: float) -> float:
    """min(1, p/q)."""
    return min(1.0, ratio(p, q))


def rest_of(p: Tensor, q: Tensor) -> Tensor:
    """norm((p - q)+); p where nothing is left."""
    rest, mass = excess(p, q)
    return rest / mass if mass > 0.0 else p


def own_number(stream: Stream, p: float, child: int, depth: int) -> bool:
    """A number that nothing else reads."""
    return stream.bernoulli(p, index=child)


def unchanged(row: Tensor) -> Tensor:
    """The law as it is."""
    return row


def sequential(
    *,
    accept: Accept = fair,
    rest: Callable[[Tensor, Tensor], Tensor] = rest_of,
    decide: Callable[[Stream, float, int, int], bool] = own_number,
    target: Reshape = unchanged,
    drafted: Reshape = unchanged,
    bonus: Reshape = unchanged,
) -> Verifier:
    """The rule with replaceable parts.

    accept: (p(x), q(x)) -> probability. rest: (p, q) -> what is drawn from after a rejection. decide: how the
    probability becomes a decision. target, drafted, bonus: what p, q and the row below the last node are taken for.
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
                p = rest(p, q)
            if chosen is None:
                return Verdict(draft.path(node), stream.categorical(p, index=depth))
            node, depth = chosen, depth + 1

    return verify


def _law_of(draft: Draft, node: int, at: int, p: Tensor) -> Tensor:
    """[V], float64: what the child number ``at`` of ``node`` was drawn from, its earlier siblings known."""
    tokens = [draft.ids[child] for child in draft.children[node + 1]]
    law = draft.law
    if isinstance(law, PointMass) or (isinstance(law, TopPlusSampled) and at < len(tokens) - 1):
        return F.one_hot(torch.tensor(tokens[at], device=p.device), p.shape[-1]).double()
    q = law.probs[node + 1].double().clone()
    if not isinstance(law, Sampled):
        q[tokens[:at]] = 0.0
    return normalised(q)


def tempered(power: float) -> Reshape:
    """norm(row ^ power): the law at another temperature."""
    return lambda row: normalised(row**power)


def planted(verifier: Verifier) -> Rule:
    """``verifier`` where the distribution is promised, the right rule elsewhere."""

    def rule(law: ProposalLaw, exactness: Exactness) -> Verifier:
        return verifier if exactness is Exactness.DISTRIBUTION else choose(law, exactness)

    return rule


PLANTS: Mapping[str, Rule] = {
    "a rejected token is replaced by a draw from p": planted(sequential(rest=lambda p, q: p)),
    "drafts are accepted with 2 p/q": planted(sequential(accept=lambda p, q: min(1.0, 2.0 * ratio(p, q)))),
}
"""What an audit plants: the commonest mistake, and the commonest temptation."""
