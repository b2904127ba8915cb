"""The runtime for the Llama family and its relatives.

``Decoder`` turns handles, drafts and pending tokens into plans of forward passes; a runner (``runners/base.py``)
computes them. With a batch-invariant runner no row's logits depend on what shares the pass, so the text does not depend
on proposer, draft length or batch.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.models.base import Handle, Model, Scores, growing, no_logits
from foretoken.models.chains import ChainRequest, DraftVocabulary, ModelChain
from foretoken.models.device_drafts import UnreadChains
from foretoken.models.device_logits import DeviceTaps
from foretoken.models.families.architecture import Architecture, supports
from foretoken.models.formats.layers import Layers, Source, read_ends
from foretoken.models.formats.lora.tensors import read_adapter
from foretoken.models.formats.prequantized import check_prequantized
from foretoken.models.formats.quantize import GroupedWeights, Quantizer
from foretoken.models.options import check_options
from foretoken.models.runners.base import Pass, Runner
from foretoken.models.runners.choose import build_runner, cached_runner
from foretoken.models.runners.native.cache import WeightCache
from foretoken.models.runners.pass_plan import PassPlan, Tapped

PREFILL_ROWS = 256  # rows of one prefill pass


class RunnerModel(Model):
    """A model whose passes a runner computes."""

    runner: Runner
    _vocabulary: DraftVocabulary | None = None  # that of the last call of ``chains``

    def open(
        self,
        prompt: Sequence[int],
        source: Sequence[int] = (),
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> Handle:
        if not prompt:
            raise InvalidRequest("the prompt is empty; at least one token is needed to continue from")
        if adapter is not None and adapter not in self.adapters:
            raise InvalidRequest(
                f"the LoRA adapter {adapter!r} is not loaded; loaded: {', '.join(self.adapters) or 'none'}"
            )
        self.check_tokens(prompt)
        self.check_tokens(source)
        slot, cached = self.runner.acquire(prompt, cache_salt, adapter)
        handle = Handle(slot, list(prompt), cached)
        if source:
            try:
                self.runner.attach(slot, source)
            except BaseException:
                self.close(handle)
                raise
        return handle

    def close(self, handle: Handle) -> None:
        if handle.slot >= 0:
            self.runner.release(handle.slot)
            handle.slot = -1

    @property
    def runs_ahead(self) -> bool:
        return self.runner.runs_ahead

    @property
    def kv_bytes_per_token(self) -> int:
        return self.runner.kv_bytes_per_token

    @property
    def state_bytes(self) -> int:
        return self.runner.state_bytes

    def enable_prefix_cache(self, max_bytes: int) -> bool:
        return self.runner.enable_prefix_cache(max_bytes)

    @property
    def adapters(self) -> tuple[str, ...]:
        return self.runner.adapters

    def add_adapter(self, name: str, adapter: Any) -> None:
        if name in self.adapters:
            raise InvalidRequest(f"there is a LoRA adapter {name!r} already; choose another name")
        self.runner.add_adapter(name, adapter)

    def remove_adapter(self, name: str) -> None:
        self.runner.remove_adapter(name)

    def check(self) -> None:
        self.runner.check()

    def commit(self, handles: Sequence[Handle], tokens: Sequence[Sequence[int]]) -> None:
        for new in tokens:
            self.check_tokens(new)
        moves = [(handle.slot, *handle.advance(new)) for handle, new in zip(handles, tokens, strict=True)]
        self.runner.move_all(moves)
        for handle in handles:
            self.runner.publish(handle.slot, handle.tokens, handle.cached)

    def score(self, handles: Sequence[Handle], drafts: Sequence[Draft], taps: Sequence[int] = ()) -> list[Scores]:
        drafts = [draft if draft.unread and self.runner.takes_unread else draft.read() for draft in drafts]
        for handle, draft in zip(handles, drafts, strict=True):
            if not draft.unread and draft.ids:
                self.check_tokens(draft.ids)
            self._resume(handle)
        firsts = [handle.cached for handle in handles]
        earlier = [self._prefill(handle, taps) for handle in handles]
        scored = [growing(handle, draft) for handle, draft in zip(handles, drafts, strict=True)]
        firsts = [min(first, handle.cached) for first, handle in zip(firsts, handles, strict=True)]
        rows = [h.num_pending + draft.limit - done for h, draft, done in zip(handles, drafts, scored, strict=True)]
        scores: list[Scores] = []
        for group in split_evenly(rows, self.runner.pass_rows):
            plan = PassPlan.of(handles[group], drafts[group], scored[group])
            scores += self._score(plan, handles[group], drafts[group], taps, firsts[group], earlier[group])
        return scores

    def _score(
        self,
        plan: PassPlan,  # its rows
        handles: Sequence[Handle],
        drafts: Sequence[Draft],
        taps: Sequence[int],
        firsts: Sequence[int],  # position of the first row that this call computes of each sequence
        earlier: Sequence[Sequence[Mapping[int, Tensor]]],  # taps of the rows that it has computed before, in order
    ) -> list[Scores]:
        """Computes one pass."""
        result = self._run(plan, taps, logits=True)
        for handle, draft in zip(handles, drafts, strict=True):
            handle.cached = len(handle.tokens)
            handle.unread = partial(_nodes_of, draft)
            if not draft.unread:
                handle.read()
        tapped = _by_sequence(result.taps, earlier, [part.count for part in plan.parts])
        slots, ends = [handle.slot for handle in handles], list(accumulate(plan.output_counts))
        outputs = [slice(end - count, end) for end, count in zip(ends, plan.output_counts, strict=True)]
        none = no_logits(self.vocab_size)
        if (late := result.late) is not None:
            return [
                Scores(none, taps, first, slot, late=partial(_part, late, rows))
                for taps, first, slot, rows in zip(tapped, firsts, slots, outputs, strict=True)
            ]
        ranked = [None] * len(outputs) if result.ranked is None else [result.ranked[rows] for rows in outputs]
        if result.argmax is not None:
            argmax = [result.argmax[rows] for rows in outputs]
            return [Scores(none, *scores) for scores in zip(tapped, firsts, slots, argmax, ranked, strict=True)]
        assert result.rows is not None
        rows, no_argmax = result.rows.split(plan.output_counts), [None] * len(outputs)
        return [Scores(*scores) for scores in zip(rows, tapped, firsts, slots, no_argmax, ranked, strict=True)]

    @property
    def drafts_chains(self) -> bool:
        return self.runner.computes_chains

    def chains(self, handles: Sequence[Handle], requests: Sequence[ChainRequest], vocab: int) -> Sequence[ModelChain]:
        drafts = [Draft.empty()] * len(handles)
        for handle, draft in zip(handles, drafts, strict=True):
            self._resume(handle)
            self._prefill(handle, ())
            growing(handle, draft)
        self._shorten(handles)
        plan = PassPlan.of(handles, drafts, [0] * len(handles))
        self._check_reach(max(part.end + request.rows for part, request in zip(plan.parts, requests, strict=True)))
        reads = any(request.stop is not None and request.stop.hidden for request in requests)
        state = self.num_layers if reads else None
        chains = self.runner.chains(plan, requests, self._draft_vocabulary(vocab), state)
        for number, handle in enumerate(handles):
            handle.cached = len(handle.tokens)
            handle.unread = partial(_nodes_drafted, chains, number)
            if not isinstance(chains, UnreadChains):
                handle.read()
        return chains

    def _draft_vocabulary(self, vocab: int) -> DraftVocabulary:
        if self._vocabulary is None or self._vocabulary.width != vocab:
            size = min(self.vocab_size, vocab)
            ids = torch.arange(size, dtype=torch.int32) if size < vocab else None
            self._vocabulary = DraftVocabulary(size, vocab, ids)
        return self._vocabulary

    def _shorten(self, handles: Sequence[Handle]) -> None:
        """Computes all pending rows but the last of each sequence, if a pass does not take them all."""
        groups = list(split_evenly([len(handle.pending) for handle in handles], self.runner.pass_rows))
        for group in groups if len(groups) > 1 else ():
            longer = [handle for handle in handles[group] if len(handle.pending) > 1]
            if longer:
                parts = [Handle(handle.slot, handle.tokens[:-1], handle.cached) for handle in longer]
                self._run(PassPlan.of(parts, [Draft.empty()] * len(parts), [0] * len(parts)), (), logits=False)
            for handle in longer:
                handle.cached = len(handle.tokens) - 1

    def unembed(self, hidden: Tensor) -> Tensor:
        return self.runner.unembed(hidden)

    # passes

    def _resume(self, handle: Handle) -> None:
        """Drops rows that a pass cannot follow, for instance after a truncation that the recurrent state has passed."""
        rows = self.runner.resume(handle.slot, handle.cached)
        if rows < handle.cached:
            handle.rewind()
            handle.cached = min(rows, handle.cached)

    def _prefill(self, handle: Handle, taps: Sequence[int]) -> list[Mapping[int, Tensor]]:
        """Computes most of a long pending prompt in passes of fixed size, until ``joint_rows`` rows are pending.

        Where the prompt is cut depends on this sequence alone, not on the batch. Returns the taps of each pass.
        """
        tapped = []
        while handle.num_pending > self.runner.joint_rows:
            rows = min(PREFILL_ROWS, handle.num_pending - 1)
            part = Handle(handle.slot, handle.tokens[: handle.cached + rows], handle.cached)
            tapped.append(self._run(PassPlan.of([part], [Draft.empty()], [0]), taps, logits=False).taps)
            handle.cached += rows
        return tapped

    def _run(self, plan: PassPlan, taps: Sequence[int], logits: bool) -> Pass:
        self._check_reach(plan.reach)
        return self.runner.run(plan, taps, logits)

    def _check_reach(self, reach: int) -> None:
        if reach > self.max_length:
            raise InvalidRequest(
                f"a sequence reaches {reach} tokens, beyond the {self.max_length} this model was opened with; "
                "shorten the prompt, lower max_tokens, or raise max_model_len"
            )


class Decoder(RunnerModel):
    """A decoder-only model on one of our runners.

    Parameters without a comment are those of ``load_model``.

    Raises:
        InvalidRequest: an option is unknown, or weights cannot be packed here.
        ModelLoadError: a field or tensor is missing or wrong.
    """

    taps_before_norm = True
    architecture: Architecture

    def __init__(
        self,
        config: Mapping[str, Any],  # the checkpoint's config.json as a dict
        weights: Mapping[str, Tensor],  # the checkpoint's tensors by name
        dtype: torch.dtype,  # dtype of weights and activations
        device: torch.device,
        max_length: int | None = None,
        quantization: str | None = None,
        weight_format: str = "raw",
        kv_cache_dtype: str = "auto",
        attention_window: int | None = None,
    ) -> None:
        check_options(quantization=quantization, weight_format=weight_format, kv_cache_dtype=kv_cache_dtype)
        self.dtype, self.device = dtype, device
        described = self.decoder_of(config, max_length).windowed(attention_window)
        source = Source(weights, described, dtype, Quantizer.of(quantization))
        a = self.architecture = source.architecture
        self.vocab_size, self.hidden_size, self.num_layers = a.vocab, a.hidden, a.layers
        self.max_length, self.has_experts = a.max_length, a.has_experts
        in_file = check_prequantized(config) or isinstance(weights, GroupedWeights)
        self.quantized = quantization is not None or in_file
        self.runner = self._runner(config, source, quantization, weight_format, kv_cache_dtype)
        self.adapts_levels = self.runner.adapts_levels
        self.batch_invariant, self.chunk_invariant = self.runner.batch_invariant, self.runner.chunk_invariant

    def _runner(
        self,
        config: Mapping[str, Any],
        source: Source,
        quantization: str | None,
        weight_format: str,
        kv_cache_dtype: str,
    ) -> Runner:
        a, dtype, device = source.architecture, self.dtype, self.device
        cache = _cache(config, source.weights, dtype, quantization, weight_format)
        return cached_runner(a, dtype, device, cache, kv_cache_dtype) or build_runner(
            a,
            Layers(source),
            read_ends(source),
            dtype,
            device,
            cache=cache,
            weight_format=weight_format,
            kv_cache_dtype=kv_cache_dtype,
        )

    @staticmethod
    def supports(config: Mapping[str, Any]) -> bool:
        """Returns whether this class computes the architecture exactly."""
        return supports(config)

    @staticmethod
    def decoder_of(config: Mapping[str, Any], max_length: int | None = None) -> Architecture:
        """Returns the architecture of the decoder that a config.json describes."""
        return Architecture.of(config, max_length)

    def read_adapter(self, folder: Path) -> Any:
        if self.takes_source:
            return super().read_adapter(folder)
        return self.runner.pack_adapter(read_adapter(folder, self.architecture))


def _part(late: Callable[[], NDArray[np.int64]], rows: slice) -> NDArray[np.int64]:
    return late()[rows]


def _nodes_of(draft: Draft) -> tuple[Sequence[int], Sequence[int]]:
    return draft.ids, draft.parents


def _nodes_drafted(chains: Sequence[ModelChain], number: int) -> tuple[Sequence[int], Sequence[int]]:
    """Returns the nodes whose rows drafting has computed."""
    chain = chains[number]
    if chain.parents:
        return (), ()  # rows of a tree are in another order; accepted ones are computed again
    nodes = chain.tokens if chain.ended else chain.tokens[:-1]  # the last one is in no pass
    return nodes, range(-1, len(nodes) - 1)


def split_evenly(sizes: Sequence[int], max_rows: int) -> Iterator[slice]:
    """Yields slices of adjacent sizes of similar sums: as few as ``max_rows`` for each allows.

    If single sizes are large, some slices may have more rows.
    """
    total = max(1, sum(sizes))
    if sizes and total <= max_rows:
        yield slice(0, len(sizes))
        return
    share = total / math.ceil(total / max_rows)
    before = accumulate(sizes, initial=0)
    middles = ((at, start + size / 2) for at, (start, size) in enumerate(zip(before, sizes, strict=False)))
    for _, group in groupby(middles, lambda middle: int(middle[1] / share)):
        indices = [at for at, _ in group]
        yield slice(indices[0], indices[-1] + 1)


def _cache(
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    dtype: torch.dtype,
    quantization: str | None,
    weight_format: str,
) -> WeightCache | None:
    """Returns the cache of packed weights; None if packing only rearranges them, which takes no longer than reading."""
    if quantization is None and not isinstance(weights, GroupedWeights):
        return None
    options = {"dtype": str(dtype), "quantization": quantization, "weight_format": weight_format}
    return WeightCache.of(weights, {"config": config, **options})


def _by_sequence(
    taps: Mapping[int, Tensor], earlier: Sequence[Sequence[Mapping[int, Tensor]]], counts: Sequence[int]
) -> list[Mapping[int, Tensor]]:
    """Returns each sequence's taps: those of its prefill passes, then its rows of the shared pass."""
    if len(counts) == 1 and not earlier[0]:
        return [taps]
    if isinstance(taps, Tapped | DeviceTaps) and not any(earlier):
        return [*taps.split(counts)]
    parts = {i: tapped.split(list(counts)) if len(counts) > 1 else (tapped,) for i, tapped in taps.items()}
    return [
        {i: torch.cat([*(p[i] for p in passes), parts[i][at]]) if passes else parts[i][at] for i in parts}
        for at, passes in enumerate(earlier)
    ]
