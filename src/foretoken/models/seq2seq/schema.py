"""Schemas of encoder-decoders' config.json: T5 and BART with their relatives."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from foretoken.core.schema import Epsilon, Heads, Layers, Schema, Size

Buckets = Annotated[int, Field(ge=4, le=65_536)]
Distance = Annotated[int, Field(ge=1, le=2**20)]


class T5Config(Schema):
    """T5, mT5 and umT5."""

    model_type: str
    vocab_size: Size
    d_model: Size
    d_kv: Heads
    d_ff: Size
    num_layers: Layers
    num_heads: Heads
    num_decoder_layers: Layers | None = None
    n_positions: Size | None = None
    layer_norm_epsilon: Epsilon = 1e-6
    relative_attention_num_buckets: Buckets = 32
    relative_attention_max_distance: Distance = 128
    feed_forward_proj: str | None = None
    scale_decoder_outputs: bool = False
    tie_word_embeddings: bool | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        exact, farthest = self.relative_attention_num_buckets // 2, self.relative_attention_max_distance
        if farthest <= exact:
            raise ValueError(
                f"has relative_attention_max_distance = {farthest}, which should be above half of "
                f"relative_attention_num_buckets = {self.relative_attention_num_buckets}"
            )
        return self


class BartConfig(Schema):
    """BART and mBART."""

    model_type: str
    vocab_size: Size
    d_model: Size
    encoder_layers: Layers
    decoder_layers: Layers
    encoder_attention_heads: Heads
    decoder_attention_heads: Heads
    encoder_ffn_dim: Size
    decoder_ffn_dim: Size
    max_position_embeddings: Size
    activation_function: str | None = None
    scale_embedding: bool | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for side in ("encoder", "decoder"):
            heads = getattr(self, f"{side}_attention_heads")
            if self.d_model % heads:
                raise ValueError(f"has d_model = {self.d_model}, which should be a multiple of {side}_attention_heads "
                                 f"= {heads}")  # fmt: skip
        return self
