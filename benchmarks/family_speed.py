"""Time of one decode step of each dense family on our runtime and through transformers.

    python benchmarks/family_speed.py [family ...]

Every family of the table is built with random weights at about 0.3 billion parameters, in bfloat16, saved, and loaded
twice: by the compiled runtime, as ``LLM`` loads it (weights in 12 bits where that is faster), and by the wrapper around
transformers' module. Steps of one row after 64 tokens alternate between the two. Families that the wrapper refuses have
no time for it.
"""

import gc
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any

import transformers
import typer
from rich.progress import track
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from foretoken.bench.costs import scoring
from foretoken.bench.measure import interleaved
from foretoken.bench.output import listing, report
from foretoken.core.errors import ForetokenError
from foretoken.models.families.table import FAMILIES
from foretoken.models.loading import load_model
from options import Output, Turns

PROMPT = 64
SIZES: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "intermediate_size": 4096,
}
COLUMNS = {
    "family": "{family}",
    "parameters, billions": "{billions:.2f}",
    "our runtime, ms": "{own:.1f}",
    "transformers, ms": "{wrapped:.1f}",
    "ratio": "{ratio:.1f}",
}


def config_of(family: str) -> Any:
    """Returns a configuration of about 0.3 billion parameters."""
    kind, row = CONFIG_MAPPING[family], FAMILIES[family]
    known = vars(kind())
    sizes = SIZES | {"num_hidden_layers": 15 if row.gated else 20}
    own: Mapping[str, str] = {name: alias for name, alias in row.aliases.items() if alias in known}
    chosen = {own.get(name, name): value for name, value in sizes.items() if own.get(name, name) in known}
    if family == "gpt_neo":
        chosen["attention_types"] = [[["global", "local"], chosen["num_layers"] // 2]]
    return kind(**chosen)


def record(family: str, turns: int) -> dict[str, Any]:
    """Returns a family's row of the table, with times in milliseconds."""
    module = AutoModelForCausalLM.from_config(config_of(family)).bfloat16()
    size = sum(parameter.numel() for parameter in module.parameters())
    with tempfile.TemporaryDirectory() as folder:
        module.save_pretrained(folder)
        del module
        gc.collect()
        models = {"own": load_model(folder, "bfloat16", "cpu", "native", weight_format="auto")}
        with suppress(ForetokenError):  # refused
            models["wrapped"] = load_model(folder, "bfloat16", "cpu", "hf")
        tasks = {name: scoring(each, [each.open(list(range(3, 3 + PROMPT)))], 1) for name, each in models.items()}
        times = {name: 1e3 * spread.median for name, spread in interleaved(tasks, turns).items()}
    result = {"family": family, "billions": size / 1e9, **times}
    return result | ({"ratio": times["wrapped"] / times["own"]} if "wrapped" in times else {})


def main(
    families: Annotated[list[str] | None, typer.Argument(help="Families of the table. [all]")] = None,
    turns: Turns = 15,
    output: Output = None,
) -> None:
    """Times steps of each family on our runtime and through transformers."""
    transformers.logging.set_verbosity_error()
    names = families or sorted(name for name in FAMILIES if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    records = [record(name, turns) for name in track(names, "families", transient=True)]
    report([listing(COLUMNS, records)], {}, output, families=records)


if __name__ == "__main__":
    typer.run(main)
