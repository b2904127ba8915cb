"""Runs text through a model layer by layer while it is quantized, and collects statistics of its matrices' inputs.

The hidden states of all windows are kept, and the weights of one layer. Two streams are computed: that of the quantized
model on all windows, and that of the original model on the windows held out for the loss.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.core.errors import InvalidRequest
from foretoken.models.families.architecture import Architecture
from foretoken.models.families.layers import BranchFactors
from foretoken.models.formats.layers import Source, read_ends, read_layer
from foretoken.models.formats.quantize import floats, stacked
from foretoken.models.formats.weights import DenseMlpWeights, LayerWeights, LinearWeights, SelfAttentionWeights
from foretoken.models.runners.functional import activate, normalize, rotary_table, rotate
from foretoken.quantize.rounding import Curvature

WINDOW = 512  # tokens
WINDOWS = 128  # at most
_HELD_OUT = 8  # every eighth window is kept for measuring the loss
_AT_ONCE = 4  # windows
Record = Callable[[str, Tensor], None]
_SITES = {"q": "qkv", "k": "qkv", "v": "qkv", "qkv": "qkv", "o": "out", "gate": "mlp", "up": "mlp", "gate_up": "mlp"}


@dataclass(frozen=True, slots=True)
class Losses:
    """Mean loss in nats per token on the held-out windows."""

    before: float
    after: float
    tokens: int


class Calibration:
    """Hidden states of a text, layer by layer.

    Args:
        architecture: the decoder's architecture.
        tokens: token ids of the text.

    Raises:
        InvalidRequest: the text is too short, or the model has experts.
    """

    def __init__(self, architecture: Architecture, tokens: Tensor) -> None:
        self._architecture = architecture
        length = min(WINDOW, architecture.max_length, len(tokens) // 2)
        if length < 16:
            raise InvalidRequest(f"the calibration text has {len(tokens)} tokens; give at least 32, better 50,000")
        if architecture.has_experts:
            raise InvalidRequest("models with experts are not calibrated; leave --calibration out for this checkpoint")
        windows = tokens[: len(tokens) // length * length].view(-1, length)[:WINDOWS]
        held_out = torch.arange(len(windows)) % _HELD_OUT == 1
        self._held = windows[held_out]
        self._windows = torch.cat([windows[~held_out], self._held])
        self._quantized = self._original = torch.empty(0)

    def begin(self, original: Tensor, quantized: Tensor) -> None:
        """Embeds the text with both embeddings [V, H]."""
        scale = self._architecture.embedding_scale
        self._original = F.embedding(self._held, original).float() * scale
        self._quantized = F.embedding(self._windows, quantized).float() * scale

    def curvatures(self, layer: int, weights: Mapping[str, Tensor]) -> dict[str, Curvature]:
        """Returns the curvature of each matrix of a layer by its name, without the held-out windows.

        The original stream advances through the layer.
        """
        sums: dict[str, Tensor] = {}

        def record(site: str, x: Tensor) -> None:
            rows = x.flatten(0, -2)
            sums[site] = sums.get(site, 0) + rows.t() @ rows

        read = self._layer(layer, weights)
        self._through(layer, read, self._quantized[: len(self._windows) - len(self._held)], record)
        self._original = self._through(layer, read, self._original)
        curvatures = {site: Curvature.of(total) for site, total in sums.items()}
        return {name: curvatures[site_of(name)] for name, weight in weights.items() if weight.ndim == 2}

    def advance(self, layer: int, weights: Mapping[str, Tensor]) -> None:
        """Advances the quantized stream through the layer with its quantized weights."""
        self._quantized = self._through(layer, self._layer(layer, weights), self._quantized)

    def losses(self, original: Mapping[str, Tensor], quantized: Mapping[str, Tensor]) -> Losses:
        """Returns the losses with the embeddings, last norms and heads of both models."""
        before = self._loss(self._original, original)
        return Losses(before, self._loss(self._quantized[-len(self._held) :], quantized), self._held[:, 1:].numel())

    def _layer(self, layer: int, weights: Mapping[str, Tensor]) -> LayerWeights:
        return read_layer(Source(weights, self._architecture, torch.float32), layer)

    def _through(self, layer: int, w: LayerWeights, hidden: Tensor, record: Record | None = None) -> Tensor:
        """Returns hidden states [windows, T, H] after a layer; empty if inputs are only recorded."""
        done = [_step(self._architecture, layer, w, part, record) for part in hidden.split(_AT_ONCE)]
        return hidden if record is not None else torch.cat(done)

    def _loss(self, hidden: Tensor, weights: Mapping[str, Tensor]) -> float:
        a = replace(self._architecture, tied="lm_head.weight" not in weights)
        ends = read_ends(Source(weights, a, torch.float32))
        head, total = floats(ends.head, torch.float32), 0.0
        for states, tokens in zip(hidden, self._held, strict=True):
            logits = normalize(a, states[:-1], ends.norm) @ head.t()
            if a.final_softcap:
                logits = logits.div_(a.final_softcap).tanh_().mul_(a.final_softcap)
            total += float(F.cross_entropy(logits, tokens[1:], reduction="sum"))
        return total / self._held[:, 1:].numel()


def calibrates(config: Mapping[str, Any]) -> bool:
    """Returns whether a decoder's layers are computed here: those of Llama, Gemma and others of their form."""
    a = Architecture.of(config)
    sequential = not any(layer.parallel for layer in a.stack)
    plain = (a.factors, a.logit_scale, a.clip) == (BranchFactors(), 1.0, 0.0) and a.query_growth is None
    plain = plain and a.latent is None and a.names.scalar is None and a.layer_inputs is None and not a.unit_values
    plain = plain and all(layer.sizes is None and layer.source is None for layer in a.stack)
    return sequential and plain and a.head_norms in (None, "before") and a.alibi is None and a.names.positions is None


def site_of(name: str) -> str:
    """Returns the input that a layer's matrix multiplies: "qkv", "out", "mlp" or "down"."""
    return _SITES.get(name.split(".")[-2].removesuffix("_proj"), "down")


def _step(a: Architecture, layer: int, w: LayerWeights, x: Tensor, record: Record | None) -> Tensor:
    """Returns hidden states [windows, T, H] after a layer, computed in float32."""

    def multiply(site: str, inputs: Tensor, linear: LinearWeights) -> Tensor:
        if record is not None:
            record(site, inputs)
        return F.linear(inputs, floats(stacked(linear.parts), torch.float32), linear.bias)

    attention, mlp, kind = w.attention, w.mlp, a.stack[layer]
    assert isinstance(attention, SelfAttentionWeights)  # checkpoints with other layers are refused when they are opened
    assert isinstance(mlp, DenseMlpWeights)
    heads = multiply("qkv", normalize(a, x, w.norm), attention.qkv)
    heads = heads.unflatten(-1, (-1, a.head_dim))
    queries, keys, values = heads.transpose(1, 2).split((a.heads, a.kv_heads, a.kv_heads), dim=1)
    queries, keys = normalize(a, queries, attention.q_norm), normalize(a, keys, attention.k_norm)
    if kind.rope >= 0:
        cos, sin = rotary_table(a, kind.rope, torch.arange(x.shape[1]))
        queries, keys = rotate(queries, cos, sin, a.paired), rotate(keys, cos, sin, a.paired)
    mixed = _attend(a, kind.window, queries, keys, values).transpose(1, 2).flatten(2)
    x = x + normalize(a, multiply("out", mixed, attention.out), w.after_mixer)
    inner = multiply("mlp", normalize(a, x, w.mlp_norm), mlp.up)
    inner = multiply("down", activate(a, inner, kind.mlp == "gated"), mlp.down)
    return x + normalize(a, inner, w.after_mlp)


def _attend(a: Architecture, window: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Returns causal attention [windows, heads, T, head_dim]."""
    share = a.heads // a.kv_heads
    scores = queries @ keys.repeat_interleave(share, 1).transpose(-1, -2) * a.scale
    if a.attention_softcap:
        scores = scores.div_(a.attention_softcap).tanh_().mul_(a.attention_softcap)
    at = torch.arange(queries.shape[2])
    behind = at[:, None] - at
    hidden = (behind < 0) | (behind >= (window or len(at)))
    return scores.masked_fill_(hidden, -torch.inf).softmax(-1) @ values.repeat_interleave(share, 1)
