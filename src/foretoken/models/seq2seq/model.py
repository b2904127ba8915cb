"""An encoder-decoder behind the model contract: a decoder whose sequences each have a source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from foretoken.models.base import Model
from foretoken.models.decoder import Decoder
from foretoken.models.families.seq2seq import Seq2SeqArchitecture, supports
from foretoken.models.formats.quantize import Quantizer
from foretoken.models.formats.reader import TensorReader
from foretoken.models.options import check_quantization, check_weight_format
from foretoken.models.seq2seq.runner import Seq2SeqRunner
from foretoken.models.seq2seq.weights import Seq2SeqWeights


class EncoderDecoder(Decoder):
    """An encoder-decoder; its arguments are those of ``Decoder``. Weights are held as they are in every format."""

    architecture: Seq2SeqArchitecture
    runner: Seq2SeqRunner

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        max_length: int | None = None,
        quantization: str | None = None,
        weight_format: str = "raw",
    ) -> None:
        check_quantization(quantization)
        check_weight_format(weight_format)
        self.architecture = a = Seq2SeqArchitecture.of(config, max_length)
        self.dtype, self.device = dtype, device
        self.vocab_size, self.hidden_size, self.num_layers = a.vocab, a.hidden, a.layers
        self.max_length, self.source_length = a.max_length, a.source_length
        reader = TensorReader(weights, dtype, Quantizer.of(quantization))
        self.runner = Seq2SeqRunner(Seq2SeqWeights(reader, a), dtype, device)
        self.batch_invariant, self.chunk_invariant = self.runner.batch_invariant, self.runner.chunk_invariant

    @staticmethod
    def supports(config: Mapping[str, Any]) -> bool:
        return supports(config)

    def share(self, other: Model) -> bool:
        """Shares the encoder if both models have the same one."""
        if not isinstance(other, EncoderDecoder) or other.runner.fingerprint != self.runner.fingerprint:
            return False
        self.runner.encoder = other.runner.encoder
        return True
