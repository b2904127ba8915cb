"""An encoder-decoder's tensors as the runner takes them, by T5's names and by BART's."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.models.families.seq2seq import LEARNED_OFFSET, T5, Seq2SeqArchitecture, Stack
from foretoken.models.formats.memory import give_back
from foretoken.models.formats.quantize import Matrix
from foretoken.models.formats.reader import TensorReader
from foretoken.models.formats.weight_files import converted
from foretoken.models.formats.weights import (
    CrossAttentionWeights,
    DenseMlpWeights,
    LayerWeights,
    LinearWeights,
    NormWeight,
    SelfAttentionWeights,
)

_SAMPLE = 1024  # elements of each tensor that the fingerprint of an encoder covers


@dataclass(frozen=True, slots=True)
class StackEnds:
    """The weights before and after a stack's layers.

    Attributes:
        positions: learned positions, [positions, H].
        norm: norm of the embeddings.
        last: norm after the last layer.
    """

    positions: Tensor | None
    norm: NormWeight | None
    last: NormWeight | None


class Seq2SeqWeights:
    """Reads a checkpoint one layer at a time.

    Methods raise ModelLoadError for a tensor that is missing or has the wrong shape.
    """

    def __init__(self, reader: TensorReader, architecture: Seq2SeqArchitecture) -> None:
        self.architecture, self._reader = architecture, reader
        self._t5 = architecture.family in T5

    def layers(self, side: str) -> Iterator[LayerWeights]:
        """Yields the layers of the "encoder" or the "decoder"."""
        stack, relative = self._stack(side), None
        for index in range(stack.layers):
            if self._t5:
                relative = self._relative(side, stack, index, relative)
                yield self._t5_layer(side, stack, index, relative)
            else:
                yield self._bart_layer(side, stack, index)
            give_back(self.architecture.hidden)

    def ends(self, side: str) -> StackEnds:
        """Reads positions and norms of the "encoder" or the "decoder"."""
        a = self.architecture
        if self._t5:
            return StackEnds(None, None, self._norm(f"{side}.final_layer_norm"))
        at = f"model.{side}"
        table = self._reader.get(f"{at}.embed_positions.weight")
        self._reader.check((table,), (f"{at}.embed_positions",), a.source_length + LEARNED_OFFSET, a.hidden)
        last = self._norm(f"{at}.layer_norm") if a.last_norm else None
        positions = converted(f"{at}.embed_positions.weight", table[LEARNED_OFFSET:], self._reader.dtype, copy=True)
        return StackEnds(positions, self._norm(f"{at}.layernorm_embedding"), last)

    def embedding(self) -> Tensor:
        """Reads the embedding that encoder and decoder share, [V, H]."""
        a, name = self.architecture, "shared" if self._t5 else "model.shared"
        stored = self._reader.get(f"{name}.weight")
        self._reader.check((stored,), (name,), a.vocab, a.hidden)
        return converted(f"{name}.weight", stored, self._reader.dtype, copy=True)

    def head(self, embedding: Tensor) -> tuple[Matrix, Tensor | None]:
        """Returns the vocabulary head [V, H] and its bias [V]. It is the embedding if the checkpoint has no head."""
        a, bias = self.architecture, None
        if "final_logits_bias" in self._reader.weights:
            stored = self._reader.floats("final_logits_bias", (1, a.vocab)).flatten()
            bias = stored if bool(stored.any()) else None
        if "lm_head.weight" in self._reader.weights:
            return self._reader.matrix("lm_head", a.vocab, a.hidden), bias
        return (self._reader.quantize(embedding) if self._reader.quantize is not None else embedding), bias

    def fingerprint(self) -> str:
        """Returns a hash of the encoder; encoders with equal hashes are treated as the same."""
        digest = hashlib.sha256(repr((self.architecture.encoder, self._reader.dtype, self._reader.quantize)).encode())
        prefixes = ("encoder.", "shared.") if self._t5 else ("model.encoder.", "model.shared.")
        for name in sorted(n for n in self._reader.weights if n.startswith(prefixes)):
            values = self._reader.weights[name]
            flat = values.flatten()
            digest.update(f"{name} {tuple(values.shape)}".encode())
            digest.update(flat[:: max(1, len(flat) // _SAMPLE)].float().numpy().tobytes())
        return digest.hexdigest()

    # by name

    def _t5_layer(self, side: str, stack: Stack, index: int, relative: Tensor | None) -> LayerWeights:
        at = f"{side}.block.{index}.layer"
        last = 2 if side == "decoder" else 1
        dense = f"{at}.{last}.DenseReluDense"
        up = (f"{dense}.wi_0", f"{dense}.wi_1") if self.architecture.gated else (f"{dense}.wi",)
        return self._layer(
            norms=[f"{at}.{number}.layer_norm" for number in range(last + 1)],
            attention=[f"{at}.0.SelfAttention.{part}" for part in "qkvo"],
            cross=[f"{at}.1.EncDecAttention.{part}" for part in "qkvo"],
            mlp=(up, f"{dense}.wo"),
            stack=stack,
            relative=relative,
        )

    def _bart_layer(self, side: str, stack: Stack, index: int) -> LayerWeights:
        at = f"model.{side}.layers.{index}"
        parts = ("self_attn", "encoder_attn") if side == "decoder" else ("self_attn",)
        attention, *cross = (
            [f"{at}.{name}.{part}" for part in ("q_proj", "k_proj", "v_proj", "out_proj")] for name in parts
        )
        return self._layer(
            norms=[f"{at}.{name}_layer_norm" for name in (*parts, "final")],
            attention=attention,
            cross=cross[0] if cross else [],
            mlp=((f"{at}.fc1",), f"{at}.fc2"),
            stack=stack,
        )

    def _layer(
        self,
        norms: Sequence[str],
        attention: Sequence[str],
        cross: Sequence[str],
        mlp: tuple[tuple[str, ...], str],
        stack: Stack,
        relative: Tensor | None = None,
    ) -> LayerWeights:
        """Reads a layer: norms of its two or three parts, queries, keys, values and output of each attention."""
        reader, hidden, first = self._reader, self.architecture.hidden, self.architecture.norm_first
        weights = [self._norm(name) for name in norms]
        before, after = [[norm if first == early else None for norm in weights] for early in (True, False)]
        up, down = mlp
        qkv, out = tuple(attention[:3]), attention[3]
        return LayerWeights(
            norm=before[0],
            attention=SelfAttentionWeights(
                qkv=reader.linear(qkv, 3 * stack.width, hidden),
                q_norm=None,
                k_norm=None,
                out=reader.linear((out,), hidden, stack.width),
                relative=relative,
            ),
            after_mixer=after[0],
            mlp_norm=before[-1],
            mlp=DenseMlpWeights(
                up=reader.linear(up, len(up) * stack.inner, hidden),
                down=reader.linear((down,), hidden, stack.inner),
            ),
            after_mlp=after[-1],
            cross=self._cross(cross, stack, before[1], after[1]) if len(norms) > 2 else None,
        )

    def _cross(
        self, names: Sequence[str], stack: Stack, norm: NormWeight | None, after: NormWeight | None
    ) -> CrossAttentionWeights[LinearWeights]:
        reader, hidden = self._reader, self.architecture.hidden
        queries, keys, values, out = names
        return CrossAttentionWeights(
            norm=norm,
            queries=reader.linear((queries,), stack.width, hidden),
            keys_values=reader.linear((keys, values), 2 * stack.width, hidden),
            out=reader.linear((out,), hidden, stack.width),
            after=after,
        )

    def _relative(self, side: str, stack: Stack, index: int, earlier: Tensor | None) -> Tensor | None:
        """Returns a layer's biases by distance, [heads, distances]; those of earlier layers if it has none."""
        a, name = self.architecture, f"{side}.block.{index}.layer.0.SelfAttention.relative_attention_bias.weight"
        if name not in self._reader.weights:
            return earlier
        table = self._reader.floats(name, (a.buckets, stack.heads))
        return table.T[:, buckets(a.buckets, a.farthest, side == "encoder")].contiguous()

    def _norm(self, name: str) -> NormWeight:
        a = self.architecture
        weight = self._reader.norm(name, a.hidden)
        return NormWeight(weight, self._reader.floats(f"{name}.bias", (a.hidden,)) if a.layer_norm else None)

    def _stack(self, side: str) -> Stack:
        return self.architecture.encoder if side == "encoder" else self.architecture.decoder


def buckets(count: int, farthest: int, both_ways: bool) -> Tensor:
    """Returns the bucket of every distance key - query from -farthest to farthest, int64 [2 farthest + 1].

    Half of the buckets of a direction hold one distance each; the others grow logarithmically with the distance.

    Args:
        count: number of buckets.
        farthest: distance beyond which all distances share a bucket.
        both_ways: whether rows see keys after them (encoder). In a decoder such distances count as 0.
    """
    distance = torch.arange(-farthest, farthest + 1)
    ahead = torch.zeros_like(distance)
    if both_ways:
        count //= 2
        ahead = (distance > 0).long() * count
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = count // 2
    # the same float32 operations as in transformers, because rounding decides the edges of buckets
    far = exact + (torch.log(distance.float() / exact) / math.log(farthest / exact) * (count - exact)).long()
    return ahead + torch.where(distance < exact, distance, far.clamp(max=count - 1))
