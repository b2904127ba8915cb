"""An encoder-decoder behind the model contract: a decoder whose sequences each have a source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from foretoken.core.native.build import KernelsUnavailable
from foretoken.models.base import Model
from foretoken.models.decoder import Decoder
from foretoken.models.families.architecture import Architecture
from foretoken.models.families.seq2seq import Seq2SeqArchitecture, supports
from foretoken.models.formats.layers import Source
from foretoken.models.runners.choose import check_cache_dtype, check_packed, fall_back
from foretoken.models.runners.native.weight_format import packs
from foretoken.models.seq2seq.encoder import SourceRunner
from foretoken.models.seq2seq.native import NativeSeq2SeqRunner
from foretoken.models.seq2seq.runner import Seq2SeqRunner


class EncoderDecoder(Decoder):
    """An encoder-decoder; its arguments are those of ``Decoder``."""

    no_adapters = "LoRA adapters of encoder-decoders are not supported"
    runner: SourceRunner

    def _runner(
        self,
        config: Mapping[str, Any],
        source: Source,
        quantization: str | None,
        weight_format: str,
        kv_cache_dtype: str,
    ) -> SourceRunner:
        encoder = replace(source, architecture=Seq2SeqArchitecture.of(config).encoder)
        self.source_length = encoder.architecture.max_length
        return build_seq2seq_runner(encoder, source, weight_format, kv_cache_dtype, self.device)

    @staticmethod
    def supports(config: Mapping[str, Any]) -> bool:
        return supports(config)

    @staticmethod
    def decoder_of(config: Mapping[str, Any], max_length: int | None = None) -> Architecture:
        return Seq2SeqArchitecture.of(config, max_length).decoder

    def share(self, other: Model) -> bool:
        """Shares the encoder if both models have the same one."""
        if not isinstance(other, EncoderDecoder) or type(other.runner) is not type(self.runner):
            return False
        if other.runner.encoder.fingerprint != self.runner.encoder.fingerprint:
            return False
        self.runner.encoder = other.runner.encoder
        return True


def build_seq2seq_runner(
    encoder: Source, decoder: Source, weight_format: str, kv_cache_dtype: str, device: torch.device
) -> SourceRunner:
    """Returns the fastest runner for the weights of these stacks on this device.

    Raises InvalidRequest if weights cannot be packed on this device, in this dtype or on this processor, or there are
    no compiled kernels for a KV cache of another dtype.
    """
    dtype = decoder.dtype
    check_packed(weight_format, dtype, device)
    not_compiled = f"the device is {device.type}"
    if device.type == "cpu":
        try:
            compress = packs(decoder.architecture, dtype, weight_format)
            return NativeSeq2SeqRunner(encoder, decoder, dtype, compress, kv_cache_dtype)
        except KernelsUnavailable as reason:
            fall_back(weight_format, reason)
            not_compiled = str(reason)
    check_cache_dtype(kv_cache_dtype, dtype, not_compiled)
    return Seq2SeqRunner(encoder, decoder, dtype, device)
