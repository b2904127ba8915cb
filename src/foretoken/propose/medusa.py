"""Medusa (2401.10774) and blockwise decoding (1811.03115): heads predict the next positions at once.

They read the last hidden state. The best tree of their candidates is drafted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.checks import integer
from foretoken.core.context import Context, Exactness
from foretoken.core.draft import Draft
from foretoken.core.streams import SharedStream
from foretoken.models.heads.files import find_head
from foretoken.models.heads.loading import check_vocabulary, check_width
from foretoken.models.heads.medusa import BlockwiseNet, MedusaNet, ParallelNet, read_blockwise, read_medusa
from foretoken.propose.base import BuildContext, Method, Needs, Observation, Proposer
from foretoken.propose.tree import best_first, drafting_probs, kernel_candidates, likeliest, racing


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """Candidates of the heads."""

    # candidates of each head; the best paths through them are drafted, within the budget; 1 makes a chain
    top_k: int = 8
    num_steps: int | None = None  # maximum number of heads used; None uses all

    def __post_init__(self) -> None:
        integer("top_k", self.top_k, 1)
        integer("num_steps", self.num_steps, 1, optional=True)


class Parallel(Proposer):
    """Drafts fixed candidates from ``net``, all sequences of a step at once.

    The input is the target's normed state at the row that emitted the newest token, so the step that computes the
    prompt has no draft. In the trajectory grade candidates lead the race with the noise that the target will use.
    layers: Number of layers of the target, whose output is tapped.
    """

    def __init__(self, name: str, net: ParallelNet, layers: int, config: MedusaConfig | None = None) -> None:
        self.name, self.net, self.config = name, net, config or MedusaConfig()
        self.needs = Needs((layers,))
        self._tap = layers
        self._states: dict[int, Tensor] = {}

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        drafts = [Draft.empty()] * len(contexts)
        active = [i for i, context in enumerate(contexts) if budgets[i] > 0 and context.id in self._states]
        if active:
            logits = self.net(torch.stack([self._states[contexts[i].id] for i in active]))[:, : self.config.num_steps]
            for i, rows in zip(active, logits, strict=True):
                drafts[i] = self._draft(contexts[i], rows, budgets[i])
        return drafts

    def observe(self, contexts: Sequence[Context], observations: Sequence[Observation]) -> None:
        for context, observation in zip(contexts, observations, strict=True):
            step, rows = observation.step, observation.scores.taps[self._tap]
            accepted = step.verdict.path[: len(step.tokens) - 1]
            deepest = accepted[-1] if accepted else -1  # -1 is the root: the row before the draft's
            self._states[context.id] = rows[len(rows) - len(step.draft) + deepest].clone()

    def forget(self, context: Context) -> None:
        self._states.pop(context.id, None)

    def _draft(self, context: Context, logits: Tensor, budget: int) -> Draft:
        """Returns a draft from logits [depth, V]. Heads do not see each other's tokens, so every row has the root's
        history.
        """
        law = context.law.with_temperature(1.0) if context.law.greedy else context.law
        races = context.exactness is Exactness.TRAJECTORY and not context.law.greedy
        stream = context.streams.shared(context.generated) if races else None
        if stream is None or isinstance(stream, SharedStream):
            candidates = kernel_candidates(law, logits, self.config.top_k, stream)
            if candidates is not None:
                return best_first(candidates.scores, candidates.ids, budget)
        histories = [context.history()] * len(logits) if law.needs_history else ()
        probs = drafting_probs(law, logits, histories)
        if stream is not None:
            raced = [racing(probs[i : i + 1], self.config.top_k, stream, i) for i in range(len(probs))]
            return best_first(torch.cat([r.scores for r in raced]), torch.cat([r.ids for r in raced]), budget)
        candidates = likeliest(probs, self.config.top_k)
        return best_first(candidates.scores, candidates.ids, budget)


def build(config: MedusaConfig, build_context: BuildContext) -> Parallel:
    target = build_context.target
    folder = find_head("medusa", build_context.model, build_context.path)
    heads = read_medusa(folder)
    check_width("Medusa checkpoint", folder, heads.hidden, target)
    check_vocabulary("Medusa checkpoint", folder, heads.vocab, target)
    return Parallel("medusa", MedusaNet(heads, target.dtype, target.device, target.unembed), target.num_layers, config)


METHOD = Method(MedusaConfig, build, tokens=8, drafts_trees=True, takes_draft_model=True)


@dataclass(frozen=True, slots=True)
class BlockwiseConfig(MedusaConfig):
    """As ``MedusaConfig``; by default the paper's chain, with a larger ``top_k`` a tree."""

    top_k: int = 1


def build_blockwise(config: BlockwiseConfig, build_context: BuildContext) -> Parallel:
    target = build_context.target
    folder = find_head("blockwise", build_context.model, build_context.path)
    heads = read_blockwise(folder)
    check_width("blockwise checkpoint", folder, heads.hidden, target)
    net = BlockwiseNet(heads, target.dtype, target.device, target.unembed)
    return Parallel("blockwise", net, target.num_layers, config)


BLOCKWISE = Method(BlockwiseConfig, build_blockwise, drafts_trees=True, takes_draft_model=True)
