"""The runner of encoder-decoders: batch-invariant passes of a decoder with cross-attention.

The source's keys and values have a separate cache and are never moved.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from foretoken.core.devices import on_host
from foretoken.core.errors import InvalidRequest
from foretoken.models.families.layers import UNBOUNDED
from foretoken.models.families.seq2seq import Stack
from foretoken.models.formats.weights import NormWeight
from foretoken.models.runners.attention import KEY_MULTIPLE, Geometry, attend, look_up
from foretoken.models.runners.base import BasicRunner, Pass
from foretoken.models.runners.linear import can_pack, product
from foretoken.models.runners.pass_plan import PassPlan
from foretoken.models.seq2seq.encoder import Encoder, SourceSlots
from foretoken.models.seq2seq.layers import (
    Attention,
    EncoderStack,
    InputStage,
    Seq2SeqLayer,
    branch,
    build,
    norm_of,
    unchanged,
)
from foretoken.models.seq2seq.positions import positions_of
from foretoken.models.seq2seq.weights import Seq2SeqWeights
from foretoken.models.state.kv import KVCache, finite, padded


@dataclass(frozen=True, slots=True)
class AttentionMasks:
    """The masks of a pass, which are added to the scores.

    Attributes:
        self_attention: one per layer, or one for all layers; relative positions included.
        cross_attention: one for all layers.
        keys: number of source rows that are read.
    """

    self_attention: list[Tensor]
    cross_attention: Tensor
    keys: int


class Seq2SeqRunner(BasicRunner):
    """A runner of torch operators, for every device and dtype that torch supports.

    Args:
        weights: reads the checkpoint's tensors.
        dtype: dtype of the computation.
        device: device of weights and KV cache.
    """

    joint_rows, pass_rows = 32, 512
    chunk_invariant = False

    def __init__(self, weights: Seq2SeqWeights, dtype: torch.dtype, device: torch.device) -> None:
        a = self._architecture = weights.architecture
        self._dtype, self._device = dtype, device
        self.batch_invariant = can_pack(dtype, device)
        embedding = weights.embedding().to(device)
        sides = {side: weights.ends(side) for side in ("encoder", "decoder")}
        input_stages = {side: InputStage(a, embedding, ends, device) for side, ends in sides.items()}
        stack = EncoderStack(a, weights.layers("encoder"), sides["encoder"], input_stages["encoder"], device)
        self.encoder = Encoder(stack)
        self.fingerprint = weights.fingerprint()
        self._input_stage = input_stages["decoder"]
        self._blocks, self._tables = build(a, device, weights.layers("decoder"))
        last = sides["decoder"].last
        self._norm = unchanged if last is None else norm_of(last, a.eps, device)
        head, bias = weights.head(embedding)
        self._head, self._head_bias = product(head.to(device)), None if bias is None else bias.to(device)
        self._begin()

    def _begin(self) -> None:
        """Creates empty caches."""
        stack = self._architecture.decoder
        dtype = torch.float64 if self._dtype == torch.float32 and self.batch_invariant else self._dtype  # attention.py
        sizes = ([(stack.heads, stack.head_dim)] * stack.layers, dtype, self._device)
        self._cache, self._sources = KVCache(*sizes), KVCache(*sizes)
        self._slots = SourceSlots(self._architecture.source_length)

    def first(self, architecture: Any, norm: Tensor | None) -> Self:
        view = copy(self)
        view._architecture = architecture
        view._blocks = self._blocks[: architecture.layers]
        if norm is not None:
            view._norm = norm_of(NormWeight(norm, None), architecture.eps, self._device)
        view._begin()
        return view

    def injector(self) -> Self:
        """Raises InvalidRequest: an encoder-decoder takes no features."""
        raise InvalidRequest("an encoder-decoder takes no features; block drafters are decoders")

    # slots

    @property
    def kv_bytes_per_token(self) -> int:
        return self._cache.kv_bytes_per_token

    def acquire(
        self, tokens: Sequence[int] = (), scope: Hashable = None, adapter: str | None = None
    ) -> tuple[int, int]:
        slot, beside = self._cache.acquire()[0], self._sources.acquire()[0]
        assert slot == beside
        return slot, 0

    def attach(self, slot: int, source: Sequence[int]) -> None:
        self._slots.attach(slot, source)

    def release(self, slot: int) -> None:
        self._slots.release(slot)
        self._cache.release(slot)
        self._sources.release(slot)

    def publish(self, slot: int, tokens: Sequence[int], rows: int) -> None:
        """Does nothing: slots share no rows."""

    def enable_prefix_cache(self, max_bytes: int) -> bool:
        return False

    def check(self) -> None:
        self._slots.check()

    @property
    def state_bytes(self) -> int:
        return 0

    def resume(self, slot: int, rows: int) -> int:
        return rows

    @torch.inference_mode()
    def move(self, slot: int, destination: int, sources: Sequence[int]) -> None:
        self._cache.move(slot, destination, sources)

    def nbytes(self) -> int:
        return self._cache.nbytes() + self._sources.nbytes()

    # passes

    @torch.inference_mode()
    def run(self, plan: PassPlan, taps: Sequence[int], logits: bool) -> Pass:
        for part in plan.parts:
            self._encode(part.slot)
        self._cache.reserve(plan.reach + 1)
        g = Geometry.of(plan, self._cache, (UNBOUNDED,), self._device)
        masks = self._masks(plan, g)
        alone = not logits and len(plan.parts) == 1  # a chunk of one prompt
        hidden = self._input_stage(g.tokens, g.positions)
        states: dict[int, Tensor] = {}
        for number, block in enumerate(self._blocks):
            if number in taps:
                states[number] = hidden
            hidden = self._layer(number, block, hidden, g, masks, alone)
        count = self._architecture.layers
        states[count], states[count + 1] = self._norm(hidden), hidden
        outputs = states[count][torch.tensor(plan.outputs, device=self._device)] if logits else None
        rows = slice(len(plan.tokens))
        return Pass(None if outputs is None else self.unembed(outputs), {tap: states[tap][rows] for tap in taps})

    @torch.inference_mode()
    def unembed(self, hidden: Tensor) -> Tensor:
        count, scale = hidden.shape[0], self._architecture.logit_scale
        hidden = hidden.to(self._device, self._dtype)
        if scale != 1.0:
            hidden = hidden * scale
        logits = self._head(hidden if count > 1 else hidden.repeat(2, 1))[:count].float()
        return on_host(logits if self._head_bias is None else logits + self._head_bias)

    def _layer(
        self, number: int, block: Seq2SeqLayer, hidden: Tensor, g: Geometry, masks: AttentionMasks, alone: bool
    ) -> Tensor:
        first, cross_attention = self._architecture.norm_first, block.cross_attention
        assert cross_attention is not None
        mask = masks.self_attention[min(number, len(masks.self_attention) - 1)]
        self_attend = partial(self._attend, number, block.self_attention, g, mask, alone)
        cross_attend = partial(self._cross_attend, number, cross_attention, g, masks, alone)
        hidden = branch(first, block.self_attention.norm, hidden, self_attend)
        hidden = branch(first, cross_attention.norm, hidden, cross_attend)
        return branch(first, block.mlp.norm, hidden, partial(block.mlp, alone=alone))

    def _attend(self, number: int, attention: Attention, g: Geometry, mask: Tensor, alone: bool, x: Tensor) -> Tensor:
        stack = self._stack
        heads = attention.into(x, alone).view(len(x), -1, stack.head_dim)
        queries_keys, values = heads.split((2 * stack.heads, stack.heads), dim=1)
        return attention.out(attend(number, queries_keys, values, g, stack, mask), alone)

    def _cross_attend(
        self, number: int, attention: Attention, g: Geometry, masks: AttentionMasks, alone: bool, x: Tensor
    ) -> Tensor:
        stack, kept = self._stack, self._sources
        queries = attention.into(x, alone).view(len(x), stack.heads, stack.head_dim)
        keys, values = (rows[number][g.low : g.high, :, : masks.keys] for rows in (kept.keys, kept.values))
        return attention.out(look_up(queries, keys, values, masks.cross_attention, g, stack), alone)

    @property
    def _stack(self) -> Stack:
        return self._architecture.decoder

    def _masks(self, plan: PassPlan, g: Geometry) -> AttentionMasks:
        """Returns the masks of a pass. Slots between its sequences, whose rows are not used, see all keys."""
        lengths = [self._slots.lengths.get(slot, 0) for slot in range(g.low, g.high)]
        keys = padded(max(lengths), KEY_MULTIPLE)
        ends = torch.tensor([length or keys for length in lengths])[:, None]
        source_mask = torch.zeros(len(lengths), keys).masked_fill_(torch.arange(keys) >= ends, -torch.inf)
        self_masks = [g.masks[UNBOUNDED]]
        if self._tables:
            places = positions_of(plan, g)
            biases = [table(*places).transpose(0, 1)[:, :, :, None].to(self._device) for table in self._tables]
            self_masks = [bias + self_masks[0] for bias in biases]
        return AttentionMasks(self_masks, source_mask[:, None, None, None].to(self._device), keys)

    def _encode(self, slot: int) -> None:
        """Encodes the slot's source if it is pending, and writes its keys and values by layer."""
        source = self._slots.pending(slot)
        if source is None:
            return
        states, count = self.encoder.states(source), len(source)
        rows = states if count > 1 else states.repeat(2, 1)
        self._sources.reserve(count)
        for number, block in enumerate(self._blocks):
            assert block.cross_attention is not None and block.cross_attention.keys_values is not None
            made = block.cross_attention.keys_values(rows, True)[:count].view(count, 2, self._stack.heads, -1)
            for kept, part in zip((self._sources.keys, self._sources.values), made.unbind(1), strict=True):
                kept[number][slot, :, :count] = finite(part.transpose(0, 1))
        self._slots.encoded(slot)
