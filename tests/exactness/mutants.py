"""Mistakes seen in well-known code, planted one at a time into an otherwise exact decode step.

Each stands in for one part of a ``Pair``: its proposer, its target rows, its verifier, its stream or its cut.
``test_mutants`` shows that each is caught. An audit of another implementation should fail on them too.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from foretoken.core.context import Context, Exactness
from foretoken.core.distributions import Law
from foretoken.core.draft import Draft, Sampled, WithoutReplacement
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Purpose, Stream, Streams
from foretoken.core.verdict import Verdict
from foretoken.verify.residual import drawn_rows, excess, ratio

from .decode_step import Propose, Table, argmax, drawn, drawn_tree, node_logits, row_of, target_rows
from .enumerate import Text

# Proposers that report another law than they drew from


def argmax_with_softmax_q(model: Table) -> Propose:
    """The draft's argmax, verified as if it had been sampled from the softmax."""

    def propose(context: Context, budget: int) -> Draft:
        draft = argmax(model)(context, budget)
        rows = [row_of(model, context.law, context, draft.ids[:i]) for i in range(len(draft))]
        return Draft.chain(draft.tokens, Sampled(torch.stack(rows)))

    return propose


def reports_another_law(model: Table, drew: Law, reports: Law) -> Propose:
    """Sampled under ``drew``, reported under ``reports``: another temperature, or a top-k applied in silence."""

    def propose(context: Context, budget: int) -> Draft:
        draft = drawn(model, drew)(context, budget)
        rows = [row_of(model, reports, context, draft.ids[:i]) for i in range(len(draft))]
        return Draft.chain(draft.tokens, Sampled(torch.stack(rows)))

    return propose


def reports_in_bfloat16(model: Table) -> Propose:
    """Sampled from float64 rows, reported after rounding to bfloat16."""

    def propose(context: Context, budget: int) -> Draft:
        draft = drawn(model)(context, budget)
        assert isinstance(draft.law, Sampled)
        return Draft.chain(draft.tokens, Sampled(draft.law.probs.bfloat16().double()))

    return propose


# Proposers that look at what they drew before deciding what to verify


def drops_unlikely_tokens(model: Table, least: float) -> Propose:
    """The chain is cut before the first sampled token whose probability is under ``least``."""

    def keeps(draft: Draft, q: Tensor, i: int) -> bool:
        return float(q[i, draft.ids[i]]) >= least

    return _truncated(drawn(model), keeps)


def drops_illegal_tokens(model: Table, illegal: int) -> Propose:
    """The chain is cut before the first sampled token that a grammar forbids."""
    return _truncated(drawn(model), lambda draft, q, i: draft.ids[i] != illegal)


def _truncated(propose: Propose, keeps: Callable[[Draft, Tensor, int], bool]) -> Propose:
    def truncated(context: Context, budget: int) -> Draft:
        draft = propose(context, budget)
        assert isinstance(draft.law, Sampled)
        q = draft.law.probs
        length = next((i for i in range(len(draft)) if not keeps(draft, q, i)), len(draft))
        return Draft.chain(draft.tokens[:length], Sampled(q[:length]))

    return truncated


def prunes_unlikely_children(model: Table, least: float) -> Propose:
    """Two children sampled without replacement; those unlikely under q are dropped again."""

    def propose(context: Context, budget: int) -> Draft:
        draft = drawn_tree(model, (2,), replace=False)(context, budget)
        assert isinstance(draft.law, WithoutReplacement)
        kept = [token for token in draft.ids if float(draft.law.probs[0, token]) >= least]
        return Draft(tuple(kept), (-1,) * len(kept), draft.law) if kept else Draft.empty()

    return propose


def top_children_with_softmax_q(model: Table, kind: type[Sampled] | type[WithoutReplacement]) -> Propose:
    """The two most probable children of the root, verified as if they had been sampled from the softmax."""

    def propose(context: Context, budget: int) -> Draft:
        q = row_of(model, context.law, context)
        return Draft(tuple(q.topk(2).indices.tolist()), (-1, -1), kind(q[None]))

    return propose


def reports_replacement(model: Table) -> Propose:
    """Siblings sampled without replacement, verified as if they were independent."""

    def propose(context: Context, budget: int) -> Draft:
        draft = drawn_tree(model, (2, 1), replace=False)(context, budget)
        assert isinstance(draft.law, WithoutReplacement)
        return Draft(draft.ids, draft.parents, Sampled(draft.law.probs))

    return propose


# Target rows


def rows_without_parameters(context: Context, draft: Draft, target: Table) -> Tensor:
    """The bare softmax: temperature, filters and penalties forgotten."""
    return node_logits(context, draft, target).softmax(-1)


def bonus_without_parameters(context: Context, draft: Draft, target: Table) -> Tensor:
    """The sampling parameters reach every row but the bonus."""
    rows = target_rows(context, draft, target).clone()
    rows[-1] = node_logits(context, draft, target)[-1].softmax(-1)
    return rows


def rows_with_one_history(context: Context, draft: Draft, target: Table) -> Tensor:
    """Penalties, bad words and min_tokens with the root's history at every node."""
    return context.law.probs(node_logits(context, draft, target), [context.history()] * (len(draft) + 1))


# Verifiers


def token_rule(
    *,
    accept: Callable[[float, float], float] = lambda p, q: min(1.0, ratio(p, q)),
    rest: Callable[[Tensor, Tensor], Tensor] = lambda p, q: excess(p, q)[0],
    decide: Callable[[Stream, float, int], bool] = lambda stream, p, i: stream.bernoulli(p, index=i),
) -> Callable[[Draft, Tensor, Stream], Verdict]:
    """Token rejection with replaceable parts; as it stands it is the right rule."""

    def verify(draft: Draft, probs: Tensor, stream: Stream) -> Verdict:
        q = drawn_rows(draft, probs)
        for i, token in enumerate(draft.ids):
            if not decide(stream, accept(float(probs[i, token]), float(q[i, token])), i):
                weights = rest(probs[i], q[i])
                return Verdict(tuple(range(i)), stream.categorical(weights if weights.sum() > 0 else probs[i], index=i))
        n = len(draft)
        return Verdict(tuple(range(n)), stream.categorical(probs[n], index=n))

    return verify


def filtered_again(law: SamplingLaw) -> Callable[[Tensor, Tensor], Tensor]:
    """The residual goes through the sampling parameters a second time."""
    return lambda p, q: law.probs(excess(p, q)[0].log()[None], [])[0]


def zero_over_zero_accepts(p: float, q: float) -> float:
    """u q <= p instead of u q < p: what neither law can produce is accepted."""
    return min(1.0, p / q) if q > 0.0 else 1.0


def one_uniform_for_accept_and_residual(stream: Stream, p: float, index: int) -> bool:
    """The accept test reads the number that the residual draw will read again."""
    return stream.categorical(torch.tensor([p, 1.0 - p], dtype=torch.float64), index=index) == 0


def reseeded(stream: Stream, p: float, index: int) -> bool:
    """The generator is seeded again for every acceptance test, so that all of them see one number."""
    return stream.bernoulli(p, index=0)


def block_stops_at_first_failure(draft: Draft, probs: Tensor, stream: Stream) -> Verdict:
    """Block verification that breaks at the first u_i > h_i instead of taking the last u_i <= h_i."""
    return block_rule(draft, probs, stream, breaks=True)


def block_without_exit_weight(draft: Draft, probs: Tensor, stream: Stream) -> Verdict:
    """Block verification with h_i = Z_i, the 1 - w_i forgotten."""
    return block_rule(draft, probs, stream, normalizer=lambda mass, w: 1.0)


def block_rule(
    draft: Draft,
    probs: Tensor,
    stream: Stream,
    breaks: bool = False,
    normalizer: Callable[[float, float], float] = lambda mass, w: mass + (1.0 - w),
) -> Verdict:
    q, n, w = drawn_rows(draft, probs), len(draft), [1.0]
    for i, token in enumerate(draft.ids):
        w.append(min(1.0, w[-1] * ratio(float(probs[i, token]), float(q[i, token]))))
    tau = 0
    for i in range(1, n + 1):
        mass = excess(probs[i], q[i], w[i])[1] if i < n else 0.0
        below = normalizer(mass, w[i])
        if stream.bernoulli(w[n] if i == n else (mass / below if below > 0.0 else 1.0), index=i):
            tau = i
        elif breaks:
            break
    rest = excess(probs[tau], q[tau], w[tau])[0] if tau < n else probs[n]
    return Verdict(tuple(range(tau)), stream.categorical(rest if rest.sum() > 0 else probs[tau], index=tau))


def walk_of_every_path(draft: Draft, probs: Tensor, stream: Stream) -> Verdict:
    """The target draws again along each path, and the one that agrees longest wins: draws per path, not per prefix."""
    best: Verdict | None = None
    leaves = [node for node in range(len(draft)) if not draft.children[node + 1]]
    for leaf in leaves:
        path = draft.path(leaf)
        for depth, (above, node) in enumerate(zip((-1, *path), (*path, None), strict=True)):
            token = stream.categorical(probs[above + 1], index=100 * leaf + depth)
            if node is None or token != draft.ids[node]:
                if best is None or depth > len(best.path):
                    best = Verdict(path[:depth], token)
                break
    assert best is not None
    return best


def settled(mass: float, weight: float) -> float:
    """pa <- Z / (Z + 1 - pa)."""
    left = mass + (1.0 - weight)
    return mass / left if left > 0.0 else 1.0


def traversal_rule(
    *,
    weight_of: Callable[[float, float], float] = settled,
    below: Callable[[float, float], float] = lambda pa, ratio: min(1.0, pa * ratio),
    exclude: bool = True,
) -> Callable[[Draft, Tensor, Stream], Verdict]:
    """Traversal verification of a tree sampled without replacement, leaf by leaf as in the paper, with replaceable
    parts; unchanged it is the right rule."""

    def verify(draft: Draft, probs: Tensor, stream: Stream) -> Verdict:
        q = [row.clone() for row in drawn_rows(draft, probs)]
        p = [row.clone() for row in probs]
        weight, alive = [1.0] * (len(draft) + 1), [True] * len(draft)

        def reweigh(node: int) -> None:
            for child in draft.children[node + 1]:
                token = draft.ids[child]
                weight[child + 1] = below(weight[node + 1], ratio(float(p[node + 1][token]), float(q[node + 1][token])))
                reweigh(child)

        reweigh(-1)
        while True:
            leaf = -1
            while left := [c for c in draft.children[leaf + 1] if alive[c]]:
                leaf = left[0]
            if leaf < 0 or stream.bernoulli(weight[leaf + 1], index=leaf):
                return Verdict(draft.path(leaf), stream.categorical(p[leaf + 1], index=leaf + 1))
            alive[leaf] = False
            row = draft.parents[leaf] + 1
            rest, mass = excess(p[row], q[row], weight[row])
            weight[row] = weight_of(mass, weight[row])
            p[row] = rest / mass if mass > 0.0 else p[row]
            if exclude:
                q[row][draft.ids[leaf]] = 0.0
                q[row] = q[row] / q[row].sum() if float(q[row].sum()) > 0.0 else q[row]
            reweigh(row - 1)

    return verify


def removed_by_subtraction(q: Tensor, tokens: list[int]) -> Tensor:
    """q without ``tokens``, renormalized by 1 - q[tokens] in float32: for a sharp q, rounding over rounding."""
    left = q.double().clone()
    left[tokens] = 0.0
    mass = float(1.0 - q[tokens].float().sum())
    return left / mass if mass > 0.0 else left


def excess_by_subtraction(p: Tensor, q: Tensor, weight: float = 1.0) -> tuple[Tensor, float]:
    """The residual's mass as w - sum min(w p, q): not quite 0 where nothing is left to draw from."""
    rest = (p.double() * weight - q.double()).clamp_(min=0.0)
    return rest, max(0.0, weight - float(torch.minimum(p.double() * weight, q.double()).sum()))


# Streams and cuts


def verifying_with_the_drafts_numbers(exactness: Exactness, streams: Streams, position: int) -> Stream:
    return streams.private(Purpose.DRAFT, position)


def drafting_with_shared_noise(model: Table) -> Propose:
    """Sampled with the noise of the trajectory grade, verified as an independent draw."""

    def propose(context: Context, budget: int) -> Draft:
        stream = context.streams.shared(context.generated)
        tokens: list[int] = []
        rows: list[Tensor] = []
        for index in range(budget):
            rows.append(row_of(model, context.law, context, tokens))
            tokens.append(stream.categorical(rows[-1], index=index))
        return Draft.chain(tokens, Sampled(torch.stack(rows))) if rows else Draft.empty()

    return propose


def judged_by_the_last_token(text: Text, added: Text) -> Text:
    """A whole block is emitted before anyone looks whether the text has ended in it."""
    return added
