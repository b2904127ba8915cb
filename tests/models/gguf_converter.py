"""Writes tiny checkpoints as GGUF files by the rules of llama.cpp's converter (conversion/*.py of its repository).

Names are those of the tables of the package ``gguf``. Each architecture lists the keys that its class adds to those of
all (``set_gguf_parameters``), and what it changes in tensors (``modify_tensors``).
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES
from gguf.constants import GGMLQuantizationType as K
from safetensors.torch import load_file
from torch import Tensor

from . import gguf_keys as keys
from .gguf_files import finish
from .gguf_keys import Config, Keys, field, named, put, put_all

Tensors = Iterable[tuple[str, Tensor]]
Change = Callable[[Config, str, Tensor], Tensors]


def pairs(config: Config, name: str, tensor: Tensor) -> Tensors:
    """The halves of each head of queries and keys, in turns."""
    for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if f"{part}." in name:
            tensor = tensor.unflatten(0, (config[heads], 2, -1)).transpose(1, 2).flatten(0, 2)
    yield name, tensor


def norms_plus_one(config: Config, name: str, tensor: Tensor) -> Tensors:
    yield name, tensor + 1 if name.endswith("norm.weight") and "linear_attn" not in name else tensor


def state(config: Config, name: str, tensor: Tensor) -> Tensors:
    """The tensors of recurrent layers as ggml's operations take them."""
    if name.endswith("A_log"):
        tensor = -torch.exp(tensor)
    if name.endswith(("A_log", ".D")) and "linear_attn" not in name:
        tensor = tensor[:, None]
    if "conv1d.weight" in name or "conv.conv.weight" in name:
        tensor = tensor[:, 0]
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        tensor = tensor.view(field(config, "mamba_n_groups", "n_groups"), -1)
    yield re.sub(r"\.dt_bias$", ".dt_proj.bias", name), tensor


def tiles(config: Config, name: str, tensor: Tensor) -> Tensors:
    """Heads of values of gated DeltaNet: first the first of each head of keys."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if "linear_attn." not in name or name.endswith("linear_attn.norm.weight"):
        yield name, tensor
        return

    def tiled(part: Tensor) -> Tensor:
        return part.unflatten(0, (keys, values // keys, -1)).transpose(0, 1).flatten(0, 2)

    if ".out_proj." in name:
        yield name, tiled(tensor.t()).t().contiguous()
    elif ".in_proj_qkv." in name or ".conv1d." in name:
        first = 2 * keys * config["linear_key_head_dim"]
        yield name, torch.cat((tensor[:first], tiled(tensor[first:])))
    else:
        yield name, tiled(tensor)


def by_kind(config: Config, name: str, tensor: Tensor) -> Tensors:
    """Qwen3-Next's rows: queries, keys and values in one matrix, gates in another."""
    if "in_proj_qkvz" not in name:
        yield name, tensor
        return
    keys, per_key = config["linear_num_key_heads"], config["linear_num_value_heads"] // config["linear_num_key_heads"]
    key, value = config["linear_key_head_dim"], per_key * config["linear_value_head_dim"]
    q, k, v, z = tensor.unflatten(0, (keys, -1)).split((key, key, value, value), 1)
    yield name.replace("qkvz", "qkv"), torch.cat([part.flatten(0, 1) for part in (q, k, v)])
    yield name.replace("qkvz", "z"), z.flatten(0, 1)


def halves(config: Config, name: str, tensor: Tensor) -> Tensors:
    """Gate and up of Granite, each by itself."""
    shared, layer = "shared_mlp" in name, "".join(name.split(".")[2:3])
    kind = "" if shared and not config.get("num_local_experts") else "_shexp" if shared else "_exps"
    if not name.endswith("input_linear.weight"):
        dense = shared and not kind and name.endswith("output_linear.weight")
        yield f"blk.{layer}.ffn_down.weight" if dense else name, tensor
        return
    for part, half in zip(("gate", "up"), tensor.chunk(2, -2), strict=True):
        yield f"blk.{layer}.ffn_{part}{kind}.weight", half.contiguous()


def absorbed(config: Config, name: str, tensor: Tensor) -> Tensors:
    """The matrix of keys and values of latents, by head, that of keys transposed."""
    if not name.endswith("kv_b_proj.weight"):
        yield name, tensor
        return
    plain = config["qk_nope_head_dim"]
    both = tensor.unflatten(0, (config["num_attention_heads"], -1))
    yield name.replace("kv_b", "k_b"), both[:, :plain].transpose(1, 2).contiguous()
    yield name.replace("kv_b", "v_b"), both[:, plain:].contiguous()


def whole_heads(config: Config, name: str, tensor: Tensor) -> Tensors:
    """Queries, keys and values one after the other, instead of by head."""
    if "query_key_value" in name:
        heads = field(config, "num_attention_heads", "n_head")
        several = config.get("new_decoder_architecture")
        groups = config["num_kv_heads"] if several else 1 if config.get("multi_query") else heads
        rows = tensor.unflatten(0, (groups, heads // groups + 2, -1))
        tensor = torch.cat([part.flatten(0, 2) for part in (rows[:, :-2], rows[:, -2:-1], rows[:, -1:])])
    yield name, tensor


def expert_halves(config: Config, name: str, tensor: Tensor) -> Tensors:
    """The experts of Llama 4 with outputs first, gate and up each by itself."""
    if name.endswith("experts.gate_up_proj"):
        for part, half in zip(("gate", "up"), tensor.transpose(-1, -2).chunk(2, -2), strict=True):
            yield f"{name.removesuffix('gate_up_proj')}{part}_proj.weight", half.contiguous()
    else:
        last = name.endswith("experts.down_proj")
        yield (f"{name}.weight", tensor.transpose(-1, -2).contiguous()) if last else (name, tensor)


def outputs_first(config: Config, name: str, tensor: Tensor) -> Tensors:
    """The matrices of GPT-2, transposed."""
    yield name, tensor.t().contiguous() if re.search(r"\.(c_attn|c_proj|c_fc)\.weight", name) else tensor


def multiplied(config: Config, name: str, tensor: Tensor) -> Tensors:
    """Falcon-H1's factors, as part of its weights."""
    into = config["attention_in_multiplier"]
    by = {
        "down_proj": config["mlp_multipliers"][1],
        "gate_proj": config["mlp_multipliers"][0],
        "k_proj": config["key_multiplier"] * into,
        "q_proj": into,
        "v_proj": into,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    if name.endswith("in_proj.weight"):
        out, keys = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        parts = tensor.split((out, out, keys, keys, config["mamba_n_heads"]))
        scales = config["ssm_multipliers"]
        tensor = torch.cat([part * s * config["ssm_in_multiplier"] for part, s in zip(parts, scales, strict=True)])
    yield name, tensor * next((factor for part, factor in by.items() if f"{part}." in name), 1.0)


@dataclass(frozen=True)
class Rules:
    """Rules of the converter's class of one architecture."""

    keys: Sequence[Keys] = ()
    changes: Sequence[Change] = ()


DELTA = (state, norms_plus_one)
RULES: dict[str, Rules] = {
    "qwen3next": Rules((keys.delta, keys.moe), (by_kind, *DELTA)),
    "qwen35": Rules((keys.delta,), (tiles, *DELTA)),
    "qwen35moe": Rules((keys.delta, keys.moe), (tiles, *DELTA)),
    "chatglm": Rules((keys.rotated,)),
    "glm4": Rules((keys.rotated,)),
    "glm4moe": Rules((keys.rotated, keys.moe, keys.sigmoid)),
    "deepseek2": Rules((keys.latent, keys.moe), (absorbed,)),
    "minicpm3": Rules((keys.minicpm3,)),
    "lfm2": Rules((keys.lfm2,), (state,)),
    "lfm2moe": Rules((keys.lfm2, keys.moe, keys.sigmoid), (state,)),
    "granite": Rules((keys.granite,), (pairs,)),
    "granitemoe": Rules((keys.granite,), (halves, pairs)),
    "granitehybrid": Rules((keys.granite, keys.mamba, keys.by_layer), (halves, state, pairs)),
    "falcon-h1": Rules((keys.mamba, named(context_length="max_position_embeddings")), (multiplied, state)),
    "nemotron_h_moe": Rules(
        (
            keys.mamba,
            keys.by_layer,
            keys.moe,
            named(expert_shared_feed_forward_length="moe_shared_expert_intermediate_size"),
        ),
        (state, pairs),
    ),
    "gemma4": Rules((keys.gemma4,)),
    "olmo": Rules(
        (named(attention__clamp_kqv="clip_qkv"), lambda w, c: put(w, "attention.layer_norm_epsilon", 1e-5)), (pairs,)
    ),
    "olmo2": Rules((keys.windows,)),
    "command-r": Rules((named(logit_scale="logit_scale"),)),
    "cohere2": Rules((keys.windows, named(logit_scale="logit_scale"))),
    "exaone4": Rules((keys.windows,)),
    "seed_oss": Rules(),
    "ernie4_5": Rules(),
    "hunyuan-dense": Rules(),
    "ernie4_5-moe": Rules((keys.moe, keys.ernie)),
    "exaone-moe": Rules((keys.windows, keys.moe, keys.sigmoid)),
    "starcoder2": Rules(),
    "stablelm": Rules((keys.rotated, named(use_parallel_residual="use_parallel_residual"))),
    "nemotron": Rules((keys.rotated, named(attention__layer_norm_epsilon="norm_eps")), (norms_plus_one,)),
    "arcee": Rules((), (pairs,)),
    "jais2": Rules(),
    "phi2": Rules((keys.rotated,)),
    "phi3": Rules((keys.longrope,)),
    "gpt2": Rules((keys.wide,), (outputs_first,)),
    "starcoder": Rules((keys.wide, lambda w, c: put(w, "attention.head_count_kv", 1))),
    "gptneox": Rules((keys.rotated, named(use_parallel_residual="use_parallel_residual")), (whole_heads,)),
    "bloom": Rules((keys.wide, named(context_length="hidden_size")), (whole_heads,)),
    "mpt": Rules((keys.mpt,)),
    "falcon": Rules((keys.falcon,), (whole_heads,)),
    "llama": Rules((), (pairs,)),
    "llama4": Rules((keys.llama4,), (expert_halves,)),
    "mistral3": Rules((keys.ministral3,), (pairs,)),
}


def convert(
    folder: Path,
    config: Config,
    architecture: str,
    path: Path,
    kind: K = K.F32,
    next_layers: int = 0,
    fuse_qkv: bool = False,
) -> Path:
    """Writes a saved checkpoint as a GGUF file.

    Args:
        folder: the checkpoint.
        config: its configuration as transformers completes it.
        architecture: the name in GGUF.
        path: the file to write.
        kind: type of the matrices whose rows it divides; others are float32.
        next_layers: number of layers of multi-token prediction behind the others.
        fuse_qkv: whether queries, keys and values are joined, as by ``--fuse-qkv``.
    """
    rules, number = RULES[architecture], next(a for a, name in MODEL_ARCH_NAMES.items() if name == architecture)
    layers = field(config, "num_hidden_layers", "n_layer", "n_layers") or len(config["layers_block_type"])
    layers += next_layers
    writer, names = gguf.GGUFWriter(path, architecture), gguf.get_tensor_name_map(MODEL_ARCH(number), layers)
    put_all(writer, config, layers)
    for write in rules.keys:
        write(writer, config)
    put(writer, "nextn_predict_layers", next_layers or None)
    stored = {_appended(name, layers - next_layers): t for name, t in load_file(folder / "model.safetensors").items()}
    named = {_stored_name(names, name): t for name, t in _changed(config, rules.changes, _stacked(stored))}
    if fuse_qkv:
        named = _fused(named)
    for name, tensor in named.items():
        _add(writer, name, tensor, kind)
    for name, tensor in keys.rope_factors(config):
        _add(writer, name, tensor, K.F32)
    finish(writer)
    return path


def _fused(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors with the queries, keys and values of layers in one, where all three are there."""
    result = dict(tensors)
    for name in tensors:
        parts = [name.replace("attn_q.", f"attn_{part}.") for part in "qkv"]
        if ".attn_q." in name and all(part in tensors for part in parts):
            result[name.replace("attn_q.", "attn_qkv.")] = torch.cat([result.pop(part) for part in parts])
    return result


def _appended(name: str, layers: int) -> str:
    """Returns the name of a tensor of Qwen's layer of multi-token prediction, as DeepSeek-V3 has it."""
    own = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head.norm"}
    if match := re.fullmatch(r"mtp\.(\w+)\.weight", name):
        return f"model.layers.{layers}.{own[match[1]]}.weight"
    return re.sub(r"^mtp\.layers\.0\.", f"model.layers.{layers}.", name)


def _changed(config: Config, changes: Sequence[Change], tensors: Tensors) -> list[tuple[str, Tensor]]:
    for change in changes:
        tensors = [pair for name, tensor in tensors for pair in change(config, name, tensor)]
    return list(tensors)


def _stacked(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Returns a checkpoint's tensors with the matrices of all experts of a layer in one."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.+\.experts)\.(\d+)\.(.+)", name)
        if match is None:
            result[name] = tensor
        elif match[2] == "0":
            count = sum(
                re.fullmatch(rf"{re.escape(match[1])}\.\d+\.{re.escape(match[3])}", n) is not None for n in tensors
            )
            stack = [tensors[f"{match[1]}.{expert}.{match[3]}"] for expert in range(count)]
            result[re.sub(r"backbone(.+)mixer", r"model\1mlp", match[1]) + f".{match[3]}"] = torch.stack(stack)
    return list(result.items())


def _stored_name(names: Any, name: str) -> str:
    if name.startswith("blk."):
        return name
    if ".router." in name and name.endswith("scale"):  # Gemma 4's
        part = "ffn_gate_inp" if name.endswith("router.scale") else "ffn_down_exps"
        return f"blk.{name.split('.')[2]}.{part}.scale"
    if found := re.fullmatch(r"model\.layers\.(\d+)\.(eh_proj|enorm|hnorm|shared_head\.norm)(\.weight)", name):
        return f"blk.{found[1]}.nextn.{found[2].replace('.', '_')}{found[3]}"
    name = re.sub(r"(layer_scalar|experts\.(?:gate_up|down)_proj)$", r"\1.weight", name)
    name = re.sub(
        r"(e_score_correction|expert)_bias$", lambda m: f"{m[0]}.bias" if m[1] == "expert" else f"{m[1]}.bias", name
    )
    for tried in (name, name.removeprefix("transformer."), name.removeprefix("model."), name.replace("dt_proj", "dt")):
        if found := names.get_name(tried, try_suffixes=(".weight", ".bias")):
            return str(found)
    raise KeyError(name)


def _add(writer: Any, name: str, tensor: Tensor, kind: K) -> None:
    matrix = tensor.ndim > 1 and not re.search(r"ffn_gate_inp|ssm_(conv1d|a|d|norm)|shortconv\.conv|norm", name)
    if kind == K.F32 or not matrix or tensor.shape[-1] % 32:
        writer.add_tensor(name, tensor.float().contiguous().numpy())
    else:
        writer.add_tensor(name, gguf.quantize(tensor.contiguous().numpy(), kind), raw_dtype=kind)
