"""Tiny random checkpoints with multi-token-prediction layers in several layouts, and what the layers compute.

The names of the tensors are those of published checkpoints: Qwen/Qwen3-Next-80B-A3B-Instruct, deepseek-ai/DeepSeek-V3,
zai-org/GLM-4.5, XiaomiMiMo/MiMo-7B-RL, baidu/ERNIE-4.5-21B-A3B-PT, LGAI-EXAONE/K-EXAONE-236B-A23B, tencent/Hy3-preview.
The reference follows DeepSeek-V3's report (2412.19437, equations 21 to 23) with transformers' own layers: h' =
M [norm(embedding), norm(h)], a decoder layer, a norm, the shared head.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.models.tiny import ARCHITECTURES, GROUPED, Tiny, hash_of
from torch import Tensor, nn

MIMO = Tiny("Qwen2", {**GROUPED, "rope_parameters": {"rope_type": "default", "rope_theta": 640000.0}}, native=True)

EXAONE4 = Tiny("Exaone4", {**GROUPED, "num_hidden_layers": 4, "sliding_window": 6}, native=True)
SHARED_NORM = "model.norm"


@dataclass(frozen=True)
class MtpFamily:
    """A family: its tiny target, and the names of an MTP layer; {n} counts from 0, {m} from the target's layers on.

    like: number of the target's layer that the MTP layer is like; None for the last one with attention. renamed: parts
    of the names in transformers' module, and what checkpoints have for them.
    """

    target: Tiny
    layer: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    hidden_first: bool = False
    model_type: str | None = None
    like: int | None = None
    renamed: tuple[tuple[str, str], ...] = ()


def _qwen(target: Tiny, like: int | None = None) -> MtpFamily:
    norms = "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"
    return MtpFamily(target, "mtp.layers.{n}.", *norms, "mtp.fc", "mtp.norm", like=like)


def _nextn(name: str, norm: str = "shared_head.norm", renamed: tuple[tuple[str, str], ...] = ()) -> MtpFamily:
    parts = (f"model.layers.{{m}}.{part}" for part in ("", "enorm", "hnorm", "eh_proj", norm))
    return MtpFamily(ARCHITECTURES[name], *parts, renamed=renamed)


def _mimo() -> MtpFamily:
    names = ("", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    return MtpFamily(MIMO, *(f"model.mtp_layers.{{n}}.{name}" for name in names), hidden_first=True, model_type="mimo")


def _ernie() -> MtpFamily:
    names = (f"model.mtp_{name}" for name in ("block.{n}.", "emb_norm.{n}", "hidden_norm.{n}", "linear_proj.{n}"))
    return MtpFamily(ARCHITECTURES["ernie4-5-moe"], *names, norm=SHARED_NORM, like=0)


MTP_FAMILIES = {
    "qwen3.5": _qwen(ARCHITECTURES["qwen3.5"]),
    "qwen3-next": _qwen(ARCHITECTURES["qwen3-next"]),
    "qwen3.5-experts": _qwen(ARCHITECTURES["qwen3.5-experts"]),
    "exaone4": _qwen(EXAONE4, like=0),
    "exaone-moe": _qwen(ARCHITECTURES["exaone-moe"], like=0),
    "ernie4-5-moe": _ernie(),
    "deepseek-v3": _nextn("deepseek-v3"),
    "glm4-moe": _nextn("glm4-moe"),
    "glm4-moe-lite": _nextn("glm4-moe-lite"),
    "hy-v3": _nextn(
        "hy-v3",
        "final_layernorm",
        (
            ("mlp.gate.", "mlp.router.gate."),
            ("e_score_correction_bias", "expert_bias"),
            ("shared_experts", "shared_mlp"),
        ),
    ),
    "mimo": _mimo(),
}


class MtpReference(nn.Module):
    """The target's transformers module with random MTP layers."""

    def __init__(self, family: MtpFamily, layers: int = 1) -> None:
        super().__init__()
        self.family, self.target = family, family.target.build()
        torch.manual_seed(hash_of(family.layer) + 1)
        config, stack = self.target.config, self.target.model.layers
        last = next(i for i in reversed(range(len(stack))) if hasattr(stack[i], "self_attn"))
        place = last if family.like is None else family.like
        norm, width = type(self.target.model.norm), config.hidden_size
        self.blocks = nn.ModuleList(type(stack[place])(config, place) for _ in range(layers))
        made = [nn.ModuleList(norm(width, eps=config.rms_norm_eps) for _ in range(layers)) for _ in range(3)]
        self.embedding_norms, self.hidden_norms, self.norms = made
        if family.norm == SHARED_NORM:
            self.norms = nn.ModuleList([self.target.model.norm])
        self.projections = nn.ModuleList(nn.Linear(2 * width, width, bias=False) for _ in range(layers))
        with torch.no_grad():
            for name, parameter in [*self.named_parameters(), *self.named_buffers()]:
                if name.startswith("target") or "rotary" in name:
                    continue
                plain = 0.0 if "norm" not in name or "Next" in norm.__name__ or "3_5" in norm.__name__ else 1.0
                scale = 0.2 if parameter.ndim == 1 else 1.5 * parameter.shape[-1] ** -0.5
                parameter.copy_(plain + scale * torch.randn_like(parameter))
        self.float().eval()

    def layer(self, number: int, tokens: Sequence[int], hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [n, V], states [n, H] after the last norm, and before it; row i has token i + 1 and state i."""
        embedded = self.target.get_input_embeddings()(torch.tensor([list(tokens)]))
        halves = self.embedding_norms[number](embedded), self.hidden_norms[number](hidden[None])
        x = self.projections[number](torch.cat(halves[::-1] if self.family.hidden_first else halves, -1))
        positions = torch.arange(len(tokens))[None]
        rotary = self.target.model.rotary_emb(x, positions)
        distance = positions.T - positions
        window = getattr(self.blocks[number].self_attn, "sliding_window", None) or len(tokens)
        mask = torch.zeros(distance.shape).masked_fill((distance < 0) | (distance >= window), -torch.inf)[None, None]
        out = self.blocks[number](x, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        out = out[0] if isinstance(out, tuple) else out
        normed = self.norms[number](out)
        return self.target.lm_head(normed)[0], normed[0], out[0]

    def tensors(self) -> dict[str, Tensor]:
        """The MTP layers by their names in a checkpoint."""
        tensors: dict[str, Tensor] = {}
        for n, block in enumerate(self.blocks):
            place = {"n": n, "m": len(self.target.model.layers) + n}
            family = self.family
            single = zip(
                (family.embedding_norm, family.hidden_norm, family.projection, family.norm),
                (self.embedding_norms[n], self.hidden_norms[n], self.projections[n], self.norms[n]),
                strict=True,
            )
            tensors |= {f"{name.format(**place)}.weight": module.weight for name, module in single}
            at = family.layer.format(**place)
            for name, tensor in block.state_dict().items():
                for own, stored in family.renamed:
                    name = name.replace(own, stored)
                tensors |= _by_expert(at + name, tensor)
        return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}

    def save(self, folder: Path) -> Path:
        """Writes the target with its MTP layers."""
        self.target.save_pretrained(folder)
        file = folder / "model.safetensors"
        save_file({**load_file(file), **self.tensors()}, file, metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        config["num_nextn_predict_layers"] = len(self.blocks)
        if self.family.model_type is not None:
            config["model_type"] = self.family.model_type
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    def forward(self, tokens: Sequence[int]) -> Any:
        """The target's hidden states, the last one after the final norm."""
        return self.target(torch.tensor([list(tokens)]), output_hidden_states=True)


def _by_expert(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Stacks of experts, as checkpoints have them: a matrix each."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: tensor}
    base, part = name.rsplit(".", 1)
    parts = {}
    for i, matrix in enumerate(tensor):
        if part == "down_proj":
            parts[f"{base}.{i}.down_proj.weight"] = matrix
        else:
            parts[f"{base}.{i}.gate_proj.weight"], parts[f"{base}.{i}.up_proj.weight"] = matrix.chunk(2)
    return parts
