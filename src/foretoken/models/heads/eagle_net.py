"""An EAGLE head on our runtime (2401.15077, 2503.01840): one decoder layer that is given features, over its own cache.

Row i of its cache is made of the token at i + 1 and the target's features at i, and guesses the token at i + 2. So the
row of a sequence's newest token needs features of the token before it, which the target's last pass computed: drafting
starts from there, feeding the layer's own outputs down the tree. Those rows are dropped when the truth is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.models.architecture import Architecture
from foretoken.models.base import Handle
from foretoken.models.heads.eagle import EagleHead
from foretoken.models.linear import product
from foretoken.models.plan import Plan
from foretoken.models.runner import Pass, build
from foretoken.models.weights import Ends, Entry, LayerWeights

PREFILL_ROWS = 256  # of a pass that reads
JOINT_ROWS = 32  # pending ones that are computed with the first guess; of more, most need keys and values alone
_NEXT = -1  # stands for the token that a sequence goes on with: a row that nobody has


@dataclass(eq=False, slots=True)
class HeadHandle(Handle):
    """A sequence in the head's cache; its ``tokens`` are the target's from the second on.

    fresh: features [n, H] of the pending tokens, in pieces. states: [1 + nodes, H], the layer's outputs at the newest
    token and at the cached nodes: what the nodes below them are fed. root: the target's first token, None where that is
    not known or rows are missing, so that nobody else could make use of them.
    """

    fresh: list[Tensor] = field(default_factory=list)
    states: Tensor | None = None
    root: int | None = None

    def below(self, parents: Sequence[int]) -> Tensor:
        """What children of these nodes are fed, [n, H]; -1 is the newest token."""
        if self.states is None:
            raise ValueError("catch_up computes the newest token's row before anything grows below it")
        index = torch.tensor(parents, device=self.states.device)
        return self.states.index_select(0, index + 1)


class EagleNet:
    """The head's arithmetic; sequences in it are ``HeadHandle``s.

    embedding: [V, H], the head's own or the target's. unembed: the target's vocabulary head, for heads without one.
    max_length: tokens of a sequence at most, drafts included.
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
        vocabulary = head.tensors.get("lm_head.weight", torch.zeros(1, head.hidden)).to(dtype)  # zeros are never asked
        config = {**head.layer, "model_type": "llama", "vocab_size": vocabulary.shape[0]}
        config |= {"num_hidden_layers": head.layers, "max_position_embeddings": max_length}
        architecture = Architecture.of(config)
        self._eps = architecture.eps
        self._state = head.layers if head.norm_output else head.layers + 1  # the tap that is fed down the tree
        self.keeps = False
        layers = [_layer(head, i, dtype) for i in range(head.layers)]
        ends = Ends(self._embedding, self._norm("norm"), vocabulary)
        entry = Entry(self.joined, self._norm("layers.0.hidden_norm"), head.norm_before_residual)
        self._runner = build(architecture, layers, ends, dtype, device, entry)
        self.rows_independent = self._runner.rows_independent

    # features

    def features(self, taps: Tensor) -> Tensor:
        """The target's hidden states [rows, taps * Ht], side by side, as the head takes them: [rows, H]."""
        if not self.joined:
            return taps
        if self.head.norm_before_fc:
            taps = self._normalise(taps, self._norms[0])
        if self.head.fc_norm:
            own = self._norms[-(taps.shape[-1] // self.head.target_hidden) :]
            parts = taps.split(self.head.target_hidden, dim=-1)
            taps = torch.cat([self._normalise(p, w) for p, w in zip(parts, own, strict=True)], dim=-1)
        return self._multiply(taps)

    def to_target(self, logits: Tensor) -> Tensor:
        """Logits over the draft's vocabulary [n, Vd] to the target's [n, V]; -inf where the draft has no token."""
        if self._whole:
            return logits
        return logits.new_full((logits.shape[0], self.head.vocab), -torch.inf).index_copy_(1, self._ids, logits)

    def target_ids(self, ids: Tensor) -> Tensor:
        """The draft's token ids to the target's."""
        return torch.take(self._ids, ids)

    # sequences

    def open(self, tokens: Sequence[int] = (), cache_salt: str | None = None) -> HeadHandle:
        """A sequence that has in place what earlier ones left of the first rows of the target's ``tokens``.

        cache_salt: only what sequences of the same salt left.
        """
        slot, known = self._runner.acquire([*self._names(tokens), _NEXT], cache_salt)
        return HeadHandle(slot, list(tokens[1 : known + 1]), known, root=tokens[0] if tokens else None)

    @property
    def row_bytes(self) -> int:
        """Bytes that one token's keys and values take."""
        return self._runner.row_bytes

    def keep(self, limit: int) -> None:
        """Hold at most ``limit`` bytes, rows for later sequences that begin alike among them, where the runner can."""
        self.keeps = self._runner.keep(limit)

    def close(self, handle: HeadHandle) -> None:
        """Give the place back. Closing twice does nothing."""
        if handle.slot >= 0:
            self._runner.release(handle.slot)
            handle.slot = -1

    def extend(self, handle: HeadHandle, tokens: Sequence[int], features: Tensor) -> None:
        """Committed tokens and the features [n, H] of the tokens before them. What was drafted is dropped."""
        handle.nodes.clear()
        handle.parents.clear()
        handle.states = None
        handle.tokens.extend(tokens)
        handle.fresh.append(features)

    def read(self, handle: HeadHandle, left: int = 0) -> None:
        """Keys and values of pending rows, in passes of bounded size, until no more than ``left`` are pending."""
        if len(handle.pending) <= left:
            return
        fresh = torch.cat(handle.fresh)
        while len(handle.pending) > left:
            rows = min(PREFILL_ROWS, len(handle.pending) - left)
            part = Handle(handle.slot, handle.tokens[: handle.cached + rows], handle.cached)
            self._run(Plan.of([part], [Draft.empty()], [0]), fresh[:rows], answered=False)
            handle.cached += rows
            fresh = fresh[rows:]
        handle.fresh[:] = [fresh] if left else []

    def catch_up(self, handles: Sequence[HeadHandle]) -> list[Tensor]:
        """Compute all pending rows. -> logits [1, Vd] after each sequence's newest token"""
        for handle in handles:
            self.read(handle, JOINT_ROWS)
        fresh = [piece for handle in handles for piece in handle.fresh]
        logits, states = self._score(handles, [Draft.empty()] * len(handles), torch.cat(fresh))
        for handle, own in zip(handles, states, strict=True):
            handle.fresh.clear()
            handle.cached, handle.states = len(handle.tokens), own[-1:]
            if self.keeps and handle.root is not None:
                self._runner.publish(handle.slot, self._names([handle.root, *handle.tokens]), handle.cached)
        return logits

    def grow(self, handles: Sequence[HeadHandle], drafts: Sequence[Draft]) -> list[Tensor]:
        """Compute the new nodes of drafts that grow on those already cached. -> their logits [new, Vd]"""
        fed = [h.below(d.parents[len(h.nodes) :]) for h, d in zip(handles, drafts, strict=True)]
        logits, states = self._score(handles, drafts, torch.cat(fed))
        for handle, draft, own in zip(handles, drafts, states, strict=True):
            handle.nodes[:], handle.parents[:] = draft.ids, draft.parents
            handle.states = own if handle.states is None else torch.cat([handle.states, own])
        return logits

    def teach(self, tokens: Sequence[int], features: Tensor) -> Tensor:
        """Logits [n, Vd] of every row of a sequence of its own, fed the target's features [n, H] throughout."""
        handle = HeadHandle(self._runner.acquire()[0], list(tokens))
        try:
            plan = Plan.of([handle], [Draft.empty()], [0])
            plan = replace(plan, outputs=list(range(len(tokens))), output_counts=[len(tokens)])
            return self._logits(self._run(plan, features), plan)
        finally:
            self.close(handle)

    def _names(self, tokens: Sequence[int]) -> list[int]:
        """What is in each row, for who looks for it: its token, and in the first the token before it, too."""
        return [tokens[0] * self.head.vocab + tokens[1], *tokens[2:]] if len(tokens) > 1 else []

    # passes

    def _score(
        self, handles: Sequence[HeadHandle], drafts: Sequence[Draft], features: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """One pass. -> each sequence's logits and states"""
        plan = Plan.of(handles, drafts, [len(handle.nodes) for handle in handles])
        result = self._run(plan, features)
        logits = self._logits(result, plan)
        states = result.taps[self._state]
        if len(handles) == 1:
            return [logits], [states]
        return list(logits.split(plan.output_counts)), list(states.split([part.count for part in plan.parts]))

    def _run(self, plan: Plan, features: Tensor, answered: bool = True) -> Pass:
        """answered: whether logits and states are wanted, and not keys and values alone."""
        if not self.joined:
            tokens = torch.tensor(plan.tokens, device=self._embedding.device)
            embedded = F.embedding(tokens, self._embedding).to(self.device)
            features = self._multiply(torch.cat([embedded, features.to(embedded.dtype)], dim=-1))
        taps = (self._state,) if answered else ()
        return self._runner.run(replace(plan, features=features), taps, answered and self._unembed is None)

    def _logits(self, result: Pass, plan: Plan) -> Tensor:
        if result.logits is not None:
            return result.logits
        assert self._unembed is not None
        return self._unembed(result.taps[self._state][plan.outputs])

    def _multiply(self, x: Tensor) -> Tensor:
        """fc, a lone row doubled (see ``linear.py``)."""
        rows = x.to(self.device, self.dtype)
        return self._fc(rows if len(rows) > 1 else rows.expand(2, -1).contiguous())[: len(rows)]

    # weights

    def _bias(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        bias = self.head.tensors.get(f"{name}.bias")
        return None if bias is None else bias.to(device, dtype)

    def _norm(self, name: str) -> Tensor | None:
        weight = self.head.tensors.get(f"{name}.weight")
        return None if weight is None else weight.float()

    def _norm_names(self) -> list[str]:
        count = self.head.tensors["fc.weight"].shape[-1] // self.head.target_hidden
        before = ["input_norm.weight"] if self.head.norm_before_fc else []
        return before + ([f"fc_norm.{i}.weight" for i in range(count)] if self.head.fc_norm else [])

    def _normalise(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.float(), weight.shape, weight, self._eps).to(x.dtype)


def _layer(head: EagleHead, index: int, dtype: torch.dtype) -> LayerWeights:
    """Layer ``index`` as the runners take it; shapes were checked when it was read."""
    at, tensors = f"layers.{index}.", head.tensors
    qkv = [f"{at}self_attn.{part}_proj" for part in "qkv"]
    biased = all(f"{name}.bias" in tensors for name in qkv)
    norm = tensors.get(f"{at}input_layernorm.weight")
    return LayerWeights(
        norm=None if norm is None else norm.float(),
        qkv=tuple(tensors[f"{name}.weight"].to(dtype) for name in qkv),
        qkv_bias=torch.cat([tensors[f"{name}.bias"] for name in qkv]).to(dtype) if biased else None,
        q_norm=None,
        k_norm=None,
        out=tensors[f"{at}self_attn.o_proj.weight"].to(dtype),
        out_bias=None,
        post_attention_norm=None,
        mlp_norm=tensors[f"{at}post_attention_layernorm.weight"].float(),
        gate_up=tuple(tensors[f"{at}mlp.{part}_proj.weight"].to(dtype) for part in ("gate", "up")),
        down=tensors[f"{at}mlp.down_proj.weight"].to(dtype),
        post_mlp_norm=None,
    )
