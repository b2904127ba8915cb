"""A GGUF file as the files of a checkpoint's folder: config.json, tokenizer and generation settings."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from foretoken.core.errors import InvalidRequest
from foretoken.core.files import write_json
from foretoken.models.families.rope import inverse_frequencies
from foretoken.models.formats.checkpoint import load_tokenizer
from foretoken.models.formats.gguf.header import Header
from foretoken.models.formats.gguf.tokenizer import special_ids

_LLAMA3_LENGTH = 8192  # original_max_position_embeddings of every Llama 3


def exported_config(config: Mapping[str, Any], path: Path, names: Collection[str]) -> dict[str, Any]:
    """Returns the config.json of a GGUF file with what transformers needs besides.

    Args:
        config: as the file describes it.
        path: the file.
        names: of the tensors.

    Raises:
        InvalidRequest: its rotary factors are not those of Llama 3.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    exported = {**config, "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]]}
    ids = special_ids(Header.read(path))
    exported |= {key: value for key, value in ids.items() if value not in (None, [])}
    if len(ends := ids["eos_token_id"]) == 1:
        exported["eos_token_id"] = ends[0]
    if config["model_type"] != "qwen2" and any(name.endswith("self_attn.q_proj.bias") for name in names):
        exported["attention_bias"] = True
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "factors":
        exported["rope_scaling"] = _llama3(config, torch.tensor(scaling["factors"]), path)
    return exported


def save_tokenizer(path: Path, folder: Path) -> None:
    """Writes the tokenizer of a GGUF file and its generation settings into a folder."""
    load_tokenizer(path).save_pretrained(folder)
    ids = {key: value for key, value in special_ids(Header.read(path)).items() if value not in (None, [])}
    write_json(folder / "generation_config.json", ids)


def _llama3(config: Mapping[str, Any], factors: torch.Tensor, path: Path) -> dict[str, Any]:
    """Returns the rotary scaling of Llama 3 whose frequencies a file's factors make."""
    scaling = {
        "rope_type": "llama3",
        "factor": round(float(factors.max()), 4),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": _LLAMA3_LENGTH,
    }
    plain = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    own = inverse_frequencies({**plain, **scaling}, 2 * len(factors))
    if not torch.allclose(own, inverse_frequencies(plain, 2 * len(factors)) / factors, rtol=1e-4):
        raise InvalidRequest(f"the rotary factors of {path} are not Llama 3's, and config.json has no name for others")
    return scaling
