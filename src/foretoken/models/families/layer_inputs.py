"""Inputs of single layers beside the residual stream (Gemma 3n and 4): every token has an embedding for every layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """The inputs of all layers, ``width`` numbers each.

    The input of layer i is (norm(projection(embedding))_i + embedding_of_layers_i) / sqrt(2). After its MLP, the layer
    adds norm(up(activation(gate(x)) * input)) to the residual stream x.

    Attributes:
        width: numbers of one layer's input.
        table: name of the embeddings of all layers, [vocab, layers * width].
        projection: name of the projection of the model's embedding, [layers * width, hidden].
        projection_norm: name of the norm of a layer's part of it.
        gate: name of a layer's gate, [width, hidden], relative to the layer.
        up: name of a layer's last matrix, [hidden, width].
        norm: name of the norm of what a layer adds.
    """

    width: int
    table: str = "embed_tokens_per_layer"
    projection: str = "per_layer_model_projection"
    projection_norm: str = "per_layer_projection_norm"
    gate: str = "per_layer_input_gate"
    up: str = "per_layer_projection"
    norm: str = "post_per_layer_input_norm"
