"""Random LoRA adapters in PEFT's format, written without PEFT, and checkpoints with one merged in."""

import json
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretoken.models.base import Model

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def load_adapter(model: Model, name: str, folder: Path) -> None:
    """Reads an adapter and adds it to a model."""
    model.add_adapter(name, model.read_adapter(folder))


def save_adapter(
    folder: Path, model: Path, targets: Sequence[str], rank: int = 4, seed: int = 0, size: float = 0.2, **settings: Any
) -> Path:
    """Saves a random adapter on the modules of a checkpoint whose names end with one of ``targets``.

    Args:
        folder: is made.
        model: the checkpoint, in one file.
        targets: last parts of names; of experts that are stored in one tensor also ``gate_up_proj``.
        rank: rank of all modules.
        seed: of the numbers.
        size: their standard deviation.
        settings: further fields of adapter_config.json.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    stacks: list[str] = []
    for name, weight in sorted(load_file(model / "model.safetensors").items()):
        module = name.removesuffix(".weight")
        if (
            weight.ndim > 1
            and not name.startswith("mtp.")
            and module.endswith(tuple(f".{target}" for target in targets))
        ):
            *experts, rows, columns = weight.shape
            whole = math.prod(experts) * rank
            if experts:  # PEFT nests the modules of a module's parameters in the order of their names
                stacks.append(name)
                module = module.rpartition(".")[0] + ".base_layer" * module.endswith("gate_up_proj")
            for part, shape in (("A", (whole, columns)), ("B", (rows, whole))):
                tensors[f"base_model.model.{module}.lora_{part}.weight"] = (
                    torch.randn(*shape, generator=generator) * size
                )
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config: dict[str, Any] = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets)}
    if stacks:
        config |= {"target_parameters": stacks, "peft_version": "0.19.0"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, **settings}), encoding="utf-8")
    return folder


def merge(model: Path, adapter: Path, folder: Path) -> Path:
    """Saves a copy of a checkpoint with an adapter of ``save_adapter`` added to its weights."""
    shutil.copytree(model, folder)
    weights = load_file(model / "model.safetensors")
    for name, down in load_file(adapter / "adapter_model.safetensors").items():
        if (found := re.fullmatch(r"base_model\.model\.(.+)\.lora_A\.weight", name)) is not None:
            up = load_file(adapter / "adapter_model.safetensors")[name.replace("lora_A", "lora_B")]
            weights[f"{found[1]}.weight"] += 2 * up @ down
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
