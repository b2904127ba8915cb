"""An encoder-decoder behind the model contract: a decoder whose sequences each have a source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from foretoken.core.native.build import KernelsUnavailable
from foretoken.models.base import Model
from foretoken.models.decoder import Decoder
from foretoken.models.families.architecture import Architecture
from foretoken.models.families.seq2seq import Seq2SeqArchitecture, supports
from foretoken.models.formats.quantize import Quantizer
from foretoken.models.formats.reader import TensorReader
from foretoken.models.options import check_kv_cache_dtype, check_quantization, check_weight_format
from foretoken.models.runners.choose import check_cache_dtype, check_packed, fall_back
from foretoken.models.runners.native.weight_format import packs
from foretoken.models.seq2seq.native import NativeSeq2SeqRunner
from foretoken.models.seq2seq.runner import Seq2SeqRunner
from foretoken.models.seq2seq.weights import Seq2SeqWeights


class EncoderDecoder(Decoder):
    """An encoder-decoder; its arguments are those of ``Decoder``."""

    no_adapters = "LoRA adapters of encoder-decoders are not supported"
    architecture: Seq2SeqArchitecture
    runner: NativeSeq2SeqRunner | Seq2SeqRunner

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        max_length: int | None = None,
        quantization: str | None = None,
        weight_format: str = "raw",
        kv_cache_dtype: str = "auto",
    ) -> None:
        check_quantization(quantization)
        check_weight_format(weight_format)
        check_kv_cache_dtype(kv_cache_dtype)
        self.architecture = a = Seq2SeqArchitecture.of(config, max_length)
        self.dtype, self.device = dtype, device
        self.vocab_size, self.hidden_size, self.num_layers = a.vocab, a.hidden, a.layers
        self.max_length, self.source_length = a.max_length, a.source_length
        reader = TensorReader(weights, dtype, Quantizer.of(quantization))
        self.runner = build_seq2seq_runner(Seq2SeqWeights(reader, a), dtype, device, weight_format, kv_cache_dtype)
        self.batch_invariant, self.chunk_invariant = self.runner.batch_invariant, self.runner.chunk_invariant

    @staticmethod
    def supports(config: Mapping[str, Any]) -> bool:
        return supports(config)

    @staticmethod
    def decoder_of(config: Mapping[str, Any]) -> Architecture:
        return Seq2SeqArchitecture.of(config).of_side("decoder")

    def share(self, other: Model) -> bool:
        """Shares the encoder if both models have the same one."""
        if not isinstance(other, EncoderDecoder) or type(other.runner) is not type(self.runner):
            return False
        if other.runner.fingerprint != self.runner.fingerprint:
            return False
        self.runner.encoder = other.runner.encoder
        return True


def build_seq2seq_runner(
    weights: Seq2SeqWeights, dtype: torch.dtype, device: torch.device, weight_format: str, kv_cache_dtype: str
) -> NativeSeq2SeqRunner | Seq2SeqRunner:
    """Returns the fastest runner for this model on this device.

    Raises InvalidRequest if weights cannot be packed on this device, in this dtype or on this processor, or there are
    no compiled kernels for a KV cache of another dtype.
    """
    check_packed(weight_format, dtype, device)
    not_compiled = f"the device is {device.type}"
    if device.type == "cpu":
        try:
            compress = packs(weights.architecture.of_side("decoder"), dtype, weight_format)
            return NativeSeq2SeqRunner(weights, dtype, compress, kv_cache_dtype)
        except KernelsUnavailable as reason:
            fall_back(weight_format, reason)
            not_compiled = str(reason)
    check_cache_dtype(kv_cache_dtype, dtype, not_compiled)
    return Seq2SeqRunner(weights, dtype, device)
