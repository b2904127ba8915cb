"""Assistants of Gemma 4: layers with queries alone, which read the target's keys and values.

Every row is at the position of the newest token, whose keys and values the target has not computed yet, and sees those
of the tokens before it. Its input is a token, embedded by the target, and a hidden state: the target's at the token
before the newest, or the assistant's at the parent node. So nodes of a tree are independent rows, and nothing is
cached.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.core.artifacts import ASSISTANTS
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.core.schema import Schema, Size, parse
from foretoken.models.decoder import Decoder
from foretoken.models.families.architecture import Architecture, unsupported
from foretoken.models.formats.layers import Source, read_ends, read_layer
from foretoken.models.formats.weights import Ends, Entry, LayerWeights, NormWeight
from foretoken.models.heads.feature_net import FeatureNet, HeadHandle
from foretoken.models.heads.files import check_shapes, open_head
from foretoken.models.heads.weights import HeadProduct
from foretoken.models.runners.native.bindings import BatchSpec
from foretoken.models.runners.native.runner import NativeRunner
from foretoken.models.runners.pass_plan import Part, PassPlan

_CENTROIDS, _ORDER = "masked_embedding.centroids.weight", "masked_embedding.token_ordering"


class AssistantConfig(Schema):
    """The fields of an assistant's config.json. Those of its layers must also satisfy ``CausalConfig``."""

    model_type: str
    text_config: dict[str, Any]
    backbone_hidden_size: Size
    use_ordered_embeddings: bool | None = None
    num_centroids: Size | None = None
    centroid_intermediate_top_k: Size | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Clusters:
    """The vocabulary in clusters. A state chooses a few, and only their tokens have separate logits."""

    centroids: Tensor  # [clusters, H]
    tokens: Tensor  # the tokens of each cluster, int64 [clusters, tokens of a cluster]
    chosen: int  # number of clusters that a state chooses


@dataclass(frozen=True, slots=True, eq=False)
class AssistantHead:
    """An assistant, on the CPU."""

    architecture: Architecture  # sizes of its layers, which have no keys and values
    target_hidden: int  # hidden size Ht of the target
    layers: tuple[LayerWeights, ...]  # the weights of its layers
    norm: NormWeight | None  # norm of their output
    embedding: Tensor  # its vocabulary head [V, H]
    into: Tensor  # matrix from the target's embedding and hidden state to the layers' input, [H, 2 Ht]
    back: Tensor  # matrix from their normed output to a hidden state of the target, [Ht, H]
    clusters: Clusters | None  # the vocabulary in clusters; None if all tokens have logits


def is_assistant(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") in ASSISTANTS


def read_assistant(path: Path, dtype: torch.dtype) -> AssistantHead:
    """Reads the checkpoint in ``path``, its matrices in ``dtype``."""
    config, weights = open_head(path)
    if not is_assistant(config):
        raise ModelLoadError(
            f"{path} has the model_type {config.get('model_type')!r}; expected {' or '.join(ASSISTANTS)}"
        )
    c = parse(AssistantConfig, config, str(path / "config.json"))
    a = _architecture(c, path)
    hidden, wide = a.hidden, c.backbone_hidden_size
    check_shapes(path, weights, {"pre_projection.weight": (hidden, 2 * wide), "post_projection.weight": (wide, hidden)})
    source = Source(weights, a, dtype)
    ends = read_ends(source)
    assert isinstance(ends.embedding, Tensor)  # a head is read as floats
    return AssistantHead(
        architecture=a,
        target_hidden=wide,
        layers=tuple(read_layer(source, number) for number in range(a.layers)),
        norm=ends.norm,
        embedding=ends.embedding,
        into=weights["pre_projection.weight"].to(dtype),
        back=weights["post_projection.weight"].to(dtype),
        clusters=_clusters(c, weights, a, path, dtype) if c.use_ordered_embeddings else None,
    )


def _architecture(c: AssistantConfig, path: Path) -> Architecture:
    """Returns the architecture of the layers. Windows are one longer than a decoder's, because a row has no key itself.

    A sliding layer reads the last ``sliding_window + 1`` keys before its row.
    """
    text = c.text_config
    fields = {
        **text,
        "model_type": ASSISTANTS[c.model_type],
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": text.get("vocab_size"),
        "tie_word_embeddings": True,
    }
    if (reason := unsupported(fields)) is not None:
        raise ModelLoadError(f"the layers of the assistant in {path} have {reason}, which is not computed here")
    a = Architecture.of(fields)
    stack = (
        replace(layer, source=number, window=layer.window + 2 if layer.window else 0)
        for number, layer in enumerate(a.stack)
    )
    return replace(a, stack=tuple(stack))


def _clusters(
    c: AssistantConfig, weights: Mapping[str, Tensor], a: Architecture, path: Path, dtype: torch.dtype
) -> Clusters:
    count, chosen = c.num_centroids or 2048, c.centroid_intermediate_top_k or 32
    check_shapes(path, weights, {_CENTROIDS: (count, a.hidden), _ORDER: (a.vocab,)})
    tokens = weights[_ORDER].long()
    if a.vocab % count or chosen > count or not torch.equal(tokens.sort().values, torch.arange(a.vocab)):
        raise ModelLoadError(
            f"{path} has {count} clusters, of which {chosen} are chosen, and a token_ordering of {a.vocab} tokens; "
            "expected a divisor of the vocabulary, no more chosen than there are, and every token once"
        )
    return Clusters(weights[_CENTROIDS].to(dtype), tokens.view(count, -1), chosen)


class QueryOnlyRunner(NativeRunner):
    """A runner whose rows see only the first rows of a slot of another runner.

    All rows of a plan's part see the ``first`` rows of its slot; they write nothing. Raises KernelsUnavailable if the
    kernels do not support the model.
    """

    def __init__(
        self,
        architecture: Architecture,
        layers: Iterable[LayerWeights],
        ends: Ends,  # embedding, last norm and vocabulary head
        dtype: torch.dtype,
        target: NativeRunner,  # the runner of the model whose cache is read
        # for each layer the target's layer whose keys and values it reads; their sizes are equal
        sources: Sequence[int],
    ) -> None:
        self._target = target
        super().__init__(architecture, layers, ends, dtype, Entry())
        self.computes_chains = False  # its rows do not see each other
        for number, layer in enumerate(sources):
            attention = self._spec.layers[number].attention
            attention.cache_at, attention.scales_at = target.place_of(layer)

    def _begin(
        self, architecture: Architecture, dtype: torch.dtype, entry: Entry | None, kv_cache_dtype: str = "auto"
    ) -> None:
        super()._begin(architecture, dtype, entry, kv_cache_dtype)
        self._cache_kind = self._target._cache_kind

    def _page_lists(self, parts: Sequence[Part], further: Sequence[int]) -> tuple[array[int], array[int]]:
        return self._target.page_lists([part.slot for part in parts])

    def _extend(self, plan: PassPlan, batch: BatchSpec) -> None:
        batch.hold(prefix=array("i", [part.first for part in plan.parts for _ in range(part.count)]))


@dataclass(eq=False, slots=True)
class AssistantHandle(HeadHandle):
    """A sequence; ``slot`` is the target's. place: the position of the newest token."""

    place: int = 0


class AssistantNet(FeatureNet):
    """The network of an assistant.

    Args:
        embedding: the target's, [V, Ht].

    Raises:
        InvalidRequest: the target's keys and values are not in the cache of the compiled kernels.
        ModelLoadError: the assistant was made for another target.
    """

    def __init__(self, head: AssistantHead, embedding: Tensor, target: Decoder) -> None:
        runner, a = target.runner, target.architecture
        if not isinstance(runner, NativeRunner) or target.takes_source:
            raise InvalidRequest(
                "an assistant reads the target's keys and values, which only the compiled kernels share; use another "
                "method, or run the target on a CPU that has them (foretoken info says why not)"
            )
        self._dtype, self._layers, self._clusters = target.dtype, head.architecture.layers, head.clusters
        self._scale = torch.tensor(a.embedding_scale, dtype=target.dtype)
        self._embedding, self._vocabulary = embedding.to(target.dtype), head.embedding
        cpu = torch.device("cpu")
        self._into, self._back = (HeadProduct(matrix, None, cpu, matrix.dtype) for matrix in (head.into, head.back))
        vocabulary = head.embedding if head.clusters is None else head.embedding[:1]  # clusters have separate logits
        ends = Ends(vocabulary, head.norm, vocabulary)
        architecture = head.architecture
        layers = QueryOnlyRunner(architecture, head.layers, ends, target.dtype, runner, target_layers(architecture, a))
        super().__init__(layers, architecture.layers, architecture.vocab, target.max_length)

    def features(self, taps: Tensor) -> Tensor:
        return taps

    # sequences

    def open(self, tokens: Sequence[int] = (), scope: Hashable = None) -> AssistantHandle:
        """Opens a sequence; only the state of the last token is needed."""
        return AssistantHandle(-1, list(tokens[1:]), max(len(tokens) - 1, 0))

    def close(self, handle: HeadHandle) -> None:
        handle.slot = -1

    def enable_prefix_cache(self, max_bytes: int) -> None:
        """Does nothing: nothing is cached."""

    def extend(self, handle: HeadHandle, tokens: Sequence[int], features: Tensor | None = None) -> None:
        handle.rewind()
        handle.states = None
        handle.tokens.extend(tokens)
        handle.fresh[:] = [] if features is None else [features[-1:]]
        handle.taps.clear()  # only the newest token's row is computed

    def prefill(self, handle: HeadHandle, left: int = 0) -> None:
        """Does nothing: only the newest token has a row."""

    def catch_up(self, handles: Sequence[HeadHandle]) -> list[Tensor]:
        self._make_features(handles)
        fresh = [handle.fresh[-1][-1:] for handle in handles]
        logits, states = self._step(handles, [handle.tokens[-1:] for handle in handles], torch.cat(fresh))
        for handle, state in zip(handles, states, strict=True):
            handle.fresh.clear()
            handle.cached, handle.states = len(handle.tokens), state
        return logits

    def grow(self, handles: Sequence[HeadHandle], drafts: Sequence[Draft]) -> list[Tensor]:
        scored = [len(handle.nodes) for handle in handles]
        new = list(zip(handles, drafts, scored, strict=True))
        fed = torch.cat([handle.below(draft.parents[done:]) for handle, draft, done in new])
        logits, states = self._step(handles, [draft.ids[done:] for _, draft, done in new], fed)
        for handle, draft, state in zip(handles, drafts, states, strict=True):
            handle.nodes[:], handle.parents[:] = draft.ids, draft.parents
            handle.states = state if handle.states is None else torch.cat([handle.states, state])
        return logits

    # passes

    @torch.inference_mode()
    def _step(
        self, handles: Sequence[HeadHandle], tokens: Sequence[Sequence[int]], states: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the logits and the next hidden states of each sequence's rows.

        Args:
            tokens: the token of each row, by sequence.
            states: the hidden state [rows, Ht] of each row.
        """
        flat = torch.tensor([token for row_tokens in tokens for token in row_tokens])
        embedded = F.embedding(flat, self._embedding) * self._scale
        features = self._into(torch.cat([embedded, states.to(self._dtype)], dim=-1))
        plan = _plan(handles, tokens, features)
        result = self._runner.run(plan, (self._layers,), logits=self._clusters is None)
        normed = result.taps[self._layers].to(self._dtype)
        logits = result.logits
        if logits is None:
            assert self._clusters is not None
            logits = clustered(normed, self._vocabulary, self._clusters)
        return list(logits.split(plan.output_counts)), list(self._back(normed).split(plan.output_counts))


def target_layers(assistant: Architecture, target: Architecture) -> list[int]:
    """Returns the layer of the target that each layer of an assistant reads: the last one of its kind."""
    numbers = []
    for layer in assistant.stack:
        same_kind = [
            number
            for number, other in enumerate(target.stack)
            if other.attention and other.source is None and bool(other.window) == bool(layer.window)
        ]
        if not same_kind or target.sizes(target.stack[same_kind[-1]]) != assistant.sizes(layer):
            raise ModelLoadError(
                f"the assistant reads keys and values of {assistant.sizes(layer)}, which this target does not have; an "
                "assistant only fits the model that it was trained on"
            )
        numbers.append(same_kind[-1])
    return numbers


def clustered(states: Tensor, vocabulary: Tensor, clusters: Clusters) -> Tensor:
    """Returns logits of the tokens of the chosen clusters; all other tokens get one less than the lowest of these.

    Args:
        states: normed states [rows, H].
        vocabulary: the vocabulary head [V, H].

    Returns:
        float32 [rows, V]
    """
    best = (states @ clusters.centroids.t()).topk(clusters.chosen).indices
    tokens = clusters.tokens[best].flatten(1)
    logits = torch.bmm(F.embedding(tokens, vocabulary), states[:, :, None]).squeeze(-1).float()
    lowest = logits.min(dim=-1, keepdim=True).values - 1.0
    return lowest.expand(-1, vocabulary.shape[0]).scatter(1, tokens, logits)


def _plan(handles: Sequence[HeadHandle], tokens: Sequence[Sequence[int]], features: Tensor) -> PassPlan:
    """Returns the pass: each row at the position of its sequence's newest token, whose cache row is free."""
    positions = [handle.place if isinstance(handle, AssistantHandle) else 0 for handle in handles]
    return PassPlan(
        tokens=[token for row_tokens in tokens for token in row_tokens],
        positions=[position for position, row_tokens in zip(positions, tokens, strict=True) for _ in row_tokens],
        parts=[
            Part(handle.slot, position, len(row_tokens), position + len(row_tokens), Draft.empty())
            for handle, position, row_tokens in zip(handles, positions, tokens, strict=True)
        ],
        outputs=list(range(len(features))),
        output_counts=[len(row_tokens) for row_tokens in tokens],
        reach=max(positions) + 1,
        features=features,
    )
