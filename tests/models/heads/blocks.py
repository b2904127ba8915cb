"""Small random block drafters, and their equations in plain torch: DFlash (z-lab/dflash, dflash/model.py), JetSpec
(hao-ai-lab/JetSpec, jetspec/models/draft_head.py) and DSpark (deepseek-ai/DeepSpec, deepspec/modeling/dspark;
vllm-project/speculators, models/dspark)."""

from typing import Any

import torch
import torch.nn.functional as F
from tests.models.heads.tiny import Drawn, Tensors
from torch import Tensor


def dflash(
    *,
    hidden: int = 64,
    target_hidden: int = 64,
    vocab: int = 101,
    taps: tuple[int, ...] = (1, 2),
    layers: int = 2,
    block: int = 4,
    mask: int = 100,
    seed: int = 0,
    scale: float = 1.0,
    **extra: Any,
) -> tuple[dict[str, Any], Tensors]:
    """config.json and tensors as z-lab writes them: without an embedding and a vocabulary head."""
    d = Drawn(hidden, seed)
    tensors = {"fc.weight": d.random(hidden, len(taps) * target_hidden), "hidden_norm.weight": d.norm()}
    for i in range(layers):
        tensors |= d.layer(f"layers.{i}", hidden, head_norms=True)
    tensors["norm.weight"] = d.norm() * scale
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **d.config,
        "num_hidden_layers": layers,
        "num_target_layers": 3,
        "vocab_size": vocab,
        "attention_bias": False,
        "layer_types": ["full_attention"] * layers,
        "block_size": block,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": [tap - 1 for tap in taps]},
        **extra,
    }
    return config, tensors


def jetspec(**sizes: Any) -> tuple[dict[str, Any], Tensors]:
    """The same as the authors of JetSpec write it: DFlash's tensors, and a key."""
    config, tensors = dflash(**sizes)
    config["dflash_config"]["causal_head"] = True
    return config, tensors


def dspark(
    *, rank: int = 8, gated: bool = False, sure: bool = True, seed: int = 0, **sizes: Any
) -> tuple[dict[str, Any], Tensors]:
    """The same as DeepSeek writes it: with the heads, an embedding and a vocabulary head."""
    config, tensors = dflash(seed=seed, **sizes)
    g = torch.Generator().manual_seed(seed + 1)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    config |= {"architectures": ["Qwen3DSparkModel"], **config.pop("dflash_config"), "num_anchors": 4}
    config |= {"markov_rank": rank, "markov_head_type": "gated" if gated else "vanilla"}
    config |= {"enable_confidence_head": sure, "confidence_head_with_markov": sure}
    tensors["embed_tokens.weight"] = torch.randn(vocab, hidden, generator=g)
    tensors["lm_head.weight"] = torch.randn(vocab, hidden, generator=g) * 0.3
    tensors["markov_head.markov_w1.weight"] = torch.randn(vocab, rank, generator=g)
    tensors["markov_head.markov_w2.weight"] = torch.randn(vocab, rank, generator=g)
    if gated:
        tensors["markov_head.gate_proj.weight"] = torch.randn(rank, hidden + rank, generator=g) * 0.3
        tensors["markov_head.gate_proj.bias"] = torch.randn(rank, generator=g)
    if sure:
        tensors["confidence_head.proj.weight"] = torch.randn(1, hidden + rank, generator=g) * 0.2
        tensors["confidence_head.proj.bias"] = torch.randn(1, generator=g)
    return config, tensors


def speculators(config: dict[str, Any], tensors: Tensors, kept: int = 40) -> tuple[dict[str, Any], Tensors]:
    """A DSpark head in the layout of speculators, with a vocabulary of ``kept`` scattered tokens."""
    vocab = config["vocab_size"]
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(5))[:kept].sort().values
    own = ("block_size", "mask_token_id", "markov_rank", "markov_head_type", "confidence_head_with_markov")
    layer_keys = {k: v for k, v in config.items() if k not in (*own, "target_layer_ids", "architectures")}
    nested = {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "speculators_config": {"algorithm": "dspark"},
        "transformer_layer_config": layer_keys,
        "aux_hidden_state_layer_ids": [i + 1 for i in config["target_layer_ids"]],
        "draft_vocab_size": kept,
        **{key: config[key] for key in own},
    }
    used = torch.zeros(vocab, dtype=torch.bool)
    used[ids] = True
    reduced = {name: tensors[name][ids] for name in ("lm_head.weight", "markov_head.markov_w2.weight")}
    return nested, {**tensors, **reduced, "d2t": ids - torch.arange(kept), "t2d": used}


class Reference:
    """One block behind a context, all rows at once."""

    def __init__(self, config: dict[str, Any], tensors: Tensors, embedding: Tensor, unembed: Tensor) -> None:
        self.c, self.t, self.embedding, self.unembed = config, tensors, embedding, unembed
        self.mask = config.get("mask_token_id", config.get("dflash_config", {}).get("mask_token_id"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.c["rms_norm_eps"]) * self.t[f"{name}.weight"]

    def states(self, newest: int, taps: Tensor) -> Tensor:
        """newest: the newest token; taps: the target's states before it [n, taps * Ht] -> normed states [block, H]"""
        context = self.norm(taps @ self.t["fc.weight"].T, "hidden_norm")
        x = self.embedding[[newest, *[self.mask] * (self.c["block_size"] - 1)]]
        for i in range(self.c["num_hidden_layers"]):
            at = f"layers.{i}"
            x = x + self.attend(self.norm(x, f"{at}.input_layernorm"), context, at, self.c["layer_types"][i])
            y = self.norm(x, f"{at}.post_attention_layernorm")
            gate = F.silu(y @ self.t[f"{at}.mlp.gate_proj.weight"].T)
            x = x + (gate * (y @ self.t[f"{at}.mlp.up_proj.weight"].T)) @ self.t[f"{at}.mlp.down_proj.weight"].T
        return self.norm(x, "norm")

    def attend(self, x: Tensor, context: Tensor, at: str, kind: str) -> Tensor:
        heads, kv, dim = (self.c[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        seen, rows = len(context), len(x)

        def split(y: Tensor, part: str) -> Tensor:
            return (y @ self.t[f"{at}.self_attn.{part}_proj.weight"].T).unflatten(-1, (-1, dim)).transpose(0, 1)

        positions = torch.arange(seen + rows).float()
        angles = torch.outer(positions, 1e4 ** (-torch.arange(0, dim, 2).float() / dim))
        cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)

        def turn(y: Tensor, first: int) -> Tensor:
            half = dim // 2
            return y * cos[first:] + torch.cat([-y[..., half:], y[..., :half]], -1) * sin[first:]

        both = torch.cat([context, x])
        q = turn(self.norm(split(x, "q"), f"{at}.self_attn.q_norm"), seen)
        k = turn(self.norm(split(both, "k"), f"{at}.self_attn.k_norm"), 0).repeat_interleave(heads // kv, 0)
        v = split(both, "v").repeat_interleave(heads // kv, 0)
        scores = q @ k.transpose(1, 2) * dim**-0.5
        distance = positions[seen:, None] - positions
        if self.c.get("dflash_config", {}).get("causal_head"):
            scores = scores.masked_fill(distance < 0, -torch.inf)
        if kind == "sliding_attention":  # causal unless config.json says otherwise
            hidden = distance >= self.c["sliding_window"]
            if self.c.get("is_causal") is not False:
                hidden |= distance < 0
            scores = scores.masked_fill(hidden, -torch.inf)
        mixed = scores.softmax(-1) @ v
        return mixed.transpose(0, 1).reshape(rows, -1) @ self.t[f"{at}.self_attn.o_proj.weight"].T

    def logits(self, newest: int, taps: Tensor, path: list[int]) -> Tensor:
        """Returns the logits [1 + len(path), Vd] of the tokens along ``path``."""
        states = self.states(newest, taps)
        if "markov_head.markov_w1.weight" not in self.t:
            return (states[1:] @ self.unembed.T)[: 1 + len(path)]
        before = self.t["markov_head.markov_w1.weight"][[newest, *path]]
        states = states[: 1 + len(path)]
        vectors = before
        if self.c["markov_head_type"] == "gated":
            read = torch.cat([states, before], -1) @ self.t["markov_head.gate_proj.weight"].T
            vectors = torch.sigmoid(read + self.t["markov_head.gate_proj.bias"]) * before
        return states @ self.unembed.T + vectors @ self.t["markov_head.markov_w2.weight"].T

    def confidence(self, newest: int, taps: Tensor, path: list[int]) -> Tensor:
        """Returns the estimated acceptance [1 + len(path)] of the tokens along ``path``."""
        read = self.states(newest, taps)[: 1 + len(path)]
        read = torch.cat([read, self.t["markov_head.markov_w1.weight"][[newest, *path]]], -1)
        scores = read @ self.t["confidence_head.proj.weight"].T + self.t["confidence_head.proj.bias"]
        return torch.sigmoid(scores)[:, 0]
