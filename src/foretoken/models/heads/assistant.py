"""Reads the assistants of Gemma 4. Their layers have queries alone and read the target's keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.core.artifacts import ASSISTANTS
from foretoken.core.errors import ModelLoadError
from foretoken.core.schema import Schema, Size, parse
from foretoken.models.families.architecture import Architecture, unsupported
from foretoken.models.formats.layers import Source, read_ends, read_layer
from foretoken.models.formats.weights import LayerWeights, NormWeight
from foretoken.models.heads.files import check_shapes, open_head

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
    """The vocabulary in clusters. A state chooses a few, and only their tokens have separate logits.

    Attributes:
        centroids: [clusters, H].
        tokens: the tokens of each cluster, int64 [clusters, tokens of a cluster].
        chosen: number of clusters that a state chooses.
    """

    centroids: Tensor
    tokens: Tensor
    chosen: int


@dataclass(frozen=True, slots=True, eq=False)
class AssistantHead:
    """An assistant, on the CPU.

    Attributes:
        architecture: sizes of its layers, which have no keys and values.
        target_hidden: hidden size Ht of the target.
        layers: the weights of its layers.
        norm: norm of their output.
        embedding: its vocabulary head [V, H].
        into: matrix from the target's embedding and hidden state to the layers' input, [H, 2 Ht].
        back: matrix from their normed output to a hidden state of the target, [Ht, H].
        clusters: the vocabulary in clusters; None if all tokens have logits.
    """

    architecture: Architecture
    target_hidden: int
    layers: tuple[LayerWeights, ...]
    norm: NormWeight | None
    embedding: Tensor
    into: Tensor
    back: Tensor
    clusters: Clusters | None


def is_assistant(config: Mapping[str, Any]) -> bool:
    """Returns whether a config.json describes an assistant."""
    return config.get("model_type") in ASSISTANTS


def read_assistant(path: Path, dtype: torch.dtype) -> AssistantHead:
    """Reads the checkpoint in ``path``, its matrices in ``dtype``.

    Raises ModelLoadError if it is incomplete, inconsistent, or no assistant.
    """
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
