"""A block drafter on our runtime (DFlash, 2602.06036; DSpark, 2607.05147).

The KV cache has a row for each token whose hidden states the target has computed: all but the newest. Every layer
computes its keys and values from the same features of these states. A draft is one pass over a block, the newest token
and mask tokens behind it, whose rows see each other and all of the cache. The block's own rows are dropped after it.

The pass predicts ``depth`` tokens, each without the others. The Markov head adds a bias by the token before, so its
logits are those of a node of the draft; they cost a product of low rank and no pass.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.core.devices import on_host
from foretoken.core.draft import Draft
from foretoken.models.chains import ChainRequest, ModelChain, ScoredRows
from foretoken.models.families.architecture import Architecture
from foretoken.models.formats.quantize import Quantizer
from foretoken.models.formats.weights import Ends, Entry
from foretoken.models.heads.block import BlockHead
from foretoken.models.heads.feature_net import JOINT_ROWS, FeatureNet, HeadHandle
from foretoken.models.heads.weights import HeadProduct, layer_weights, norm_weight, without_matrices
from foretoken.models.runners.base import Injected, Pass
from foretoken.models.runners.choose import build_runner
from foretoken.models.runners.native.runner import NativeRunner
from foretoken.models.runners.pass_plan import Part, PassPlan


@dataclass(eq=False, slots=True)
class BlockHandle(HeadHandle):
    """A sequence in the cache of a block drafter; ``states`` are those of the rows that predict, [depth, H]."""

    logits: Tensor | None = None  # of these rows, [depth, Vd], without the Markov head's bias


class BlockNet(FeatureNet):
    """The network of a block drafter."""

    foresees = True

    def __init__(
        self,
        head: BlockHead,
        embedding: Tensor,  # the head's own or the target's, [V, H]
        dtype: torch.dtype,
        device: torch.device,
        max_length: int,  # maximum length of a sequence in tokens, drafts included
        unembed: Callable[[Tensor], Tensor] | None = None,  # the target's vocabulary head, for heads without their own
        # quantizes the matrices of the layers and the vocabulary head; None leaves them in ``dtype``
        quantizer: Quantizer | None = None,
        window: int | None = None,  # number of tokens that attention sees at most; None for the head's own windows
    ) -> None:
        self.head, self.dtype, self.device = head, dtype, device
        tensors = head.tensors
        self._fc = self._product("fc.weight")
        vocabulary = tensors.get("lm_head.weight", torch.zeros(1, head.hidden)).to(dtype)  # zeros: unused
        config = {**head.layer, "vocab_size": len(vocabulary), "max_position_embeddings": max_length}
        architecture = Architecture.of(config).windowed(window)
        stack = zip(architecture.stack, head.ordered, strict=True)
        architecture = replace(architecture, stack=tuple(replace(layer, ordered=ordered) for layer, ordered in stack))
        layers = [layer_weights(tensors, i, dtype, quantizer) for i in range(head.layers)]
        quantized = vocabulary if quantizer is None else quantizer(vocabulary)
        ends = Ends(embedding.to(dtype), norm_weight(tensors, "norm"), quantized)
        entry = Entry(
            norm=norm_weight(tensors, "hidden_norm"),
            norm_first=True,
            fusion=tensors["fc.weight"].to(dtype),
            fused_layers=len(head.taps),
        )
        runner = build_runner(architecture, layers, ends, dtype, device, entry)
        borrowed = None if unembed is None or "lm_head.weight" in tensors else (unembed, head.layers)
        super().__init__(runner, head.layers, head.vocab, max_length, borrowed)
        self._injector = runner.injector()
        self._begin_heads()
        self.head = replace(head, tensors=without_matrices(tensors))

    def _begin_heads(self) -> None:
        tensors, device = self.head.tensors, self.device
        self._w1 = self._w2 = self._gate = self._sure = None
        if self.head.markov_rank:
            self._w1 = tensors["markov_head.markov_w1.weight"].to(device, self.dtype)
            w2 = tensors["markov_head.markov_w2.weight"]
            self._w2 = HeadProduct(w2, None, device, self.dtype, table=self._w1)
        if self.head.markov_rank and self.head.gated:
            self._gate = self._product("markov_head.gate_proj.weight", "markov_head.gate_proj.bias")
        if self.head.confident:
            bias = tensors.get("confidence_head.proj.bias", torch.zeros(1)).to(device, torch.float32)
            self._sure = tensors["confidence_head.proj.weight"][0].to(device, torch.float32), bias
        native = None if self._w2 is None else self._w2.native
        fits = self._w2 is None or (native is None) != isinstance(self._runner, NativeRunner)
        able, after = self._gate is None or native is None, None if self._w2 is None else self._after
        self._draft_from(self.head.ids(), fits and able, native, after)

    def features(self, taps: Tensor) -> Tensor:
        return self._fc(taps.to(self.device, self.dtype))

    def open(self, tokens: Sequence[int] = (), scope: Hashable = None) -> BlockHandle:
        handle = super().open(tokens, scope)
        return BlockHandle(handle.slot, handle.tokens, handle.cached, root=handle.root)

    @torch.inference_mode()
    def catch_up(self, handles: Sequence[HeadHandle]) -> list[Tensor]:
        self._inject(handles)
        owned = [handle for handle in handles if isinstance(handle, BlockHandle)]
        self._predict(owned)
        return self._conditional([(handle, [0], [handle.tokens[-1]]) for handle in owned])

    @torch.inference_mode()
    def chains(
        self, handles: Sequence[HeadHandle], requests: Sequence[ChainRequest], vocab: int
    ) -> Sequence[ModelChain]:
        assert self.vocabulary is not None
        rows = self._uncached(handles)
        injected = None if rows is None else Injected(self._injector, rows)
        plan = self._blocks(handles)
        read = self._gate is not None or any(request.stop is not None for request in requests)
        state = self._state if read else None
        chains = self._runner.chains(plan, requests, self.vocabulary, state, foreseen=True, injected=injected)
        self._mark_injected(handles)
        return chains

    @torch.inference_mode()
    def complete(self, handle: HeadHandle) -> None:
        self._inject([handle])

    @torch.inference_mode()
    def grow(self, handles: Sequence[HeadHandle], drafts: Sequence[Draft]) -> list[Tensor]:
        wanted = []
        for handle, draft in zip(handles, drafts, strict=True):
            assert isinstance(handle, BlockHandle)
            scored = len(handle.nodes)
            wanted.append((handle, list(draft.depths[scored:]), list(draft.ids[scored:])))
            handle.nodes[:], handle.parents[:] = draft.ids, draft.parents
        return self._conditional(wanted)

    # committed tokens

    def _row_keys(self, tokens: Sequence[int]) -> list[int]:
        """Returns the key of each row for the prefix cache: its token. The newest token has no row."""
        return list(tokens[:-1])

    def _run(self, plan: PassPlan, outputs: bool = False) -> Pass:
        return self._injector.run(plan, (), False)

    def _inject(self, handles: Sequence[HeadHandle]) -> None:
        if (rows := self._uncached(handles)) is not None:
            self._run(rows)
        self._mark_injected(handles)

    def _uncached(self, handles: Sequence[HeadHandle]) -> PassPlan | None:
        """Computes pending rows until few are left. Returns the pass over these; None if none are."""
        for handle in handles:
            self.prefill(handle, JOINT_ROWS)
        behind = [handle for handle in handles if handle.pending]
        if not behind:
            return None
        return PassPlan.of(behind, [Draft.empty()] * len(behind), [0] * len(behind), self._fed(behind))

    def _mark_injected(self, handles: Sequence[HeadHandle]) -> None:
        for handle in handles:
            if handle.pending:
                self.mark_computed(handle)

    # blocks

    def _blocks(self, handles: Sequence[HeadHandle]) -> PassPlan:
        block, depth = self.head.block, self.head.depth
        rows = [(h.slot, len(h.tokens)) for h in handles]
        parts = [Part(slot, first, block, first + block, Draft.empty(), mutual=True) for slot, first in rows]
        outputs = [i * block + row for i in range(len(handles)) for row in range(block - depth, block)]
        return PassPlan(
            tokens=[token for h in handles for token in (h.tokens[-1], *[self.head.mask_token] * (block - 1))],
            positions=[part.first + row for part in parts for row in range(block)],
            parts=parts,
            outputs=outputs,
            output_counts=[depth] * len(handles),
            reach=max(part.end for part in parts),
        )

    def _predict(self, handles: Sequence[BlockHandle]) -> None:
        plan, depth = self._blocks(handles), self.head.depth
        result = self._runner.run(plan, (self._state,), self._unembed is None)
        states = result.taps[self._state][plan.output_rows]
        logits = self._unembed[0](states) if self._unembed is not None else result.logits
        assert logits is not None
        for handle, taps, rows in zip(handles, states.split(depth), logits.split(depth), strict=True):
            handle.states, handle.logits = taps, rows

    def _conditional(self, wanted: Sequence[tuple[BlockHandle, list[int], list[int]]]) -> list[Tensor]:
        """Returns for each sequence the logits [n, Vd] below nodes of given depths, 0 the root's, and tokens."""
        counts = [len(depths) for _, depths, _ in wanted]
        rows = [h.logits[depths] for h, depths, _ in wanted if h.logits is not None]
        logits = rows[0] if len(rows) == 1 else torch.cat(rows)
        if self._w1 is None:
            return list(logits.split(counts))
        states = torch.cat([h.states[depths] for h, depths, _ in wanted if h.states is not None])
        ids = torch.tensor([token for *_, tokens in wanted for token in tokens], device=self.device)
        return list((logits + on_host(self._after(ids, states))).split(counts))

    def _after(self, tokens: Tensor, states: Tensor | None) -> Tensor:
        """Returns the Markov head's bias behind tokens [n], float32 [n, Vd], and the states of their rows [n, H]."""
        assert self._w1 is not None and self._w2 is not None
        vectors = before = F.embedding(tokens, self._w1)
        if self._gate is not None:
            assert states is not None
            read = torch.cat([states.to(self.device, self.dtype), before], dim=-1)
            vectors = torch.sigmoid(self._gate(read)) * before
        return self._w2(vectors).float()

    def confidence(self, rows: ScoredRows) -> Tensor:
        """Returns the confidence head's estimates, [n]; see ``DraftStop``."""
        assert self._sure is not None and rows.hidden is not None
        weight, bias = self._sure
        read = rows.hidden.to(self.device, self.dtype)
        if self._w1 is not None and self.head.confident_of:
            read = torch.cat([read, F.embedding(rows.tokens.to(self.device), self._w1)], dim=-1)
        return torch.sigmoid((read.float() * weight).sum(-1) + bias)

    def _product(self, name: str, bias: str | None = None) -> HeadProduct:
        offset = None if bias is None else self.head.tensors[bias]
        return HeadProduct(self.head.tensors[name], offset, self.device, self.dtype)
