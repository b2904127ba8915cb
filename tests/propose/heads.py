"""An acceptance head of random weights in the folder that ``foretoken train acceptance`` would write."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def random_head(folder: Path, hidden: int, units: int = 4, scale: float = 0.5, **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    shapes = {"up.weight": (units, hidden + 3), "up.bias": (units,), "down.weight": (1, units), "down.bias": (1,)}
    save_file(
        {name: scale * torch.randn(*shape, generator=generator) for name, shape in shapes.items()},
        folder / "model.safetensors",
    )
    facts = {"model_type": "foretoken_acceptance", "hidden_size": hidden, "intermediate_size": units, **config}
    (folder / "config.json").write_text(json.dumps(facts))
    return folder
