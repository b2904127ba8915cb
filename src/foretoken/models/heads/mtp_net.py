"""Multi-token-prediction layers on our runtime (2412.19437, section 2.2), each with its own KV cache.

Of several layers in their order, layer k reads layer k - 1 and drafts the k-th token. Its row of a token is computed
from the token and layer k - 1's output at the token before; the first layer reads the target's hidden state there. So
every layer has a row of each committed token but the first k + 1. A draft's level d is drafted by layer d, beyond the
last layer by that one, chained.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.models.chains import ChainRequest, ModelChain
from foretoken.models.formats.weights import Ends, Entry, NormWeight
from foretoken.models.heads.feature_net import JOINT_ROWS, DraftNet, FeatureNet, HeadHandle
from foretoken.models.heads.mtp import MtpLayer
from foretoken.models.heads.weights import HeadProduct
from foretoken.models.runners.base import DeeperLayer
from foretoken.models.runners.choose import build_runner

_NORMED, _PLAIN = 1, 2  # taps of a runner of one layer


class MtpNet(FeatureNet):
    """The network of one MTP layer."""

    def __init__(
        self,
        layer: MtpLayer,
        embedding: Tensor,  # the target's embedding, [V, H]
        unembed: Callable[[Tensor], Tensor],  # the target's vocabulary head
        dtype: torch.dtype,
        device: torch.device,
        max_length: int,  # maximum length of a sequence in tokens, drafts included
        normed: bool = True,  # whether children read the layer's output after its last norm; otherwise before it
        window: int | None = None,  # number of tokens that attention sees at most; None for the layer's own window
    ) -> None:
        self.hidden = layer.architecture.hidden
        self._device, self._dtype, self._eps = device, dtype, layer.architecture.eps
        self._embedding = embedding
        self._norms = layer.embedding_norm.to(device), layer.hidden_norm.to(device)
        architecture = replace(layer.architecture, embedding_scale=1.0).windowed(window)
        unused = torch.zeros(1, architecture.hidden, dtype=dtype)
        ends = Ends(embedding.to(dtype), layer.norm, unused)
        norms = NormWeight(layer.embedding_norm), NormWeight(layer.hidden_norm)
        entry = Entry(fusion=layer.projection.to(dtype), fused_layers=2, fuses_embedding=True, fusion_norms=norms)
        runner = build_runner(architecture, [layer.weights], ends, dtype, device, entry)
        self._projection = None if runner.fuses else HeadProduct(layer.projection, None, device, dtype)
        state = _NORMED if normed else _PLAIN
        super().__init__(runner, state, embedding.shape[0], max_length, (unembed, _NORMED))
        self._draft_from(torch.arange(self.vocab_size), chained=runner.fuses)

    @property
    def normed(self) -> bool:
        return self._state == _NORMED

    @normed.setter
    def normed(self, normed: bool) -> None:
        self._state = _NORMED if normed else _PLAIN

    def features(self, taps: Tensor) -> Tensor:
        return taps

    def _entering(self, tokens: Sequence[int], features: Tensor) -> Tensor:
        assert self._projection is not None
        embedded = F.embedding(torch.tensor(tokens, device=self._embedding.device), self._embedding).to(self._device)
        parts = zip((embedded, features.to(self._device)), self._norms, strict=True)
        rows = torch.cat([F.rms_norm(x.float(), w.shape, w, self._eps).to(self._dtype) for x, w in parts], dim=-1)
        return self._projection(rows)


@dataclass(eq=False, slots=True)
class StackHandle(HeadHandle):
    """A sequence in all layers: itself in the first, and ``deeper`` in the others."""

    deeper: list[HeadHandle] = field(default_factory=list)

    @property
    def layers(self) -> list[HeadHandle]:
        return [self, *self.deeper]


class MtpStack(DraftNet):
    """The network of several MTP layers. nets: the layers."""

    def __init__(self, nets: Sequence[MtpNet]) -> None:
        self.nets = tuple(nets)
        self.max_length, self.vocab_size = min(net.max_length for net in nets), nets[0].vocab_size
        self.batch_invariant = all(net.batch_invariant for net in nets)
        self.adapts_levels = all(net.adapts_levels for net in nets)

    @property
    def normed(self) -> bool:
        return self.nets[0].normed

    @normed.setter
    def normed(self, normed: bool) -> None:
        for net in self.nets:
            net.normed = normed

    def teacher_forced(self, tokens: Sequence[int], features: Tensor) -> Tensor:
        """Returns the first layer's logits; see ``FeatureNet``."""
        return self.nets[0].teacher_forced(tokens, features)

    def features(self, taps: Tensor) -> Tensor:
        return self.nets[0].features(taps)

    def open(self, tokens: Sequence[int] = (), scope: Hashable = None) -> StackHandle:
        """Opens a sequence; see ``DraftNet.open``.

        A layer's first row that is not cached needs the output of the layer before at the token before, so each layer
        computes one cached row more than the next one.
        """
        opened = [net.open(tokens[k:], (scope, tuple(tokens[:k]))) for k, net in enumerate(self.nets)]
        rows = max(0, min(k + handle.cached for k, handle in enumerate(opened)) - len(opened) + 1)
        for handle in opened:
            del handle.tokens[rows:]
            handle.cached, handle.outputs = rows, []
        opened[-1].outputs = None
        first, *deeper = opened
        return StackHandle(first.slot, first.tokens, rows, root=first.root, outputs=first.outputs, deeper=deeper)

    def close(self, handle: HeadHandle) -> None:
        for net, part in zip(self.nets, _layers(handle), strict=True):
            net.close(part)

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(net.kv_bytes_per_token for net in self.nets)

    def enable_prefix_cache(self, max_bytes: int) -> None:
        for net in self.nets:
            net.enable_prefix_cache(max_bytes // len(self.nets))
        self.keeps = all(net.keeps for net in self.nets)

    def extend(self, handle: HeadHandle, tokens: Sequence[int], features: Tensor | None = None) -> None:
        for part in _layers(handle)[1:]:
            part.nodes.clear()
            part.parents.clear()
            part.states = None
        self.nets[0].extend(handle, tokens, features)

    def prefill(self, handle: HeadHandle, left: int = 0) -> None:
        """Computes pending rows; at most ``left`` of the first layer may stay, and those of others that read them."""
        for k, (net, part) in enumerate(zip(self.nets, _layers(handle), strict=True)):
            if k:
                self._feed(handle, k)
            net.prefill(part, 0 if k else left)

    @property
    def drafts_chains(self) -> bool:
        return all(net.drafts_chains for net in self.nets)

    def chains(
        self, handles: Sequence[HeadHandle], requests: Sequence[ChainRequest], vocab: int
    ) -> Sequence[ModelChain]:
        for handle in handles:
            self.prefill(handle, JOINT_ROWS)
        layers = list(zip(*map(_layers, handles), strict=True))  # by layer: its sequences
        new: list[list[list[int]]] = []  # by deeper layer and sequence: tokens
        deeper: list[DeeperLayer] = []
        for k, net in enumerate(self.nets[1:], 1):
            carried = [above.outputs[-1] if above.outputs else None for above in layers[k - 1]]
            new.append([first.tokens[part.cached + k :] for first, part in zip(handles, layers[k], strict=True)])
            deeper.append(net.behind(layers[k], new[-1], carried))
        chains = self.nets[0].chains_with(handles, requests, deeper)
        for k, (layer, tokens) in enumerate(zip(deeper, new, strict=True), 1):
            for above, part, added, state in zip(*layers[k - 1 : k + 1], tokens, layer.carried, strict=True):
                above.outputs = [state] if above.cached and state is not None else []
                self.nets[k].extend(part, added)
                self.nets[k].mark_computed(part)
        return chains

    def catch_up(self, handles: Sequence[HeadHandle]) -> list[Tensor]:
        logits = self.nets[0].catch_up(handles)
        for k, net in enumerate(self.nets[1:], 1):
            for handle in handles:
                self._feed(handle, k)
            parts = [_layers(handle)[k] for handle in handles]
            if pending := [part for part in parts if part.pending]:
                net.catch_up(pending)
            for part, row in zip(parts, logits, strict=True):
                if part.states is None:  # no token is far enough in: there is no such row, which costs acceptance alone
                    part.states = torch.zeros(1, self.nets[0].hidden, device=row.device)
        return logits

    def grow(self, handles: Sequence[HeadHandle], drafts: Sequence[Draft]) -> list[Tensor]:
        level = max(draft.depths[-1] for draft in drafts)
        k = min(level, len(self.nets) - 1)
        parts = [_layers(handle)[k] for handle in handles]
        before = [_layers(handle)[k - (level == k)] for handle in handles]  # the layers that drafted the level above
        counts = [len(part.nodes) for part in before]
        rows = self.nets[k].grow_on(parts, drafts, before)
        return [logits[count - len(draft) :] for logits, draft, count in zip(rows, drafts, counts, strict=True)]

    def _feed(self, handle: HeadHandle, k: int) -> None:
        """Gives layer k its new tokens, and the outputs of the layer before at the tokens before them."""
        above, layer = _layers(handle)[k - 1 : k + 1]
        assert above.outputs is not None
        if not above.outputs:
            return
        outputs = torch.cat(above.outputs)
        above.outputs[:] = [outputs[-1:]]
        if len(outputs) > 1:
            self.nets[k].extend(layer, above.tokens[above.cached - len(outputs) + 1 : above.cached], outputs[:-1])


def _layers(handle: HeadHandle) -> list[HeadHandle]:
    assert isinstance(handle, StackHandle)
    return handle.layers
