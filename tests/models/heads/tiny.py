"""Small random heads on disk, for a target of any size."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

Tensors = dict[str, Tensor]


def save(path: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


def linked(source: Path, folder: Path) -> Path:
    """Makes ``folder`` with links to a model's files."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).symlink_to(file)
    return folder


class Drawn:
    """Random tensors of a head with four query heads, and the fields of config.json that follow."""

    def __init__(self, hidden: int, seed: int) -> None:
        self.hidden, self.generator = hidden, torch.Generator().manual_seed(seed)
        self.config: dict[str, Any] = {
            "hidden_size": hidden,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": hidden // 4,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "max_position_embeddings": 512,
        }

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator) * (shape[-1] ** -0.5)

    def norm(self, size: int | None = None) -> Tensor:
        return 1 + 0.2 * torch.randn(size or self.hidden, generator=self.generator)

    def layer(self, at: str, reads: int, head_norms: bool = False) -> Tensors:
        """Returns a decoder layer whose attention reads rows of this width."""
        hidden, inner = self.hidden, self.config["intermediate_size"]
        sizes = {"q": (hidden, reads), "k": (hidden // 2, reads), "v": (hidden // 2, reads), "o": (hidden, hidden)}
        mlp = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        norms = ("q", "k") if head_norms else ()
        return {
            **{f"{at}.{part}_layernorm.weight": self.norm() for part in ("input", "post_attention")},
            **{f"{at}.self_attn.{part}_proj.weight": self.random(*shape) for part, shape in sizes.items()},
            **{f"{at}.self_attn.{part}_norm.weight": self.norm(self.config["head_dim"]) for part in norms},
            **{f"{at}.mlp.{part}_proj.weight": self.random(*shape) for part, shape in mlp.items()},
        }


def eagle3(
    *,
    hidden: int = 64,
    target_hidden: int = 64,
    vocab: int = 101,
    draft_vocab: int = 40,
    taps: tuple[int, ...] = (1, 2, 2),
    embedding: bool = True,
    layers: int = 1,
    seed: int = 0,
    mask: int | None = None,
    **extra: Any,
) -> tuple[dict[str, Any], Tensors]:
    """config.json and tensors in EAGLE's own names; a reduced vocabulary of scattered ids. mask: that of P-EAGLE."""
    d = Drawn(hidden, seed)
    tensors = {"fc.weight": d.random(hidden, len(taps) * target_hidden), "midlayer.hidden_norm.weight": d.norm()}
    for i in range(layers):
        at, reads = ("midlayer", 2 * hidden) if i == 0 else (f"layers.{i}", hidden)
        tensors |= d.layer(at, reads)
        for part in "qk":
            tensors[f"{at}.self_attn.{part}_proj.weight"] *= 2
    ids = torch.randperm(vocab, generator=d.generator)[:draft_vocab].sort().values
    tensors |= {"norm.weight": d.norm(), "lm_head.weight": d.random(draft_vocab, hidden) * 4}
    if draft_vocab != vocab:
        t2d = torch.zeros(vocab, dtype=torch.bool)
        t2d[ids] = True
        tensors |= {"d2t": ids - torch.arange(draft_vocab), "t2d": t2d}
    if embedding:
        tensors["embed_tokens.weight"] = d.random(vocab, hidden) * 4
    if mask is not None:
        tensors["mask_hidden"] = d.random(1, 1, len(taps) * target_hidden) * 8
        extra["pard_token"] = mask
    if extra.get("norm_before_fc"):
        tensors["input_norm.weight"] = d.norm(len(taps) * target_hidden)
    if extra.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": d.norm(target_hidden) for i in range(len(taps))}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **d.config,
        "target_hidden_size": target_hidden,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "draft_vocab_size": draft_vocab,
        "foretoken_taps": list(taps),
        **extra,
    }
    return config, tensors


def eagle1(*, hidden: int = 64, vocab: int = 101, layers: int = 1, seed: int = 0) -> tuple[dict[str, Any], Tensors]:
    """A head of EAGLE-1 and 2: no vocabulary head, no norm before its first attention, fc with a bias."""
    config, tensors = eagle3(
        hidden=hidden, target_hidden=hidden, vocab=vocab, draft_vocab=vocab, seed=seed, layers=layers
    )
    for name in ("midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight", "norm.weight", "lm_head.weight"):
        del tensors[name]
    g = torch.Generator().manual_seed(seed + 1)
    for part in "qkv":
        name = f"midlayer.self_attn.{part}_proj.weight"
        tensors[name] = tensors[name][:, :hidden]
    tensors = {name.replace("midlayer", "layers.0"): tensor for name, tensor in tensors.items()}
    tensors["fc.weight"] = torch.randn(hidden, 2 * hidden, generator=g) * 0.1
    tensors["fc.bias"] = torch.randn(hidden, generator=g) * 0.1
    dropped = ("foretoken_taps", "draft_vocab_size", "target_hidden_size")
    return {k: v for k, v in config.items() if k not in dropped} | {"architectures": ["EagleLlamaForCausalLM"]}, tensors


def medusa(
    *, hidden: int = 64, vocab: int = 101, heads: int = 3, layers: int = 1, own: int = 0, seed: int = 0
) -> tuple[dict[str, Any], Tensors]:
    """vLLM's names. own: vocabulary heads of its own, 0 for the target's."""
    g = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for i in range(heads):
        for j in range(layers):
            tensors[f"blocks.{i}.layers.{j}.weight"] = torch.randn(hidden, hidden, generator=g) * hidden**-0.5
            tensors[f"blocks.{i}.layers.{j}.bias"] = torch.randn(hidden, generator=g) * 0.1
    for i in range(own):
        tensors[f"lm_heads.{i}.weight"] = torch.randn(vocab, hidden, generator=g) * 0.3
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": hidden,
        "vocab_size": vocab,
        "num_heads": heads,
        "num_hidden_layers": layers,
        "truncated_vocab_size": vocab,
        "original_lm_head": own == 0,
    }
    return config, tensors


def blockwise(*, hidden: int = 64, inner: int = 24, heads: int = 3, seed: int = 0) -> tuple[dict[str, Any], Tensors]:
    g = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for i in range(heads):
        tensors[f"heads.{i}.up.weight"] = torch.randn(inner, hidden, generator=g) * hidden**-0.5
        tensors[f"heads.{i}.up.bias"] = torch.randn(inner, generator=g) * 0.1
        tensors[f"heads.{i}.down.weight"] = torch.randn(hidden, inner, generator=g) * inner**-0.5
        tensors[f"heads.{i}.down.bias"] = torch.randn(hidden, generator=g) * 0.1
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_heads": heads}
    return {"model_type": "foretoken_blockwise", **sizes}, tensors
