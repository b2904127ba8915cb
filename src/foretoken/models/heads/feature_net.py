"""A small network on a target's hidden states, on our runtime, with its own KV cache: the base of EAGLE and MTP.

Row i of its cache is computed from the token at i + 1 and the target's features at i, and predicts the token at i + 2.
So the row of a sequence's newest token needs the features of the token before it, which the target's last pass
computed. Drafting starts there, and feeds the network's own outputs down the tree. These rows are dropped after
verification.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.models.base import Handle
from foretoken.models.chains import ChainRequest, DraftVocabulary, ModelChain, TokenLogits
from foretoken.models.heads.weights import TargetHead
from foretoken.models.runners.base import DeeperLayer, Pass, Runner
from foretoken.models.runners.pass_plan import Part, PassPlan, TapRows

PREFILL_ROWS = 256  # rows of one prefill pass
JOINT_ROWS = 32  # a sequence with more pending rows than this is prefilled first, by passes without logits
_NEXT = -1  # stands for the next token in a lookup of the prefix cache: no cached row has it


@dataclass(eq=False, slots=True)
class HeadHandle(Handle):
    """A sequence in the head's cache; its ``tokens`` are the target's from the second on."""

    fresh: list[Tensor] = field(default_factory=list)  # features [n, H] of the pending tokens, as a list of tensors
    # the target's states that the features of the newest pending tokens are made from, in the same order
    taps: list[TapRows] = field(default_factory=list)
    # the layer's outputs [1 + nodes, H] at the newest token and at the cached nodes: the features of their children
    states: Tensor | None = None
    # the target's first token; None if it is unknown or rows are missing, so that no row can be shared
    root: int | None = None
    # list of the layer's outputs at committed tokens, for a layer that reads them; None if no layer does
    outputs: list[Tensor] | None = None

    def below(self, parents: Sequence[int]) -> Tensor:
        """Returns the features of children of these nodes, [n, H]; -1 is the newest token."""
        if self.states is None:
            raise ValueError("catch_up computes the newest token's row before anything grows below it")
        index = torch.tensor(parents, device=self.states.device)
        return self.states.index_select(0, index + 1)


class DraftNet(ABC):
    """A network that drafts for proposers on hidden states."""

    max_length: int  # maximum length of a sequence in tokens, drafts included
    keeps: bool = False  # whether rows are kept for later sequences with the same prefix
    batch_invariant: bool  # see ``Model``
    vocab_size: int  # size of the target's vocabulary
    foresees: bool = False  # whether one pass has the logits of all levels of a draft
    adapts_levels: bool = True  # see ``Model``

    @property
    def drafts_chains(self) -> bool:
        return False

    def chains(
        self, handles: Sequence[HeadHandle], requests: Sequence[ChainRequest], vocab: int
    ) -> Sequence[ModelChain]:
        """Computes all pending rows, and drafts the chains behind them in one call; see ``Model.chains``."""
        raise NotImplementedError

    @abstractmethod
    def features(self, taps: Tensor) -> Tensor:
        """Returns the features [rows, H] for the target's concatenated hidden states [rows, taps * Ht]."""

    def to_target(self, logits: Tensor) -> Tensor:
        """Returns logits [n, Vd] as logits over the target's vocabulary [n, V]; -inf for tokens not in the draft's."""
        return logits

    def target_ids(self, ids: Tensor) -> Tensor:
        return ids

    @abstractmethod
    def open(self, tokens: Sequence[int] = (), scope: Hashable = None) -> HeadHandle:
        """Opens a sequence, with the rows of the target's first ``tokens`` that are in the prefix cache.

        Rows are shared only between sequences with the same ``scope``.
        """

    @abstractmethod
    def close(self, handle: HeadHandle) -> None:
        """Closes a sequence and frees its slot. Closing twice does nothing."""

    @property
    @abstractmethod
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache per token."""

    @abstractmethod
    def enable_prefix_cache(self, max_bytes: int) -> None:
        """Enables prefix caching within ``max_bytes`` where the runner supports it."""

    @abstractmethod
    def extend(self, handle: HeadHandle, tokens: Sequence[int], features: Tensor | None = None) -> None:
        """Appends committed tokens with the features [n, H] of the tokens before them; drops the draft."""

    def append(self, handle: HeadHandle, tokens: Sequence[int], rows: TapRows) -> None:
        """Appends committed tokens with the target's states at the tokens before them; drops the draft.

        Features are made from the states once a pass needs them.
        """
        self.extend(handle, tokens)
        handle.taps[-2:-1] = [earlier.kept() for earlier in handle.taps[-2:-1]]  # those before it are
        handle.taps.append(rows)

    def _make_features(self, handles: Sequence[HeadHandle]) -> None:
        """Makes the features of all sequences from the states that were appended, in one product."""
        made = [handle for handle in handles if handle.taps]
        if not made:
            return
        parts = [TapRows.joined(handle.taps) for handle in made]
        features = self.features(TapRows.joined(parts).concatenated())
        for handle, part in zip(made, features.split([len(part) for part in parts]), strict=True):
            handle.fresh.append(part)
            handle.taps.clear()

    @abstractmethod
    def prefill(self, handle: HeadHandle) -> None:
        """Computes pending rows without logits, in passes of bounded size."""

    @abstractmethod
    def catch_up(self, handles: Sequence[HeadHandle]) -> list[Tensor]:
        """Computes all pending rows. Returns the logits [1, Vd] after each sequence's newest token."""

    def complete(self, handle: HeadHandle) -> None:
        """Computes all pending rows of a sequence that ends, and keeps its rows for later sequences."""
        self.catch_up([handle])

    @abstractmethod
    def grow(self, handles: Sequence[HeadHandle], drafts: Sequence[Draft]) -> list[Tensor]:
        """Computes the new nodes of drafts that grow on the cached nodes. Returns the new nodes' logits [new, Vd]."""


@dataclass(frozen=True, slots=True)
class MaskRow:
    """The input of a position that is not drafted yet."""

    token: int
    states: TapRows  # one row, in the place of the target's states
    features: Tensor  # [1, H], made from them


class FeatureNet(DraftNet):
    """Layers that read features of the target's hidden states, in one KV cache.

    Attributes:
        vocabulary: the tokens of the network's logits, where a row's features are the state of the row before it; None
            where chains are drafted level by level.
        mask: the input of positions that are not drafted yet, of a head that drafts all in one pass (P-EAGLE).
    """

    vocabulary: DraftVocabulary | None = None
    mask: MaskRow | None = None
    _ids: Tensor | None = None  # the target's token of each logit; None if it is the logit's index

    def __init__(
        self,
        runner: Runner,  # computes the layers, whose residual stream starts from features; see ``weights.Entry``
        state: int,  # the tap of ``runner`` that is the feature of a node's children
        vocab: int,  # size of the target's vocabulary
        max_length: int,  # maximum length of a sequence in tokens, drafts included
        # a vocabulary head that ``runner`` does not have, such as the target's, and the tap that it reads, which is the
        # input of the runner's head
        unembed: tuple[Callable[[Tensor], Tensor], int] | None = None,
    ) -> None:
        if unembed is not None and isinstance(unembed[0], TargetHead) and unembed[0].lend(runner):
            unembed = None
        self._runner, self._state, self.vocab_size, self._unembed = runner, state, vocab, unembed
        self.max_length, self.keeps = max_length, False
        self.batch_invariant = runner.batch_invariant
        self.adapts_levels = runner.adapts_levels

    def _entering(self, tokens: Sequence[int], features: Tensor) -> Tensor:
        """Returns the start of the residual stream [rows, H] for tokens and the features [rows, H] before them."""
        return features

    def _draft_from(
        self,
        ids: Tensor,
        chained: bool,  # whether the runner can compute a level of a draft from the level before
        successors: TokenLogits | None = None,  # logits that a token adds to those behind it; see ``DraftVocabulary``
        after: Callable[[Tensor, Tensor | None], Tensor] | None = None,  # the same where torch computes them
    ) -> None:
        """Sets the target's token of each logit, int64 [Vd]."""
        whole = torch.equal(ids, torch.arange(self.vocab_size))
        self._ids = None if whole else ids
        if chained and bool((ids.diff() > 0).all()):
            self.vocabulary = DraftVocabulary(
                len(ids), self.vocab_size, None if whole else ids.int(), successors, after
            )

    def to_target(self, logits: Tensor) -> Tensor:
        if self._ids is None:
            return logits
        return logits.new_full((logits.shape[0], self.vocab_size), -torch.inf).index_copy_(1, self._ids, logits)

    def target_ids(self, ids: Tensor) -> Tensor:
        return ids if self._ids is None else torch.take(self._ids, ids)

    def adopt(self, other: "FeatureNet") -> None:
        """Takes over the sequences of an earlier version of this network, which is not used any more.

        Cached rows stay as that version computed them.
        """
        self._runner.adopt(other._runner)
        self.keeps = other.keeps

    # sequences

    def open(self, tokens: Sequence[int] = (), scope: Hashable = None) -> HeadHandle:
        slot, cached = self._runner.acquire([*self._row_keys(tokens), _NEXT], scope)
        return HeadHandle(slot, list(tokens[1 : cached + 1]), cached, root=tokens[0] if tokens else None)

    @property
    def kv_bytes_per_token(self) -> int:
        return self._runner.kv_bytes_per_token

    def enable_prefix_cache(self, max_bytes: int) -> None:
        self.keeps = self._runner.enable_prefix_cache(max_bytes)

    def close(self, handle: HeadHandle) -> None:
        if handle.slot >= 0:
            self._runner.release(handle.slot)
            handle.slot = -1

    def extend(self, handle: HeadHandle, tokens: Sequence[int], features: Tensor | None = None) -> None:
        handle.nodes.clear()
        handle.parents.clear()
        handle.states = None
        handle.tokens.extend(tokens)
        if features is not None:
            handle.fresh.append(features)

    def prefill(self, handle: HeadHandle, left: int = 0) -> None:
        """Computes pending rows without logits, in passes of bounded size, until at most ``left`` are pending."""
        if handle.num_pending <= left:
            return
        fed = self._fed([handle])
        while handle.num_pending > left:
            rows = min(PREFILL_ROWS, handle.num_pending - left)
            part = Handle(handle.slot, handle.tokens[: handle.cached + rows], handle.cached)
            now, fed = fed.split(rows) if isinstance(fed, TapRows) else (fed[:rows], fed[rows:])
            result = self._run(PassPlan.of([part], [Draft.empty()], [0], now), handle.outputs is not None)
            if handle.outputs is not None:
                handle.outputs.append(result.taps[self._state])
            handle.cached += rows
        handle.fresh[:] = [fed] if left and not isinstance(fed, TapRows) else []
        handle.taps[:] = [fed] if left and isinstance(fed, TapRows) else []

    def _fed(self, handles: Sequence[HeadHandle], masks: Sequence[Draft] = ()) -> Tensor | TapRows:
        """Returns the input of a pass over all pending rows: their features, or the states that it makes them from.

        masks: mask tokens behind the rows of each sequence; empty for none.
        """
        mask, counts = self.mask, [len(chain) for chain in masks]
        behind = [] if mask is None else [mask.states.repeated(count) for count in counts]
        taps = [rows for i, handle in enumerate(handles) for rows in (*handle.taps, *behind[i : i + 1])]
        whole = self._runner.fuses and all(rows.addressable for rows in taps)
        if whole and not any(handle.fresh for handle in handles):
            return taps[0] if len(taps) == 1 else TapRows.joined(taps)
        self._make_features(handles)
        between = [] if mask is None else [mask.features.expand(count, -1) for count in counts]
        parts = [[*handle.fresh, *between[i : i + 1]] for i, handle in enumerate(handles)]
        return torch.cat([rows for part in parts for rows in part])

    def catch_up(self, handles: Sequence[HeadHandle]) -> list[Tensor]:
        return self.look_ahead(handles, [Draft.empty()] * len(handles))

    def look_ahead(self, handles: Sequence[HeadHandle], masks: Sequence[Draft]) -> list[Tensor]:
        """Computes all pending rows and, in the same pass, rows of mask tokens behind them, which are not kept.

        Args:
            masks: a chain of mask tokens for each.

        Returns:
            The logits [1 + masks, Vd] after each sequence's newest token and after its mask tokens.
        """
        for handle in handles:
            self.prefill(handle, JOINT_ROWS)
        logits, states = self._score(handles, masks, self._fed(handles, masks))
        for handle, mask, outputs in zip(handles, masks, states, strict=True):
            self._record_computed(handle, outputs[: len(outputs) - len(mask)])
        return logits

    def _record_computed(self, handle: HeadHandle, states: Tensor) -> None:
        """Marks all pending rows of a sequence as computed, with these outputs of the layer [rows, H]."""
        self.mark_computed(handle)
        handle.states = states[-1:]
        if handle.outputs is not None:
            handle.outputs.append(states)

    def mark_computed(self, handle: HeadHandle) -> None:
        """Marks all pending rows of a sequence as computed."""
        handle.fresh.clear()
        handle.taps.clear()
        handle.cached = len(handle.tokens)
        if self.keeps and handle.root is not None:
            self._runner.publish(handle.slot, self._row_keys([handle.root, *handle.tokens]), handle.cached)

    @property
    def drafts_chains(self) -> bool:
        return self.vocabulary is not None and self._unembed is None and self._runner.computes_chains

    def chains(
        self, handles: Sequence[HeadHandle], requests: Sequence[ChainRequest], vocab: int
    ) -> Sequence[ModelChain]:
        return self.chains_with(handles, requests)

    def chains_with(
        self, handles: Sequence[HeadHandle], requests: Sequence[ChainRequest], deeper: Sequence[DeeperLayer] = ()
    ) -> Sequence[ModelChain]:
        """Drafts as ``chains`` does, with ``deeper`` layers, whose new rows are computed, too."""
        assert self.vocabulary is not None
        for handle in handles:
            self.prefill(handle, JOINT_ROWS)
        drafts, mask = [Draft.empty()] * len(handles), self.mask
        if mask is not None:
            drafts = [Draft.chain([mask.token] * (request.levels - 1)) for request in requests]
        plan = PassPlan.of(handles, drafts, [0] * len(handles), self._fed(handles, drafts))
        state = self._state if mask is None else None
        chains = self._runner.chains(plan, requests, self.vocabulary, state, mask is not None, deeper)
        for handle in handles:
            self.mark_computed(handle)
        return chains

    def behind(
        self, handles: Sequence[HeadHandle], tokens: Sequence[Sequence[int]], carried: list[Tensor | None]
    ) -> DeeperLayer:
        """Returns this layer for a call of ``chains_with`` of the first layer.

        Args:
            handles: its sequences, without pending rows.
            tokens: the new tokens of each.
            carried: see ``DeeperLayer``.
        """
        parts = [
            Part(handle.slot, handle.cached, len(new), handle.cached + len(new), Draft.empty())
            for handle, new in zip(handles, tokens, strict=True)
        ]
        return DeeperLayer(self._runner, parts, carried)

    def grow(self, handles: Sequence[HeadHandle], drafts: Sequence[Draft]) -> list[Tensor]:
        return self.grow_on(handles, drafts, handles)

    def grow_on(
        self, handles: Sequence[HeadHandle], drafts: Sequence[Draft], sources: Sequence[HeadHandle]
    ) -> list[Tensor]:
        """Computes the new nodes of drafts as ``grow`` does, from the outputs of ``sources`` at their parents."""
        new = [draft.parents[len(handle.nodes) :] for handle, draft in zip(handles, drafts, strict=True)]
        fed = [source.below(parents) for source, parents in zip(sources, new, strict=True)]
        logits, states = self._score(handles, drafts, torch.cat(fed))
        for handle, draft, outputs in zip(handles, drafts, states, strict=True):
            handle.nodes[:], handle.parents[:] = draft.ids, draft.parents
            handle.states = outputs if handle.states is None else torch.cat([handle.states, outputs])
        return logits

    def teacher_forced(self, tokens: Sequence[int], features: Tensor) -> Tensor:
        """Returns the logits [n, Vd] of all rows of a new sequence, computed from the target's features [n, H]."""
        handle = HeadHandle(self._runner.acquire()[0], list(tokens))
        try:
            plan = PassPlan.of([handle], [Draft.empty()], [0], features)
            plan = replace(plan, outputs=list(range(len(tokens))), output_counts=[len(tokens)])
            return self._logits(self._run(plan), plan)
        finally:
            self.close(handle)

    def _row_keys(self, tokens: Sequence[int]) -> list[int]:
        """Returns the key of each row for the prefix cache: its token, in the first row also the token before it."""
        return [tokens[0] * self.vocab_size + tokens[1], *tokens[2:]] if len(tokens) > 1 else []

    # passes

    def _score(
        self, handles: Sequence[HeadHandle], drafts: Sequence[Draft], fed: Tensor | TapRows
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Runs one pass. Returns each sequence's logits and states."""
        plan = PassPlan.of(handles, drafts, [len(handle.nodes) for handle in handles], fed)
        result = self._run(plan)
        logits = self._logits(result, plan)
        states = result.taps[self._state]
        if len(handles) == 1:
            return [logits], [states]
        return list(logits.split(plan.output_counts)), list(states.split([part.count for part in plan.parts]))

    def _run(self, plan: PassPlan, outputs: bool = True) -> Pass:
        """Runs one pass. Without ``outputs`` it computes keys and values only."""
        if plan.features is not None and not self._runner.fuses:
            plan = replace(plan, features=self._entering(plan.tokens, plan.features))
        taps = {self._state, *((self._unembed[1],) if self._unembed else ())} if outputs else ()
        return self._runner.run(plan, tuple(taps), outputs and self._unembed is None)

    def _logits(self, result: Pass, plan: PassPlan) -> Tensor:
        if result.logits is not None:
            return result.logits
        assert self._unembed is not None
        unembed, tap = self._unembed
        return unembed(result.taps[tap][plan.output_rows])
