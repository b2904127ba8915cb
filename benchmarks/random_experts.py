"""Writes a mixture of experts of random weights, to time shapes of models that cannot be downloaded.

    python benchmarks/random_experts.py qwen3_moe FOLDER
    foretoken bench race --target FOLDER --quantization Q4_0 --peers llamacpp --draft DRAFT --depth 2

The shapes are those of Qwen3-30B-A3B and gpt-oss-20b with fewer and narrower layers, about 3 billion parameters in all,
and the tokenizer is the bundled one. The whole model is in memory while it is written, 6 GB in bfloat16.
"""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoConfig, AutoModelForCausalLM

from foretoken import zoo
from foretoken.models.formats.checkpoint import load_tokenizer

STANDARD_DEVIATION = 0.02
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "hidden_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 384,
        "intermediate_size": 384,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "gpt_oss": {
        "hidden_size": 1536,
        "num_hidden_layers": 12,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "intermediate_size": 1536,
        "layer_types": ["sliding_attention", "full_attention"] * 6,
        "tie_word_embeddings": False,
    },
}


def write(kind: str, folder: Path, **changes: Any) -> int:
    """Writes the checkpoint, as transformers saves it, and returns its number of parameters.

    kind: one of ``SHAPES``. changes: fields of the configuration in place of the shape's.
    """
    tokenizer = load_tokenizer(zoo.path("target"))
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    shape = SHAPES[kind] | {"vocab_size": len(tokenizer), "max_position_embeddings": 4096, **ids} | changes
    with torch.device("meta"):
        config = AutoConfig.for_model(kind, **shape)
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    module = module.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim == 1 and "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, STANDARD_DEVIATION, generator=generator)
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return int(module.num_parameters())


def main(
    kind: Annotated[str, typer.Argument(help=f"{' or '.join(SHAPES)}.")],
    folder: Annotated[Path, typer.Argument(help="Folder to write.")],
) -> None:
    """Writes a mixture of experts of random weights."""
    if kind not in SHAPES:
        raise typer.BadParameter(f"{kind!r} is not known; expected {' or '.join(SHAPES)}")
    print(f"{write(kind, folder):,} parameters")


if __name__ == "__main__":
    typer.run(main)
