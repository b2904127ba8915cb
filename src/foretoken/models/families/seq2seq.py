"""The architectures of encoder-decoders: T5 (1910.10683), BART (1910.13461) and their relatives."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from foretoken.core.schema import parse
from foretoken.models.families.architecture import Architecture, RelativeBuckets
from foretoken.models.families.config import NAMED_ACTIVATIONS
from foretoken.models.families.family import TensorNames
from foretoken.models.families.layers import POST, PRE, Layer
from foretoken.models.families.schema import BartConfig, T5Config

T5, BART = ("t5", "mt5", "umt5"), ("bart", "mbart")
ACTIVATIONS = ("relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "silu", "swish")
UNLIMITED = 4096  # maximum length in tokens if positions are relative and config.json has no limit
_PARTS = ("q", "k", "v", "o")


@dataclass(frozen=True, slots=True)
class Seq2SeqArchitecture:
    """An encoder-decoder: two stacks, which share the embedding."""

    encoder: Architecture  # its ``max_length`` is the maximum length of a source in tokens
    decoder: Architecture  # each layer also attends to the encoder's states

    @staticmethod
    def of(config: Mapping[str, Any], max_length: int | None = None) -> "Seq2SeqArchitecture":
        """Returns the architecture of a config.json that ``supports`` accepts."""
        _check(config)
        return (_of_t5 if config["model_type"] in T5 else _of_bart)(config, max_length)


def supports(config: Mapping[str, Any]) -> bool:
    """Returns whether our runtime computes this encoder-decoder exactly."""
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
    family, heads = c["model_type"], c["num_heads"]
    activation, gated = _activation(c)
    # As in transformers: T5 1.0 scales by the width, 1.1 (not tied) does not; mT5 never scales, umT5 always does.
    scaled = family == "umt5" or (
        family == "t5" and bool(c.get("scale_decoder_outputs", c.get("tie_word_embeddings") is not False))
    )
    length = max(c.get("n_positions") or 0, UNLIMITED)
    buckets = partial(
        RelativeBuckets, c.get("relative_attention_num_buckets", 32), c.get("relative_attention_max_distance", 128)
    )
    encoder = Architecture(
        family=family,
        hidden=c["d_model"],
        heads=heads,
        kv_heads=heads,
        head_dim=c["d_kv"],
        intermediate=c["d_ff"],
        stack=(Layer(mlp="gated" if gated else "ungated", rope=-1),) * c["num_layers"],
        vocab=c["vocab_size"],
        eps=c.get("layer_norm_epsilon", 1e-6),
        activation=NAMED_ACTIVATIONS[activation],
        scale=1.0,
        max_length=length,
        logit_scale=c["d_model"] ** -0.5 if scaled else 1.0,
        relative=buckets(both_ways=True),
        names=_t5_names("encoder", gated, "1."),
    )
    cross = (*(f"1.EncDecAttention.{part}" for part in _PARTS), "1.layer_norm")
    decoder = replace(
        encoder,
        stack=encoder.stack[:1] * (c.get("num_decoder_layers") or encoder.layers),
        max_length=max_length or length,
        relative=buckets(both_ways=False),
        names=replace(_t5_names("decoder", gated, "2."), cross=cross),
    )
    return Seq2SeqArchitecture(encoder, decoder)


def _t5_names(side: str, gated: bool, mlp: str) -> TensorNames:
    queries, keys, values, out = (f"0.SelfAttention.{part}" for part in _PARTS)
    return TensorNames(
        base="",
        embedding="shared",
        last_norm=f"{side}.final_layer_norm",
        layer=f"{side}.block.{{}}.layer.",
        norm="0.layer_norm",
        mlp_norm=f"{mlp}layer_norm",
        qkv=(queries, keys, values),
        out=out,
        up=tuple(f"{mlp}DenseReluDense.{name}" for name in (("wi_0", "wi_1") if gated else ("wi",))),
        down=f"{mlp}DenseReluDense.wo",
        relative="0.SelfAttention.relative_attention_bias",
    )


def _of_bart(c: Mapping[str, Any], max_length: int | None) -> Seq2SeqArchitecture:
    hidden, positions, first = c["d_model"], c["max_position_embeddings"], c["model_type"] == "mbart"

    def stack(side: str, longest: int) -> Architecture:
        heads = c[f"{side}_attention_heads"]
        return Architecture(
            family=c["model_type"],
            hidden=hidden,
            heads=heads,
            kv_heads=heads,
            head_dim=hidden // heads,
            intermediate=c[f"{side}_ffn_dim"],
            stack=(Layer(mlp="ungated", norms=PRE if first else POST, rope=-1),) * c[f"{side}_layers"],
            vocab=c["vocab_size"],
            eps=1e-5,
            activation=NAMED_ACTIVATIONS[c.get("activation_function", "gelu")],
            scale=(hidden // heads) ** -0.5,
            max_length=longest,
            embedding_scale=hidden**0.5 if c.get("scale_embedding") else 1.0,
            centered=True,
            learned_positions=2,
            norm_sums=not first,
            names=_bart_names(side, last_norm=first),
        )

    return Seq2SeqArchitecture(stack("encoder", positions), stack("decoder", min(max_length or positions, positions)))


def _bart_names(side: str, last_norm: bool) -> TensorNames:
    cross = ("encoder_attn.q_proj", "encoder_attn.k_proj", "encoder_attn.v_proj", "encoder_attn.out_proj")
    return TensorNames(
        embedding="shared",
        positions=f"{side}.embed_positions",
        embedding_norm=f"{side}.layernorm_embedding",
        last_norm=f"{side}.layer_norm" if last_norm else None,
        layer=f"{side}.layers.{{}}.",
        norm="self_attn_layer_norm",
        after_mixer="self_attn_layer_norm",
        mlp_norm="final_layer_norm",
        after_mlp="final_layer_norm",
        out="self_attn.out_proj",
        up=("fc1",),
        down="fc2",
        cross=(*cross, "encoder_attn_layer_norm") if side == "decoder" else (),
    )


def _activation(c: Mapping[str, Any]) -> tuple[str, bool]:
    """Returns T5's activation, and whether its MLP is gated."""
    default = "gated-gelu" if c["model_type"] != "t5" else "relu"
    name = c.get("feed_forward_proj") or default
    gated = name.startswith("gated-")
    return ("gelu_new" if name == "gated-gelu" else name.removeprefix("gated-")), gated
