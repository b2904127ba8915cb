"""The memory-bound floor of a pass: all weights streamed once through bare packed matrix products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from foretoken.models.families.seq2seq import Seq2SeqArchitecture, supports

Shape = tuple[int, int]  # [out, in]


def matrices(config: Mapping[str, Any]) -> list[Shape]:
    """Returns the matrix shapes of one pass of a Llama-like model, with QKV fused and gate and up fused.

    For an encoder-decoder these are the decoder's; the KV cache of the source is computed once, not in every pass.
    """
    if supports(config):
        return _of_decoder(Seq2SeqArchitecture.of(config))
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    layer = [
        ((heads + 2 * kv_heads) * size, hidden),
        (hidden, heads * size),
        (2 * config["intermediate_size"], hidden),
        (hidden, config["intermediate_size"]),
    ]
    return layer * config["num_hidden_layers"] + [(config["vocab_size"], hidden)]


def _of_decoder(a: Seq2SeqArchitecture) -> list[Shape]:
    stack = a.decoder
    layer = [
        (3 * stack.width, a.hidden),
        (a.hidden, stack.width),
        (stack.width, a.hidden),
        (a.hidden, stack.width),
        ((1 + a.gated) * stack.inner, a.hidden),
        (a.hidden, stack.inner),
    ]
    return layer * stack.layers + [(a.vocab, a.hidden)]


class Floor:
    """Weights of these shapes, packed for oneDNN where supported, in separate memory. Their values do not matter."""

    def __init__(self, shapes: list[Shape], dtype: torch.dtype) -> None:
        self._packed = dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        self._dtype = dtype
        self._weights = [(shape, self._weight(shape)) for shape in shapes]
        self._inputs: dict[tuple[int, int], Tensor] = {}

    def _weight(self, shape: Shape) -> Tensor:
        plain = torch.full(shape, 0.01, dtype=self._dtype)
        return torch.ops.mkldnn._reorder_linear_weight(plain) if self._packed else plain

    @torch.inference_mode()
    def __call__(self, rows: int) -> None:
        """Computes every product once over ``rows`` rows."""
        for (_, width), weight in self._weights:
            x = self._inputs.get((rows, width))
            if x is None:
                x = self._inputs[rows, width] = torch.full((rows, width), 0.01, dtype=self._dtype)
            if self._packed:
                torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
            else:
                torch.nn.functional.linear(x, weight)
