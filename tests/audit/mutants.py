"""The mistakes of well-known code that a rule or a proposer can make, planted into an engine.

Omitted are those that no sample of texts shows, as roundings, and those that other tests own: stopping inside a block,
and parameters that a verifier never sees.
"""

from collections.abc import Callable

import torch
from tests.exactness import mutants as rounds

from foretoken.audit.negative import PLANTS, planted, sequential
from foretoken.core.draft import Draft, Sampled
from foretoken.core.sampling import SamplingLaw
from foretoken.propose.base import Proposer
from foretoken.verify import Rule, typical
from foretoken.verify.residual import excess, normalized
from foretoken.verify.rows import dense


def filtered_again(p, q):
    rest = excess(p, q)[0]
    return SamplingLaw(top_p=0.6).probs(rest.log()[None], [])[0] if float(rest.sum()) > 0 else p


def shared_number(stream, p, child, depth):
    """The accept test reads the number of the residual draw."""
    return stream.categorical(torch.tensor([p, 1.0 - p], dtype=torch.float64), index=depth) == 0


RULES: dict[str, Rule] = {
    **PLANTS,
    "the draft's law at another temperature": planted(sequential(drafted=lambda row: normalized(row**0.5))),
    "target rows at another temperature": planted(sequential(target=lambda row: normalized(row**1.3))),
    "bonus row without its processors": planted(sequential(bonus=lambda row: normalized(row**2.0))),
    "residual filtered again": planted(sequential(reject=filtered_again)),
    "one number for accept and residual": planted(sequential(decide=shared_number)),
    "reseeded for every accept": planted(sequential(decide=lambda s, p, child, depth: s.bernoulli(p, index=0))),
    "rejects whenever p < q": planted(sequential(accept=lambda p, q: float(p >= q))),
    "draws its residual unnormalized by siblings": planted(sequential(reject=lambda p, q: normalized(p + q))),
    "block stops at the first failure": planted(lambda d, p, s: rounds.block_stops_at_first_failure(d, dense(p), s)),
    "block without exit weight": planted(lambda d, p, s: rounds.block_without_exit_weight(d, dense(p), s)),
    "typical acceptance": planted(typical.verify),
}


STRENGTHS = {
    "bonus row without its processors": 0.1,  # bonus tokens come where the draft agrees
    "residual filtered again": 0.9,
    "one number for accept and residual": 0.9,
    "reseeded for every accept": 0.9,
    "block without exit weight": 0.9,
}
"""How far the draft is from the target where not half way: errors of a residual need one."""


class Tampered(Proposer):
    """Another proposer, whose drafts are changed after they were sampled."""

    def __init__(self, other: Proposer, change: Callable[[Draft], Draft]) -> None:
        self.other, self.change = other, change

    def propose(self, contexts, budgets):
        return [self.change(draft) if len(draft) else draft for draft in self.other.propose(contexts, budgets)]

    def observe(self, contexts, observations):
        self.other.observe(contexts, observations)

    def forget(self, context):
        self.other.forget(context)


def argmax_with_softmax_q(draft: Draft) -> Draft:
    q = draft.law.probs[:1]
    return Draft.chain([int(q.argmax())], Sampled(q))


def drops_unlikely(draft: Draft) -> Draft:
    """Cut before the first sampled token that its own law found unlikely."""
    q = draft.law.probs
    keep = next((i for i, token in enumerate(draft.ids) if float(q[i, token]) < 0.15), len(draft))
    return Draft.chain(draft.tokens[:keep], Sampled(q[:keep])) if keep else Draft.empty()


def silent_top_k(draft: Draft) -> Draft:
    """Sampled among the likeliest three, reported as sampled from all."""
    q = draft.law.probs
    best = q[0].topk(3).indices.tolist()
    return Draft.chain([draft.ids[0] if draft.ids[0] in best else best[0]], Sampled(q[:1]))


PROPOSERS: dict[str, Callable[[Draft], Draft]] = {
    "argmax draft with softmax q": argmax_with_softmax_q,
    "drops drawn tokens that look unlikely": drops_unlikely,
    "a draft's top-k in silence": silent_top_k,
}
