"""Modules of transformers: reading them from checkpoints, and checks before and after."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from foretoken.core.errors import ModelLoadError
from foretoken.models.formats.checkpoint import open_weights
from foretoken.models.formats.memory import check_fits
from foretoken.models.formats.weight_files import is_finite

MAX_GROWTH = 2  # parameters of the module per element of the checkpoint; conversions on loading change the number
SLACK = 2**16  # parameters by which small modules may exceed that
MAX_REASON = 300  # characters
_ATTENTION = ("eager", "sdpa")
_LAYER_TYPES = ("full_attention", "sliding_attention")


def read_module(path: Path, dtype: torch.dtype, **options: Any) -> Any:
    """Loads the module of a safetensors checkpoint.

    Args:
        options: further arguments of transformers' ``from_pretrained``.

    Raises:
        ModelLoadError: the checkpoint is incomplete or malformed.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        check_size(config, path)
        softcap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
        module, info = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            attn_implementation="eager" if softcap else None,
            output_loading_info=True,
            **options,
        )
    except ModelLoadError:
        raise
    except Exception as error:  # a malformed configuration fails anywhere in transformers
        raise ModelLoadError(f"transformers cannot load the model in {path}: {one_line(error)}") from error
    if missing := sorted(info["missing_keys"]):
        raise ModelLoadError(
            f"the checkpoint in {path} lacks {len(missing)} tensor(s), first {missing[0]!r}; is it complete?"
        )
    check_parameters(module, path)
    return module


def check_size(config: Any, path: Path) -> None:
    """Builds the module without memory, and compares its size with the checkpoint's.

    Args:
        config: the configuration as transformers reads it.

    Raises:
        ModelLoadError: the module is much larger than its tensors, or its tables do not fit into memory.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    built = sum(parameter.numel() for parameter in module.parameters())
    stored = sum(math.prod(shape) for shape in open_weights(path).shapes.values())
    packed = getattr(config, "quantization_config", None) is not None
    if not packed and built > MAX_GROWTH * stored + SLACK:
        raise ModelLoadError(
            f"config.json in {path} describes a model of {built:,} parameters, but the checkpoint holds {stored:,}; "
            "do they belong together?"
        )
    check_fits(sum(buffer.nbytes for buffer in module.buffers()), torch.device("cpu"), str(path))


def check_parameters(module: Any, path: Path) -> None:
    """Checks the loaded parameters; a rank checks its part.

    Raises:
        ModelLoadError: a parameter holds NaN or infinity; in float16, possibly only after the conversion.
    """
    for name, parameter in module.named_parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if not is_finite(local.detach()):
            half = local.dtype == torch.float16
            raise ModelLoadError(
                f"the tensor {name!r} of {path} holds numbers that are NaN or infinite{' in float16' * half}; download "
                f"or save the checkpoint again{', or use bfloat16 or float32' * half}"
            )


def check_supported(module: Any, config: Any) -> None:
    """Raises ModelLoadError for a module that is known not to work, with the reason.

    Args:
        config: the configuration of its language model.
    """
    name = type(module).__name__
    if getattr(module.config, "is_encoder_decoder", False):
        raise ModelLoadError(f"{name} is an encoder-decoder; a decoder-only causal language model is needed")
    if getattr(module, "_is_stateful", False):
        raise ModelLoadError(f"{name} keeps a state that cannot be rewound, so drafts cannot be taken back")
    if unknown := sorted(set(getattr(config, "layer_types", None) or ()) - set(_LAYER_TYPES)):
        raise ModelLoadError(
            f"{name} has {', '.join(unknown)} layers, and only {' and '.join(_LAYER_TYPES)} layers are supported; "
            "run it with transformers alone, or take another model"
        )
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        raise ModelLoadError(
            f"{name} uses ALiBi, whose biases transformers computes from row numbers and not from positions; "
            "models with rotary or learned positions work"
        )
    used = getattr(config, "_attn_implementation", None) or "eager"
    if used not in _ATTENTION:
        raise ModelLoadError(
            f"{name} has attn_implementation={used!r}, which takes no tree mask; load it with 'sdpa' or 'eager'"
        )


def one_line(error: BaseException) -> str:
    """Returns an error's message in one line: its lines up to the first that does not end with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    count = next((number for number, line in enumerate(lines, 1) if not line.endswith(":")), len(lines))
    text = " ".join(lines[:count])[:MAX_REASON] or type(error).__name__
    return text if text.isprintable() else ascii(text)
