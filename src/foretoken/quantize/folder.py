"""Writes a checkpoint as a folder of safetensors, quantized as compressed-tensors does or in floats.

vLLM and transformers (with the package compressed-tensors) load it. int4 is ``pack-quantized``: codes of an output in
int32 words, a scale for each group of inputs. int8 is ``int-quantized`` W8A8: a scale for each output, activations
quantized row by row.
"""

import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.core.errors import InvalidRequest
from foretoken.core.files import write_json
from foretoken.models.families.experts import EXPERT_FAMILIES
from foretoken.models.families.rope import inverse_frequencies
from foretoken.models.formats.checkpoint import load_tokenizer
from foretoken.models.formats.gguf.header import Header
from foretoken.models.formats.gguf.tokenizer import special_ids
from foretoken.models.formats.quantize import Quantizer, quantize, strips
from foretoken.models.formats.shards import ShardWriter, copy_companions
from foretoken.quantize.rounding import Grid, Rounding, Scheme, symmetric_scales

SHARD = 2**30  # largest size of a file in bytes
_EMBEDDINGS = ("embed", "shared", "wte", "wpe", "relative_attention_bias", "norm")
_VOCABULARY = re.compile(r"(.+\.)?lm_heads?(\.[0-9]+)?\.weight|(medusa_heads?\.)?[0-9]+\.[0-9]+\.weight")
_ROUTERS = tuple(
    f".{name}.weight" for name in ("shared_expert_gate", *{f.experts.names.router for f in EXPERT_FAMILIES.values()})
)
_VERSION = "0.20.0"  # version of compressed-tensors' format


class FolderWriter:
    """Writes tensors in their order.

    Args:
        config: config.json of the source.
        scheme: a scheme that is not GGUF.
        lm_head: whether the vocabulary head is quantized.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], scheme: Scheme, lm_head: bool = False) -> None:
        self._folder, self._scheme, self._lm_head = folder, scheme, lm_head
        self._config = dict(config)
        self._shards = ShardWriter(folder, SHARD)
        self._left: list[str] = []

    def put(self, name: str, tensor: Tensor, rounding: Rounding) -> Tensor:
        """Writes a tensor. Returns its values as they are read back."""
        stem, quantizer = name.removesuffix(".weight"), self._scheme.quantizer
        if self._scheme.dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(self._scheme.dtype)
        if quantizer is None or not self._is_linear(name, tensor):
            return self._keep({name: tensor.contiguous()}, tensor)
        if quantizer.group is None:
            int8 = quantize(tensor)
            values = {name: int8.values, f"{stem}.weight_scale": int8.scales[:, None]}
            return self._keep(values, int8.dequantize())
        if tensor.shape[1] % quantizer.group:
            self._left.append(stem)
            return self._keep({name: tensor.contiguous()}, tensor)
        return self._keep(*self._groups(stem, tensor, quantizer, rounding))

    def finish(self) -> None:
        """Completes the checkpoint after the last tensor."""
        self._shards.close()
        self._config.pop("quantization_config", None)
        if self._scheme.quantizer is not None:
            self._config["quantization_config"] = self._settings(self._scheme.quantizer)
        elif self._scheme.dtype is not None:
            self._config.pop("torch_dtype", None)
            self._config["dtype"] = self._scheme.name
        if self._lm_head and self._scheme.quantizer is not None:
            self._config["tie_word_embeddings"] = False
        write_json(self._folder / "config.json", self._config)

    def _is_linear(self, name: str, tensor: Tensor) -> bool:
        """Returns whether the scheme quantizes a tensor: matrices of linear layers, not embeddings."""
        if not name.endswith(".weight") or tensor.ndim != 2 or not tensor.is_floating_point():
            return False
        if any(part in name for part in _EMBEDDINGS):
            return False
        if name.endswith(_ROUTERS):
            self._left.append(name.removesuffix(".weight"))
            return False
        vocabulary = _VOCABULARY.fullmatch(name) is not None
        if vocabulary and not self._lm_head:
            self._left.append(name.removesuffix(".weight"))
        return self._lm_head or not vocabulary

    def _groups(
        self, stem: str, tensor: Tensor, quantizer: Quantizer, rounding: Rounding
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Returns the parts of a matrix in groups, and its values."""
        assert quantizer.group is not None
        packed, scales, values = [], [], []
        pieces = strips((tensor.shape[0], tensor.shape[1])) if rounding.curvature is None else [(0, len(tensor))]
        for first, last in pieces:
            weights = tensor[first:last].float()
            grid = self._grid(weights, quantizer, rounding, tensor.dtype)
            codes = rounding.codes(weights, grid)
            packed.append(_words(codes - grid.low, quantizer.bits))
            scales.append(grid.scales.to(tensor.dtype))
            values.append(grid.values(codes))
        parts = {
            f"{stem}.weight_packed": torch.cat(packed),
            f"{stem}.weight_scale": torch.cat(scales),
            f"{stem}.weight_shape": torch.tensor(tensor.shape),
        }
        return parts, torch.cat(values)

    def _grid(self, weights: Tensor, quantizer: Quantizer, rounding: Rounding, dtype: torch.dtype) -> Grid:
        """Returns the grid of some outputs. Scales have the checkpoint's dtype, or float16 if that is float32."""
        group, low = quantizer.group or weights.shape[1], -(2 ** (quantizer.bits - 1))
        x = weights.unflatten(1, (-1, group))
        importance = torch.ones_like(x)
        if rounding.importance is not None:
            importance = rounding.importance.unflatten(0, (-1, group)).expand_as(x)
        scales = symmetric_scales(x, low, importance)
        rounded = scales.half().float() if dtype == torch.float32 else scales.to(dtype).float()
        return Grid(rounded, low, -low - 1, group)

    def _keep(self, tensors: dict[str, Tensor], values: Tensor) -> Tensor:
        for name, tensor in tensors.items():
            self._shards.add(name, tensor)
        return values

    def _settings(self, quantizer: Quantizer) -> dict[str, Any]:
        """Returns the ``quantization_config`` of compressed-tensors."""
        common = {"type": "int", "symmetric": True, "actorder": None, "block_structure": None, "observer": "minmax"}
        group, int8 = quantizer.group, quantizer.group is None
        weights = {"num_bits": quantizer.bits, "strategy": "channel" if int8 else "group", "group_size": group}
        activations = {"num_bits": 8, "strategy": "token", "group_size": None, "dynamic": True}
        kind = "int-quantized" if int8 else "pack-quantized"
        return {
            "quant_method": "compressed-tensors",
            "format": kind,
            "quantization_status": "compressed",
            "version": _VERSION,
            "global_compression_ratio": None,
            "kv_cache_scheme": None,
            "ignore": sorted({*self._left, *(() if self._lm_head else ("lm_head",))}),
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {**common, **weights, "dynamic": False},
                    "input_activations": {**common, **activations, "observer": None} if int8 else None,
                    "output_activations": None,
                    "format": kind,
                }
            },
        }


def copy_files(source: Path, folder: Path) -> None:
    """Copies tokenizer, chat template and generation settings of a checkpoint, and the drafting heads in it."""
    copy_companions(source, folder)
    if (source / "heads").is_dir():
        shutil.copytree(source / "heads", folder / "heads")


def _words(codes: Tensor, bits: int) -> Tensor:
    """Returns codes [out, in] packed into int32 words along the inputs, the lowest bits first."""
    codes = F.pad(codes.to(torch.uint8), (0, -codes.shape[1] % (32 // bits)))
    if bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    return codes.contiguous().view(torch.int32)


_LLAMA3_LENGTH = 8192  # original_max_position_embeddings of every Llama 3


def exported_config(config: Mapping[str, Any], path: Path, names: Collection[str]) -> dict[str, Any]:
    """Returns the config.json of a GGUF file with the other fields that transformers needs.

    Args:
        config: the file's configuration.
        names: names of the tensors.

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
    """Returns Llama 3's rotary scaling that gives the frequencies of a file's factors."""
    scaling = {
        "rope_type": "llama3",
        "factor": round(float(factors.max()), 4),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": _LLAMA3_LENGTH,
    }
    plain = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    frequencies = inverse_frequencies({**plain, **scaling}, 2 * len(factors))
    if not torch.allclose(frequencies, inverse_frequencies(plain, 2 * len(factors)) / factors, rtol=1e-4):
        raise InvalidRequest(f"the rotary factors of {path} are not Llama 3's, and config.json has no key for others")
    return scaling
