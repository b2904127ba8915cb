"""An EAGLE head on our runtime (2401.15077, 2503.01840): a decoder layer on features, with its own KV cache.

Row i of its cache is computed from the token at i + 1 and the target's features at i, and predicts the token at i + 2.
So the row of a sequence's newest token needs the features of the token before it, which the target's last pass
computed. Drafting starts there, and feeds the layer's own outputs down the tree. These rows are dropped after
verification.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.models.base import Handle
from foretoken.models.families.architecture import Architecture
from foretoken.models.formats.weights import (
    DenseMlpWeights,
    Ends,
    Entry,
    LayerWeights,
    NormWeight,
    SelfAttentionWeights,
)
from foretoken.models.heads.eagle import EagleHead
from foretoken.models.runners.base import Pass
from foretoken.models.runners.choose import build_runner
from foretoken.models.runners.linear import product
from foretoken.models.runners.pass_plan import PassPlan

PREFILL_ROWS = 256  # rows of one prefill pass
JOINT_ROWS = 32  # a sequence with more pending rows than this is prefilled first, by passes without logits
_NEXT = -1  # stands for the next token in a lookup of the prefix cache: no cached row has it


@dataclass(eq=False, slots=True)
class HeadHandle(Handle):
    """A sequence in the head's cache; its ``tokens`` are the target's from the second on.

    Attributes:
        fresh: features [n, H] of the pending tokens, in pieces.
        states: the layer's outputs [1 + nodes, H] at the newest token and at the cached nodes: the features of their
            children.
        root: the target's first token; None if it is unknown or rows are missing, so that no row can be shared.
    """

    fresh: list[Tensor] = field(default_factory=list)
    states: Tensor | None = None
    root: int | None = None

    def below(self, parents: Sequence[int]) -> Tensor:
        """Returns the features of children of these nodes, [n, H]; -1 is the newest token."""
        if self.states is None:
            raise ValueError("catch_up computes the newest token's row before anything grows below it")
        index = torch.tensor(parents, device=self.states.device)
        return self.states.index_select(0, index + 1)


class EagleNet:
    """The network of an EAGLE head.

    Args:
        head: the checkpoint.
        embedding: the head's own or the target's, [V, H].
        dtype: dtype of the computation.
        device: device of weights and KV cache.
        max_length: maximum length of a sequence in tokens, drafts included.
        unembed: the target's vocabulary head, for heads without their own.
    """

    def __init__(
        self,
        head: EagleHead,
        embedding: Tensor,
        dtype: torch.dtype,
        device: torch.device,
        max_length: int,
        unembed: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.head, self.hidden, self.max_length = head, head.hidden, max_length
        self.joined, self.dtype, self.device = head.version == 3, dtype, device
        self._unembed = None if "lm_head.weight" in head.tensors else unembed
        self._fc = product(head.tensors["fc.weight"].to(device, dtype), self._bias("fc", dtype, device))
        self._norms = [head.tensors[name].to(device, torch.float32) for name in self._norm_names()]
        self._embedding = embedding.to(dtype)
        self._ids = head.ids().to(device)
        self._whole = head.draft_vocab == head.vocab and bool((self._ids == torch.arange(head.vocab).to(device)).all())
        vocabulary = head.tensors.get("lm_head.weight", torch.zeros(1, head.hidden)).to(dtype)  # zeros: unused
        config = {**head.layer, "model_type": "llama", "vocab_size": vocabulary.shape[0]}
        config |= {"num_hidden_layers": head.layers, "max_position_embeddings": max_length}
        architecture = Architecture.of(config)
        self._eps = architecture.eps
        self._state = head.layers if head.norm_output else head.layers + 1  # the tap that is the feature of child nodes
        self.keeps = False
        layers = [_layer(head, i, dtype) for i in range(head.layers)]
        ends = Ends(self._embedding, self._norm("norm"), vocabulary)
        entry = Entry(self.joined, self._norm("layers.0.hidden_norm"), head.norm_before_residual)
        self._runner = build_runner(architecture, layers, ends, dtype, device, entry)
        self.batch_invariant = self._runner.batch_invariant

    # features

    def features(self, taps: Tensor) -> Tensor:
        """Returns the features [rows, H] for the target's concatenated hidden states [rows, taps * Ht]."""
        if not self.joined:
            return taps
        if self.head.norm_before_fc:
            taps = self._normalize(taps, self._norms[0])
        if self.head.fc_norm:
            own = self._norms[-(taps.shape[-1] // self.head.target_hidden) :]
            parts = taps.split(self.head.target_hidden, dim=-1)
            taps = torch.cat([self._normalize(p, w) for p, w in zip(parts, own, strict=True)], dim=-1)
        return self._multiply(taps)

    def to_target(self, logits: Tensor) -> Tensor:
        """Returns logits [n, Vd] as logits over the target's vocabulary [n, V]; -inf for tokens not in the draft's."""
        if self._whole:
            return logits
        return logits.new_full((logits.shape[0], self.head.vocab), -torch.inf).index_copy_(1, self._ids, logits)

    def target_ids(self, ids: Tensor) -> Tensor:
        """Returns the target's token ids for the draft's."""
        return torch.take(self._ids, ids)

    # sequences

    def open(self, tokens: Sequence[int] = (), scope: Hashable = None) -> HeadHandle:
        """Opens a sequence, with the rows of the target's first ``tokens`` that are in the prefix cache.

        Rows are shared only between sequences with the same ``scope``.
        """
        slot, known = self._runner.acquire([*self._row_keys(tokens), _NEXT], scope)
        return HeadHandle(slot, list(tokens[1 : known + 1]), known, root=tokens[0] if tokens else None)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache per token."""
        return self._runner.kv_bytes_per_token

    def enable_prefix_cache(self, max_bytes: int) -> None:
        """Enable prefix caching within ``max_bytes`` where the runner supports it."""
        self.keeps = self._runner.enable_prefix_cache(max_bytes)

    def close(self, handle: HeadHandle) -> None:
        """Closes a sequence and frees its slot. Closing twice does nothing."""
        if handle.slot >= 0:
            self._runner.release(handle.slot)
            handle.slot = -1

    def extend(self, handle: HeadHandle, tokens: Sequence[int], features: Tensor) -> None:
        """Appends committed tokens with the features [n, H] of the tokens before them; drops the draft."""
        handle.nodes.clear()
        handle.parents.clear()
        handle.states = None
        handle.tokens.extend(tokens)
        handle.fresh.append(features)

    def prefill(self, handle: HeadHandle, left: int = 0) -> None:
        """Computes pending rows without logits, in passes of bounded size, until at most ``left`` are pending."""
        if len(handle.pending) <= left:
            return
        fresh = torch.cat(handle.fresh)
        while len(handle.pending) > left:
            rows = min(PREFILL_ROWS, len(handle.pending) - left)
            part = Handle(handle.slot, handle.tokens[: handle.cached + rows], handle.cached)
            self._run(PassPlan.of([part], [Draft.empty()], [0]), fresh[:rows], outputs=False)
            handle.cached += rows
            fresh = fresh[rows:]
        handle.fresh[:] = [fresh] if left else []

    def catch_up(self, handles: Sequence[HeadHandle]) -> list[Tensor]:
        """Computes all pending rows. Returns the logits [1, Vd] after each sequence's newest token."""
        for handle in handles:
            self.prefill(handle, JOINT_ROWS)
        fresh = [piece for handle in handles for piece in handle.fresh]
        logits, states = self._score(handles, [Draft.empty()] * len(handles), torch.cat(fresh))
        for handle, own in zip(handles, states, strict=True):
            handle.fresh.clear()
            handle.cached, handle.states = len(handle.tokens), own[-1:]
            if self.keeps and handle.root is not None:
                self._runner.publish(handle.slot, self._row_keys([handle.root, *handle.tokens]), handle.cached)
        return logits

    def grow(self, handles: Sequence[HeadHandle], drafts: Sequence[Draft]) -> list[Tensor]:
        """Computes the new nodes of drafts that grow on the cached nodes. Returns the new nodes' logits [new, Vd]."""
        fed = [h.below(d.parents[len(h.nodes) :]) for h, d in zip(handles, drafts, strict=True)]
        logits, states = self._score(handles, drafts, torch.cat(fed))
        for handle, draft, own in zip(handles, drafts, states, strict=True):
            handle.nodes[:], handle.parents[:] = draft.ids, draft.parents
            handle.states = own if handle.states is None else torch.cat([handle.states, own])
        return logits

    def teacher_forced(self, tokens: Sequence[int], features: Tensor) -> Tensor:
        """Returns the logits [n, Vd] of all rows of a new sequence, computed from the target's features [n, H]."""
        handle = HeadHandle(self._runner.acquire()[0], list(tokens))
        try:
            plan = PassPlan.of([handle], [Draft.empty()], [0])
            plan = replace(plan, outputs=list(range(len(tokens))), output_counts=[len(tokens)])
            return self._logits(self._run(plan, features), plan)
        finally:
            self.close(handle)

    def _row_keys(self, tokens: Sequence[int]) -> list[int]:
        """Returns the key of each row for the prefix cache: its token, in the first row also the token before it."""
        return [tokens[0] * self.head.vocab + tokens[1], *tokens[2:]] if len(tokens) > 1 else []

    # passes

    def _score(
        self, handles: Sequence[HeadHandle], drafts: Sequence[Draft], features: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Runs one pass. Returns each sequence's logits and states."""
        plan = PassPlan.of(handles, drafts, [len(handle.nodes) for handle in handles])
        result = self._run(plan, features)
        logits = self._logits(result, plan)
        states = result.taps[self._state]
        if len(handles) == 1:
            return [logits], [states]
        return list(logits.split(plan.output_counts)), list(states.split([part.count for part in plan.parts]))

    def _run(self, plan: PassPlan, features: Tensor, outputs: bool = True) -> Pass:
        """Runs one pass. Without ``outputs`` it computes keys and values only."""
        if not self.joined:
            tokens = torch.tensor(plan.tokens, device=self._embedding.device)
            embedded = F.embedding(tokens, self._embedding).to(self.device)
            features = self._multiply(torch.cat([embedded, features.to(embedded.dtype)], dim=-1))
        taps = (self._state,) if outputs else ()
        return self._runner.run(replace(plan, features=features), taps, outputs and self._unembed is None)

    def _logits(self, result: Pass, plan: PassPlan) -> Tensor:
        if result.logits is not None:
            return result.logits
        assert self._unembed is not None
        return self._unembed(result.taps[self._state][plan.outputs])

    def _multiply(self, x: Tensor) -> Tensor:
        """Applies fc. A single row is doubled (see ``linear.py``)."""
        rows = x.to(self.device, self.dtype)
        return self._fc(rows if len(rows) > 1 else rows.expand(2, -1).contiguous())[: len(rows)]

    # weights

    def _bias(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        bias = self.head.tensors.get(f"{name}.bias")
        return None if bias is None else bias.to(device, dtype)

    def _norm(self, name: str) -> NormWeight | None:
        return _norm(self.head, name)

    def _norm_names(self) -> list[str]:
        count = self.head.tensors["fc.weight"].shape[-1] // self.head.target_hidden
        before = ["input_norm.weight"] if self.head.norm_before_fc else []
        return before + ([f"fc_norm.{i}.weight" for i in range(count)] if self.head.fc_norm else [])

    def _normalize(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.float(), weight.shape, weight, self._eps).to(x.dtype)


def _layer(head: EagleHead, index: int, dtype: torch.dtype) -> LayerWeights:
    """Returns the weights of layer ``index`` for a runner; their shapes were checked when the head was read."""
    at, tensors = f"layers.{index}.", head.tensors
    qkv = [f"{at}self_attn.{part}_proj" for part in "qkv"]
    biased = all(f"{name}.bias" in tensors for name in qkv)
    attention = SelfAttentionWeights(
        qkv=tuple(tensors[f"{name}.weight"].to(dtype) for name in qkv),
        qkv_bias=torch.cat([tensors[f"{name}.bias"] for name in qkv]).to(dtype) if biased else None,
        q_norm=None,
        k_norm=None,
        out=tensors[f"{at}self_attn.o_proj.weight"].to(dtype),
        out_bias=None,
    )
    mlp = DenseMlpWeights(
        up=tuple(tensors[f"{at}mlp.{part}_proj.weight"].to(dtype) for part in ("gate", "up")),
        up_bias=None,
        down=tensors[f"{at}mlp.down_proj.weight"].to(dtype),
        down_bias=None,
    )
    return LayerWeights(
        norm=_norm(head, f"{at}input_layernorm"),
        attention=attention,
        after_mixer=None,
        mlp_norm=_norm(head, f"{at}post_attention_layernorm"),
        mlp=mlp,
        after_mlp=None,
    )


def _norm(head: EagleHead, name: str) -> NormWeight | None:
    weight = head.tensors.get(f"{name}.weight")
    return None if weight is None else NormWeight(weight.float())
