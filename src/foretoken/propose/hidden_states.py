"""Proposers that read the target's hidden states with a small network: what they keep of each sequence."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.sampling import SamplingLaw
from foretoken.models.base import Scores
from foretoken.models.chains import DraftStop
from foretoken.models.heads.feature_net import DraftNet, FeatureNet, HeadHandle
from foretoken.models.runners.pass_plan import Tapped, TapRows, tapped_rows
from foretoken.propose.base import Needs, Observation, Proposer
from foretoken.propose.chain import draft_at_once
from foretoken.propose.growers import Grower, GrowthConfig, RankedTreeGrower, TreeKind, begin, is_drawn
from foretoken.propose.tree import Candidates, Tree, likeliest

# A greedy target emits the argmax of logits that the head only approximates, so candidates are ranked by a sharper
# distribution. The value was the best on the bundled pair.
SHARPER = SamplingLaw(temperature=0.7)
MAX_PENDING = 512  # rows of a sequence whose states may wait for the head, whatever their memory
MAX_PENDING_BYTES = 8 * 2**20  # more rows may wait while they take no more memory than this
LATE_STEPS = 256  # steps without drafts whose states are noted before they are read
MAX_WASTE = 8  # times the memory of the noted states that may be held for them, as part of larger passes
LEVELS = 5  # of a draft in one call, by default, if each takes a pass of the head
_NO_ROWS = torch.empty(0, 0)

LateStates = tuple[Context, Mapping[int, Tensor], int, int, Sequence[int]]
"""Sequence, taps, position of their first row, slot, and the rows of committed tokens."""


@dataclass(frozen=True, slots=True)
class HeadGrowth(GrowthConfig):
    """Growth of a head's drafts.

    tree: See ``GrowthConfig``. None is "at_once" where the runner drafts in one call, which takes a fraction of the
    time, and "sampled" elsewhere, which had the highest acceptance for sampled requests.
    """

    tree: TreeKind | None = None  # type: ignore[assignment]
    top_k: int = 8

    def __post_init__(self) -> None:
        GrowthConfig.__post_init__(self if self.tree is not None else replace(self, tree="sampled"))

    def suited(self, net: DraftNet) -> "HeadGrowth":
        """Returns the configuration for a head, with the tree that suits it where none is named."""
        if self.tree is not None:
            return self
        if not net.drafts_chains:
            return replace(self, tree="sampled")
        return replace(self, tree="at_once", num_steps=self.num_steps or (None if net.foresees else LEVELS))


class HiddenStateProposer(Proposer):
    """Drafts with ``net`` from the target's layers ``taps``; all sequences of a step share a pass per level.

    The step that computes the end of a prompt has no draft: no hidden state is known before that pass.
    """

    def __init__(self, name: str, net: DraftNet, taps: Sequence[int], config: GrowthConfig) -> None:
        self.name, self.net = name, net
        self.config = config.suited(net) if isinstance(config, HeadGrowth) else config
        self.taps = tuple(taps)
        self.needs = Needs(tuple(sorted(set(taps))))
        self._handles: dict[int, HeadHandle] = {}
        self._known: dict[int, int] = {}  # by sequence: number of positions whose states were seen
        self._growers: dict[int, RankedTreeGrower] = {}  # by sequence: the last one, which may serve again
        self._late: dict[int, list[LateStates]] = {}  # by sequence, see ``observe``
        self._drafting = True  # whether the last step drafted for any sequence

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        self._drafting = any(budget > 0 for budget in budgets)
        if self._drafting:
            self._read()
        growers = {
            i: (self._handles[context.id], self._grower(context, budget))
            for i, (context, budget) in enumerate(zip(contexts, budgets, strict=True))
            if budget > 0 and self._ready(context, budget)
        }
        levels = (self.config.steps(budgets[i], is_drawn(contexts[i], contexts[i].law)) for i in growers)
        drafted = dict(zip(growers, self._grow(list(growers.values()), levels), strict=True)) if growers else {}
        return [drafted.get(i, Draft.empty()) for i in range(len(contexts))]

    def ends_early(self, context: Context) -> bool:
        return context.law.greedy and self.net.adapts_levels and self.config.is_chain(drawn=False)

    def reusable_prefix_len(self, context: Context) -> int:
        self.forget(context)
        if len(context.tokens) > self.net.max_length:
            return len(context.tokens)  # too long to draft for
        handle = self._handles[context.id] = self.net.open(context.tokens, context.scope)
        self._known[context.id] = handle.cached
        return handle.cached

    def prefill(self, contexts: Sequence[Context], scores: Sequence[Scores]) -> None:
        """Keeps the states of a prefill chunk. If sequences are being drafted for, the head processes it at once: the
        whole prompt after its last chunk would delay them.
        """
        for context, score in zip(contexts, scores, strict=True):
            self._keep(context, score, range(tapped_rows(score.taps)))
        if self._drafting:
            for context in contexts:
                if (handle := self._handles.get(context.id)) is not None:
                    self.net.prefill(handle)

    def observe(self, contexts: Sequence[Context], observations: Sequence[Observation]) -> None:
        """Notes the committed tokens and the target's states before them. They are read in a step that drafts, at the
        end of a sequence whose rows others may use, or after ``LATE_STEPS``: mostly never in a text without drafts.
        """
        ended, due, held, used = list[Context](), False, 0, 0
        for context, observation in zip(contexts, observations, strict=True):
            step, scores, taps = observation.step, observation.scores, observation.scores.taps
            known = tapped_rows(taps) - len(step.draft.ids)  # the rows of committed tokens precede the draft's
            path = step.verdict.path[: max(0, len(step.tokens) - 1)]
            rows = [*range(known), *[known + node for node in path]] if path else range(known)
            late = self._late.setdefault(context.id, [])
            late.append((context, taps, scores.first, scores.slot, rows))
            if isinstance(taps, Tapped):
                held, used, due = max(held, taps.held), used + len(rows), due or len(late) >= LATE_STEPS
            else:  # a device overwrites its states
                due = True
            if step.finish_reason is not None and self.net.keeps:
                ended.append(context)
        if ended or due or held > MAX_WASTE * used:
            self._read()
            for context in ended:
                self._cache_end(context)

    def _read(self) -> None:
        """Keeps the states of all steps that were noted, those of a sequence in one array."""
        late, self._late = self._late, {}
        for (context, taps, first, slot, rows), *others in late.values():
            end, parts = first + len(rows), [(taps, rows)]
            while others and others[0][2] == end and isinstance(taps, Tapped):
                parts.append((others[0][1], others[0][4]))
                end += len(others.pop(0)[4])
            if len(parts) > 1:
                taps, rows = Tapped.joined(parts), range(end - first)
            self._keep(context, Scores(_NO_ROWS, taps, first, slot), rows)
            for _, taps, first, slot, rows in others:
                self._keep(context, Scores(_NO_ROWS, taps, first, slot), rows)

    def replace(self, net: FeatureNet) -> None:
        """Drafts with another version of the network from the next step on. Cached rows are kept."""
        assert isinstance(self.net, FeatureNet)
        net.adopt(self.net)
        self.net = net

    @property
    def kv_bytes_per_token(self) -> int:
        return self.net.kv_bytes_per_token

    def enable_prefix_cache(self, max_bytes: int) -> None:
        self.net.enable_prefix_cache(max_bytes)

    def forget(self, context: Context) -> None:
        self._late.pop(context.id, None)
        self._known.pop(context.id, None)
        self._growers.pop(context.id, None)
        handle = self._handles.pop(context.id, None)
        if handle is not None:
            self.net.close(handle)

    # drafting

    def _grow(self, active: Sequence[tuple[HeadHandle, Grower]], levels: Iterable[int]) -> list[Draft]:
        """Returns the drafts of all sequences, grown a level with each pass, or all levels in one call.

        levels: Maximum depth of each draft.
        """
        drafts = draft_at_once(self.net, active, self.net.vocab_size)
        growers = [grower for _, grower in active]
        if active := [pair for pair, draft in zip(active, drafts, strict=True) if draft is None]:
            self._extend(active, self.net.catch_up([handle for handle, _ in active]))
        while active := [(handle, grower) for handle, grower in active if not grower.done]:
            nodes = [grower.growing() for _, grower in active]
            self._extend(active, self.net.grow([handle for handle, _ in active], nodes))
        return [grower.draft() if draft is None else draft for draft, grower in zip(drafts, growers, strict=True)]

    def _extend(self, active: Sequence[tuple[HeadHandle, Grower]], rows: Sequence[Tensor]) -> None:
        for (handle, grower), logits in zip(active, rows, strict=True):
            grower.extend(logits, self._hidden(handle))

    def _hidden(self, handle: HeadHandle) -> Tensor | None:
        """Returns the state at a chain's last node, [1, H], if a score reads it."""
        return None

    def _ready(self, context: Context, budget: int) -> bool:
        """Returns whether the states at all tokens but the newest are known, and the draft fits the context window."""
        complete = self._known.get(context.id) == len(context.tokens) - 1
        fits = len(context.tokens) + budget <= self.net.max_length
        return complete and fits and self._handles[context.id].num_pending > 0

    def _grower(self, context: Context, budget: int, stop: DraftStop | None = None) -> Grower:
        kept = self._growers.get(context.id)
        if kept is not None and kept.budget == budget and not kept.tree.level and context.end is None:
            return kept
        grower = begin(
            self.config,
            context,
            budget,
            self.net.to_target,
            context.law,
            self._greedy_rank,
            greedy_temperature=SHARPER.temperature,
            stop=stop,
        )
        if isinstance(grower, RankedTreeGrower) and grower.rank == self._greedy_rank and context.end is None:
            self._growers[context.id] = grower
        return grower

    def _greedy_rank(self, logits: Tensor, tree: Tree) -> Candidates:
        """Ranks the draft's own tokens; no distribution over the target's whole vocabulary is needed."""
        scores, ids = likeliest(SHARPER.probs(logits, ()), self.config.top_k)
        return Candidates(scores, self.net.target_ids(ids))

    # committed tokens

    def _keep(self, context: Context, scores: Scores, rows: Sequence[int]) -> None:
        """Gives the head the states at ``rows`` of ``scores``, those of tokens from position ``scores.first`` on.

        Without drafts the head only processes what exceeds ``MAX_PENDING``, which would otherwise hold memory
        until the end of the text.
        """
        if len(context.tokens) > self.net.max_length:
            return
        handle = self._handles.get(context.id)
        if handle is None:  # after a step that was abandoned: earlier states are missing
            handle = self._handles[context.id] = self.net.open()
        known = self._known.get(context.id, scores.first)
        # Where prompt tokens were scored as a draft, the last row is the newest token's: the token after it is unknown.
        own = rows[known - scores.first : len(context.tokens) - 1 - scores.first]
        if own:
            taken, pending = TapRows.of(scores.taps, self.taps, own), handle.num_pending
            if pending > MAX_PENDING and pending * taken.bytes_per_row > MAX_PENDING_BYTES:
                self.net.prefill(handle)
            self.net.append(handle, context.tokens[known + 1 : known + 1 + len(own)], taken)
            self._known[context.id] = known + len(own)

    def _cache_end(self, context: Context) -> None:
        """Completes the KV cache of a finished text for later texts with that prefix.

        This is also done if nothing was drafted: the target's own cache is of use only up to the head's last row.
        """
        handle = self._handles.get(context.id)
        if handle is not None and handle.root is not None and handle.num_pending:
            self.net.complete(handle)
