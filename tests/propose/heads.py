"""Random acceptance heads on disk, and the texts of heads against those of plain decoding."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from foretoken import LLM, SamplingParams

PROMPTS = ["def greet(name):", "class", "for i in range(10):\n    print(", "x", "€", "1", "if", "import os\n"]


def check_texts(llm: LLM, plain: LLM, temperature: float) -> None:
    """Each prompt is drafted for, alone and in a batch, and has the text of plain decoding."""
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=11, ignore_eos=True)
    expected = [o.outputs[0].token_ids for o in plain.generate(PROMPTS, params)]
    outputs = llm.generate(PROMPTS, params)
    assert [o.outputs[0].token_ids for o in outputs] == expected
    assert all(o.outputs[0].stats.drafted > 0 for o in outputs)
    assert llm.generate(PROMPTS[2], params)[0].outputs[0].token_ids == expected[2]


def random_head(folder: Path, hidden: int, units: int = 4, scale: float = 0.5, **config: object) -> Path:
    """Writes an acceptance head as ``foretoken train acceptance`` does."""
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
