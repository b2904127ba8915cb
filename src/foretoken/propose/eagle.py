"""EAGLE (2401.15077, 2406.16858, 2503.01840): a small layer on the target's own hidden states drafts a dynamic tree.

Candidates are ranked as EAGLE-2 does; where the request draws they are drawn too, so that verification can use the law
that they were drawn from. In the trajectory grade they lead the race with the noise that the target will use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.models.base import Scores
from foretoken.models.heads.eagle_net import EagleNet, HeadHandle
from foretoken.models.heads.loading import load_eagle
from foretoken.models.heads.taps import Reading
from foretoken.propose.base import Method, Needs, Observation, Proposer, Workshop
from foretoken.propose.growers import Grower, GrowthConfig, Shape, begin
from foretoken.propose.tree import Candidates, Tree, likeliest

# A greedy target goes to the argmax of logits that the head's are off from, so guesses are ranked as if sharper: what
# was best on the bundled pair. Compare ``tree.RACE_SCALE``.
GREEDY_SCALE = 0.7


@dataclass(frozen=True, slots=True)
class EagleConfig(GrowthConfig):
    """How the head drafts: by default trees whose siblings are drawn, which accepted most where requests draw."""

    tree: Shape = "sampled"
    top_k: int = 8


class Eagle(Proposer):
    """Drafts with ``net`` from the target's layers ``taps``; all sequences of a round share a pass per level.

    The round that computes the end of a sequence's prompt goes without a draft: nothing is known before that pass.
    """

    def __init__(
        self, net: EagleNet, taps: Sequence[int], config: EagleConfig | None = None, reading: Reading | None = None
    ) -> None:
        """reading: how the head's ids of layers were understood, where that had to be measured."""
        self.name = "eagle3" if net.joined else "eagle"
        self.net, self.config, self.reading = net, config or EagleConfig(), reading
        self.taps = tuple(taps)
        self.needs = Needs(tuple(sorted(set(taps))))
        self._handles: dict[int, HeadHandle] = {}
        self._unread: dict[int, list[tuple[list[int], list[Tensor]]]] = {}  # by sequence: tokens, states before them
        self._known: dict[int, int] = {}  # by sequence: positions whose states were seen
        self._drafting = True  # whether the last round drafted for anybody

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        self._drafting = any(budget > 0 for budget in budgets)
        growers = {
            i: (self._handles[context.id], self._grower(context, budget))
            for i, (context, budget) in enumerate(zip(contexts, budgets, strict=True))
            if budget > 0 and self._ready(context, budget)
        }
        active = list(growers.values())
        if active:
            self._read([contexts[i].id for i in growers])
            _extend(active, self.net.catch_up([handle for handle, _ in active]))
        while active := [(handle, grower) for handle, grower in active if not grower.done]:
            drafts = [grower.growing() for _, grower in active]
            _extend(active, self.net.grow([handle for handle, _ in active], drafts))
        return [growers[i][1].draft() if i in growers else Draft.empty() for i in range(len(contexts))]

    def join(self, context: Context) -> int:
        self.forget(context)
        if len(context.tokens) > self.net.max_length:
            return len(context.tokens)  # nobody will draft for it
        handle = self._handles[context.id] = self.net.open(context.tokens, context.cache_salt)
        self._known[context.id] = handle.cached
        return handle.cached

    def read(self, contexts: Sequence[Context], scores: Sequence[Scores]) -> None:
        """Pieces of long prompts are read as they come where sequences are drafted for: all at once, behind the last
        piece, would keep the others waiting.
        """
        for context, score in zip(contexts, scores, strict=True):
            self._keep(context, score, range(len(score.taps[self.taps[0]])))
        if self._drafting:
            ids = [context.id for context in contexts if context.id in self._unread]
            self._read(ids)
            for identifier in ids:
                self.net.read(self._handles[identifier])

    def observe(self, contexts: Sequence[Context], observations: Sequence[Observation]) -> None:
        """Keep every sequence's newly committed tokens and the target's states before them: a round that drafts reads
        them, and one that does not pays nothing.
        """
        for context, seen in zip(contexts, observations, strict=True):
            step, scores = seen.step, seen.scores
            known = len(scores.taps[self.taps[0]]) - len(step.draft)  # rows of committed tokens, then the draft's
            path = step.verdict.path[: max(0, len(step.tokens) - 1)]
            self._keep(context, scores, [*range(known), *(known + node for node in path)])
            if step.finish_reason is not None:
                self._leave_behind(context)

    @property
    def row_bytes(self) -> int:
        return self.net.row_bytes

    def keep(self, limit: int) -> None:
        self.net.keep(limit)

    def forget(self, context: Context) -> None:
        self._unread.pop(context.id, None)
        self._known.pop(context.id, None)
        handle = self._handles.pop(context.id, None)
        if handle is not None:
            self.net.close(handle)

    # a round

    def _ready(self, context: Context, budget: int) -> bool:
        """Whether a round has shown the states at all tokens but the newest, and there is room."""
        seen = self._known.get(context.id) == len(context.tokens) - 1
        fed = context.id in self._unread or (seen and bool(self._handles[context.id].pending))
        return seen and fed and len(context.tokens) + budget <= self.net.max_length

    def _grower(self, context: Context, budget: int) -> Grower:
        return begin(self.config, context, budget, self.net.to_target, context.law, self._sharpest)

    def _sharpest(self, logits: Tensor, tree: Tree) -> Candidates:
        """The likeliest of the draft's own tokens: no law over the target's whole vocabulary is needed."""
        scores, ids = likeliest((logits / GREEDY_SCALE).softmax(-1), self.config.top_k)
        return Candidates(scores, self.net.target_ids(ids))

    # the truth

    def _read(self, sequences: Sequence[int]) -> None:
        """What these sequences committed since they last drafted, as features."""
        pieces = [(self._handles[i], *piece) for i in sequences for piece in self._unread.pop(i, [])]
        if not pieces:
            return
        layers = zip(*(states for *_, states in pieces), strict=True)
        features = self.net.features(torch.cat([torch.cat(layer) for layer in layers], dim=-1))
        parts = features.split([len(states[0]) for *_, states in pieces])
        for (handle, tokens, _), part in zip(pieces, parts, strict=True):
            self.net.extend(handle, tokens, part)

    def _keep(self, context: Context, scores: Scores, rows: Sequence[int]) -> None:
        """``rows`` of ``scores`` are those of committed tokens from position ``scores.first`` on.

        They are not put together before they are read: in rounds without a draft this is all that the head costs.
        """
        if len(context.tokens) > self.net.max_length:
            return
        if context.id not in self._handles:
            self._handles[context.id] = self.net.open()  # of a round that was given up: what came before is missing
        known = self._known.get(context.id, scores.first)
        own = list(rows[known - scores.first :])
        if own:
            whole = own[-1] - own[0] + 1 == len(own)  # as nearly always: a slice, which takes no copy
            chosen = slice(own[0], own[-1] + 1) if whole else own
            states = [scores.taps[layer][chosen] for layer in self.taps]
            tokens = context.tokens[known + 1 : known + 1 + len(own)]
            self._unread.setdefault(context.id, []).append((tokens, states))
            self._known[context.id] = known + len(own)

    def _leave_behind(self, context: Context) -> None:
        """A text that is over may be the beginning of a later one, which then finds its rows, up to the last. Where the
        head never drafted, nothing is computed for that.
        """
        handle = self._handles.get(context.id)
        if handle is not None and handle.states is not None and self.net.keeps and context.id in self._unread:
            self._read([context.id])
            self.net.catch_up([handle])


def _extend(active: Sequence[tuple[HeadHandle, Grower]], rows: Sequence[Tensor]) -> None:
    """rows: for each, logits [new, Vd] over the draft's vocabulary."""
    for (_, grower), logits in zip(active, rows, strict=True):
        grower.extend(logits)


def build(config: EagleConfig, workshop: Workshop) -> Eagle:
    """The head that "model" names, or the one that comes with the target."""
    loaded = load_eagle(workshop.target, workshop.tokenizer, workshop.model, workshop.path)
    return Eagle(loaded.net, loaded.taps, config, loaded.reading)


METHOD = Method(EagleConfig, build, tokens=8)
