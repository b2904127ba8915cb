"""Tiny random encoder-decoders of every supported family."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from foretoken.models.base import Model
from foretoken.models.loading import load_model
from foretoken.models.runners.native.build import kernels_available
from foretoken.models.runners.native.runner import NativeRunner
from foretoken.models.seq2seq import EncoderDecoder

T5: dict[str, Any] = {
    "vocab_size": 101,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
BART: dict[str, Any] = {
    "vocab_size": 101,
    "d_model": 64,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 80,
    "max_position_embeddings": 512,
    "init_std": 0.3,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5", {**T5, "initializer_factor": 2.0}),
    "t5-1.1": ("T5", {**T5, "num_decoder_layers": 3, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("MT5", {**T5, "relative_attention_num_buckets": 12, "relative_attention_max_distance": 20}),
    "umt5": ("UMT5", {**T5, "initializer_factor": 2.0}),
    "bart": ("Bart", BART),
    "mbart": ("MBart", {**BART, "scale_embedding": True, "activation_function": "relu"}),
}


def build(family: str, **changes: Any) -> Any:
    """A fresh random float32 module, the same every time."""
    name, config = FAMILIES[family]
    torch.manual_seed(sum(map(ord, family)))
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    module = kind(getattr(transformers, f"{name}Config")(**{**config, **changes})).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:  # norms and biases that are left at 1 and 0 would hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.1)
        if "final_logits_bias" in module.state_dict():
            module.final_logits_bias.normal_(std=0.3)
    return module


def save(family: str, folder: Path, **changes: Any) -> Any:
    module = build(family, **changes)
    module.save_pretrained(folder)
    return module


def load(folder: Path, kernels: bool, **options: Any) -> Model:
    """Loads a model on the compiled kernels, or on torch operators."""
    with pytest.MonkeyPatch.context() as patch:
        if not kernels:
            patch.setenv("FORETOKEN_NATIVE", "0")
        elif not kernels_available():
            pytest.skip("there are no compiled kernels here")
        model = load_model(folder, **{"dtype": "float32", **options})
    assert isinstance(model, EncoderDecoder) and isinstance(model.runner, NativeRunner) == kernels
    return model
