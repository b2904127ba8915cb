"""An encoder-decoder's tensors as the runner takes them, by T5's names and by BART's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from foretoken.models.families.seq2seq import LEARNED_OFFSET, T5, Seq2SeqArchitecture, Stack
from foretoken.models.formats.finite import converted
from foretoken.models.formats.memory import give_back
from foretoken.models.formats.quantize import Matrix
from foretoken.models.formats.reader import TensorReader
from foretoken.models.formats.weights import NormWeight

_SAMPLE = 1024  # numbers of each tensor that the fingerprint of an encoder covers


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """The weights of one attention with its norm.

    Matrices are [out, in]. In cross-attention the input of ``keys_values`` is the encoder's output. ``bias`` is the
    table of relative positions, float32 [buckets, heads]; None if the layer has no table of its own.
    """

    norm: NormWeight
    queries: Matrix
    queries_bias: Tensor | None
    keys_values: tuple[Matrix, Matrix]
    keys_values_bias: Tensor | None
    out: Matrix
    out_bias: Tensor | None
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class MLPWeights:
    """The weights of one MLP with its norm; ``up`` is gate and up, or up alone."""

    norm: NormWeight
    up: tuple[Matrix, ...]
    up_bias: Tensor | None
    down: Matrix
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """The weights of one layer; only a decoder's has ``cross_attention``, the cross-attention."""

    self_attention: AttentionWeights
    cross_attention: AttentionWeights | None
    mlp: MLPWeights


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

    def blocks(self, side: str) -> Iterator[BlockWeights]:
        """Yields the layers of the "encoder" or the "decoder"."""
        stack = self._stack(side)
        for index in range(stack.layers):
            yield self._t5_block(side, stack, index) if self._t5 else self._bart_block(side, stack, index)
            give_back()

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
        """Returns the vocabulary head [V, H] and its bias [V]. Without a head in the checkpoint it is the embedding."""
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

    def _t5_block(self, side: str, stack: Stack, index: int) -> BlockWeights:
        at = f"{side}.block.{index}.layer"

        def attention(number: int, name: str) -> AttentionWeights:
            projections = {part: f"{at}.{number}.{name}.{part}" for part in "qkvo"}
            bias = f"{at}.{number}.{name}.relative_attention_bias.weight"
            shape = (self.architecture.buckets, stack.heads)
            table = self._reader.floats(bias, shape) if bias in self._reader.weights else None
            return self._attention(projections, f"{at}.{number}.layer_norm", stack, table)

        last = 2 if side == "decoder" else 1
        dense = f"{at}.{last}.DenseReluDense"
        up = (f"{dense}.wi_0", f"{dense}.wi_1") if self.architecture.gated else (f"{dense}.wi",)
        return BlockWeights(
            attention(0, "SelfAttention"),
            attention(1, "EncDecAttention") if side == "decoder" else None,
            self._mlp(up, f"{dense}.wo", f"{at}.{last}.layer_norm", stack),
        )

    def _bart_block(self, side: str, stack: Stack, index: int) -> BlockWeights:
        at = f"model.{side}.layers.{index}"

        def attention(name: str) -> AttentionWeights:
            projections = {part: f"{at}.{name}.{part}_proj" for part in "qkv"} | {"o": f"{at}.{name}.out_proj"}
            return self._attention(projections, f"{at}.{name}_layer_norm", stack)

        return BlockWeights(
            attention("self_attn"),
            attention("encoder_attn") if side == "decoder" else None,
            self._mlp((f"{at}.fc1",), f"{at}.fc2", f"{at}.final_layer_norm", stack),
        )

    def _attention(
        self, names: dict[str, str], norm: str, stack: Stack, bias: Tensor | None = None
    ) -> AttentionWeights:
        hidden, reader = self.architecture.hidden, self._reader
        queries, keys, values = (reader.matrix(names[part], stack.width, hidden) for part in "qkv")
        return AttentionWeights(
            norm=self._norm(norm),
            queries=queries,
            queries_bias=reader.bias((names["q"],), stack.width),
            keys_values=(keys, values),
            keys_values_bias=reader.bias((names["k"], names["v"]), 2 * stack.width),
            out=reader.matrix(names["o"], hidden, stack.width),
            out_bias=reader.bias((names["o"],), hidden),
            bias=bias,
        )

    def _mlp(self, up: tuple[str, ...], down: str, norm: str, stack: Stack) -> MLPWeights:
        hidden, reader = self.architecture.hidden, self._reader
        return MLPWeights(
            norm=self._norm(norm),
            up=reader.parts(up, len(up) * stack.inner, hidden),
            up_bias=reader.bias(up, len(up) * stack.inner),
            down=reader.matrix(down, hidden, stack.inner),
            down_bias=reader.bias((down,), hidden),
        )

    def _norm(self, name: str) -> NormWeight:
        a = self.architecture
        weight = self._reader.norm(name, a.hidden)
        return NormWeight(weight, self._reader.floats(f"{name}.bias", (a.hidden,)) if a.layer_norm else None)

    def _stack(self, side: str) -> Stack:
        return self.architecture.encoder if side == "encoder" else self.architecture.decoder
