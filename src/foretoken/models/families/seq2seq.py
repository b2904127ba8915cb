"""The architecture of an encoder-decoder: T5 (1910.10683), BART (1910.13461) and their relatives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from foretoken.core.schema import parse
from foretoken.models.families.architecture import Architecture
from foretoken.models.families.config import NAMED_ACTIVATIONS
from foretoken.models.families.layers import POST, PRE, Layer
from foretoken.models.families.schema import BartConfig, T5Config

T5, BART = ("t5", "mt5", "umt5"), ("bart", "mbart")
ACTIVATIONS = ("relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "silu", "swish")
UNLIMITED = 4096  # maximum length in tokens if positions are relative and config.json has no limit
LEARNED_OFFSET = 2  # BART's positions begin in the third row of their table


@dataclass(frozen=True, slots=True)
class Stack:
    """Sizes of the encoder or the decoder."""

    layers: int
    heads: int
    head_dim: int
    inner: int
    scale: float

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Seq2SeqArchitecture:
    """An encoder-decoder.

    Attributes:
        norm_first: whether norms come before attention and MLP (T5, mBART), or after the addition (BART).
        last_norm: whether each stack ends with a norm.
        layer_norm: whether norms are layer norms with mean and bias; otherwise RMS norms.
        buckets: number of buckets of T5's relative positions; 0 for learned absolute positions.
        farthest: distance beyond which all relative positions share a bucket.
        embedding_scale: factor of the embeddings.
        logit_scale: factor of the hidden states before the vocabulary head.
        source_length: maximum length of a source in tokens.
    """

    family: str
    vocab: int
    hidden: int
    encoder: Stack
    decoder: Stack
    activation: str
    gated: bool
    norm_first: bool
    last_norm: bool
    layer_norm: bool
    eps: float
    buckets: int
    farthest: int
    embedding_scale: float
    logit_scale: float
    max_length: int
    source_length: int

    @property
    def layers(self) -> int:
        """Number of decoder layers, the ones that drafts and heads see."""
        return self.decoder.layers

    def of_side(self, side: Literal["encoder", "decoder"]) -> Architecture:
        """Returns one of the two stacks as a decoder-only architecture."""
        stack = self.encoder if side == "encoder" else self.decoder
        layer = Layer(
            mlp="gated" if self.gated else "ungated",
            norms=PRE if self.norm_first else POST,
            rope=-1,
        )
        return Architecture(
            family=self.family,
            hidden=self.hidden,
            heads=stack.heads,
            kv_heads=stack.heads,
            head_dim=stack.head_dim,
            intermediate=stack.inner,
            stack=(layer,) * stack.layers,
            vocab=self.vocab,
            eps=self.eps,
            activation=NAMED_ACTIVATIONS[self.activation],
            scale=stack.scale,
            attention_softcap=0.0,
            final_softcap=0.0,
            embedding_scale=self.embedding_scale,
            norm_offset=0.0,
            frequencies=(),
            max_length=self.max_length if side == "decoder" else self.source_length,
            tied=False,
            centered=self.layer_norm,
            logit_scale=self.logit_scale,
            norm_sums=not self.norm_first,
            farthest=self.farthest,
        )

    def first(self, layers: int) -> Seq2SeqArchitecture:
        """Returns the architecture with the first ``layers`` layers of the decoder."""
        return replace(self, decoder=replace(self.decoder, layers=layers))

    @staticmethod
    def of(config: Mapping[str, Any], max_length: int | None = None) -> Seq2SeqArchitecture:
        """Returns the architecture of a config.json that ``supports`` accepts.

        Raises ModelLoadError if a field is missing or wrong.
        """
        _check(config)
        return (_of_t5 if config["model_type"] in T5 else _of_bart)(config, max_length)


def supports(config: Mapping[str, Any]) -> bool:
    """Returns whether our runtime computes this encoder-decoder exactly.

    Raises ModelLoadError if a field of a known architecture is missing or wrong.
    """
    family = config.get("model_type")
    if family not in (*T5, *BART):
        return False
    _check(config)
    if family in T5:
        return _activation(config)[0] in ACTIVATIONS
    return config.get("activation_function", "gelu") in ACTIVATIONS


def _check(config: Mapping[str, Any]) -> None:
    parse(T5Config if config["model_type"] in T5 else BartConfig, config, "config.json")


def _of_t5(c: Mapping[str, Any], max_length: int | None) -> Seq2SeqArchitecture:
    family, hidden = c["model_type"], c["d_model"]
    activation, gated = _activation(c)
    encoder = Stack(c["num_layers"], c["num_heads"], c["d_kv"], c["d_ff"], scale=1.0)
    # As in transformers: T5 1.0 scales by the width, 1.1 (not tied) does not; mT5 never scales, umT5 always does.
    scaled = family == "umt5" or (
        family == "t5" and bool(c.get("scale_decoder_outputs", c.get("tie_word_embeddings") is not False))
    )
    length = max(c.get("n_positions") or 0, UNLIMITED)
    return Seq2SeqArchitecture(
        family=family,
        vocab=c["vocab_size"],
        hidden=hidden,
        encoder=encoder,
        decoder=replace(encoder, layers=c.get("num_decoder_layers") or encoder.layers),
        activation=activation,
        gated=gated,
        norm_first=True,
        last_norm=True,
        layer_norm=False,
        eps=c.get("layer_norm_epsilon", 1e-6),
        buckets=c.get("relative_attention_num_buckets", 32),
        farthest=c.get("relative_attention_max_distance", 128),
        embedding_scale=1.0,
        logit_scale=hidden**-0.5 if scaled else 1.0,
        max_length=max_length or length,
        source_length=length,
    )


def _of_bart(c: Mapping[str, Any], max_length: int | None) -> Seq2SeqArchitecture:
    hidden, positions, first = c["d_model"], c["max_position_embeddings"], c["model_type"] == "mbart"

    def stack(side: str) -> Stack:
        heads = c[f"{side}_attention_heads"]
        dim = hidden // heads
        return Stack(c[f"{side}_layers"], heads, dim, c[f"{side}_ffn_dim"], scale=dim**-0.5)

    return Seq2SeqArchitecture(
        family=c["model_type"],
        vocab=c["vocab_size"],
        hidden=hidden,
        encoder=stack("encoder"),
        decoder=stack("decoder"),
        activation=c.get("activation_function", "gelu"),
        gated=False,
        norm_first=first,
        last_norm=first,
        layer_norm=True,
        eps=1e-5,
        buckets=0,
        farthest=0,
        embedding_scale=math.sqrt(hidden) if c.get("scale_embedding") else 1.0,
        logit_scale=1.0,
        max_length=min(max_length or positions, positions),
        source_length=positions,
    )


def _activation(c: Mapping[str, Any]) -> tuple[str, bool]:
    """Returns T5's activation, and whether its MLP is gated."""
    default = "gated-gelu" if c["model_type"] != "t5" else "relu"
    name = c.get("feed_forward_proj") or default
    gated = name.startswith("gated-")
    return ("gelu_new" if name == "gated-gelu" else name.removeprefix("gated-")), gated
