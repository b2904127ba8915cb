"""Model families of transformers: the runtime that serves each, speeds on both runtimes, and random checkpoints.

    python benchmarks/families.py > families.md
    python benchmarks/families.py speed llama gemma2
    python benchmarks/families.py write qwen3_moe FOLDER

Every family that transformers lists for causal language modelling is built as a tiny random model whose attention
windows are a few tokens long, and wrapped as a loaded checkpoint would be. A family is served if its logits in ragged
batches with draft trees equal its logits alone. Sizes and layers are those of the default configuration. The table is
Markdown; `docs/reference/families.md` has its summary.

speed: every dense family with random weights at about 0.3 billion parameters, in bfloat16, saved, and loaded twice: by
the compiled runtime, as ``LLM`` loads it (weights in 12 bits where that is faster), and by the wrapper around
transformers' module. Steps of one row after 64 tokens alternate between the two. Families that the wrapper refuses have
no time for it.

write: a mixture of experts of random weights, to time shapes of models that cannot be downloaded. The shapes are those
of Qwen3-30B-A3B and gpt-oss-20b with fewer and narrower layers, about 3 billion parameters in all, 6 GB in memory, and
the tokenizer is the bundled one.
"""

import gc
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from foretoken import zoo
from foretoken.bench.costs import scoring
from foretoken.bench.measure import interleaved
from foretoken.bench.output import listing, progress, report
from foretoken.core.errors import ForetokenError
from foretoken.models.decoder import Decoder
from foretoken.models.families.table import FAMILIES
from foretoken.models.formats.checkpoint import load_tokenizer
from foretoken.models.hf.model import HFModel
from foretoken.models.hf.probe import one_line
from foretoken.models.hf.tiny_random import boundaries, tiny_of
from foretoken.models.loading import load_model
from options import Output, Turns

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
# What published models have where a configuration's defaults are incomplete or of another kind.
COMPLETED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6, "n_routed_experts": 64},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "dots1": {"n_routed_experts": 64, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "n_shared_experts": 2},
}


PROMPT = 64  # tokens before a timed step
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


@dataclass(frozen=True)
class Family:
    """A row of the table. runtime: empty if the family is refused; reason: why it is."""

    name: str
    kind: str
    runtime: str
    reason: str

    def __str__(self) -> str:
        return f"| `{self.name}` | {self.kind} | {self.runtime or 'refused'} | {self.reason} |"


def family(name: str, kind: str) -> Family:
    """Builds a tiny model of the family and loads it."""
    try:
        config = CONFIG_MAPPING[name](**COMPLETED.get(name, {}))
        if hasattr(config, "is_decoder"):
            config.is_decoder = True
        if Decoder.supports({**config.to_dict(), "model_type": name}):
            return Family(name, kind, "own", "")
        module = tiny_of(getattr(transformers, kind), config, boundaries(config.get_text_config(), 1 << 30))
    except Exception as error:  # configurations whose defaults are inconsistent, or that need other packages
        return Family(name, kind, "not checked", one_line(error)[:120])
    if module is None:
        return Family(name, kind, "not checked", "no tiny model can be built from the default configuration")
    try:
        HFModel(module)
    except ForetokenError as error:
        return Family(name, kind, "", one_line(error).removeprefix(f"{kind} ").partition("; ")[0])
    return Family(name, kind, "transformers", "")


@app.callback(invoke_without_command=True)
def table(context: typer.Context) -> None:
    """Prints the runtime that serves each family."""
    transformers.logging.set_verbosity_error()
    if context.invoked_subcommand is not None:
        return
    print(f"transformers {transformers.__version__}\n\n| type | class | runtime | reason |\n|---|---|---|---|")
    names = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())
    for name, kind in progress(names, "families"):
        print(family(name, kind), flush=True)


def save(config: Any, folder: Path | str) -> int:
    """Writes a checkpoint of random weights in bfloat16. Returns its number of parameters."""
    module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    module.save_pretrained(folder)
    return int(module.num_parameters())


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
    with tempfile.TemporaryDirectory() as folder:
        size = save(config_of(family), folder)
        gc.collect()
        models = {"own": load_model(folder, "bfloat16", "cpu", "native", weight_format="auto")}
        with suppress(ForetokenError):  # refused
            models["wrapped"] = load_model(folder, "bfloat16", "cpu", "hf")
        tasks = {name: scoring(each, [each.open(list(range(3, 3 + PROMPT)))], 1) for name, each in models.items()}
        times = {name: 1e3 * spread.median for name, spread in interleaved(tasks, turns).items()}
    result = {"family": family, "billions": size / 1e9, **times}
    return result | ({"ratio": times["wrapped"] / times["own"]} if "wrapped" in times else {})


@app.command()
def speed(
    families: Annotated[list[str] | None, typer.Argument(help="Families of the table. [all]")] = None,
    turns: Turns = 15,
    output: Output = None,
) -> None:
    """Times steps of each family on our runtime and through transformers."""
    names = families or sorted(name for name in FAMILIES if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    records = [record(name, turns) for name in progress(names, "families")]
    report([listing(COLUMNS, records)], {}, output, families=records)


def write_experts(kind: str, folder: Path, **changes: Any) -> int:
    """Writes a mixture of experts, with ``changes`` to its shape. Returns its number of parameters."""
    tokenizer = load_tokenizer(zoo.path("target"))
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 4096}
    tokenizer.save_pretrained(folder)
    return save(AutoConfig.for_model(kind, **SHAPES[kind] | sizes | ids | changes), folder)


@app.command()
def write(
    kind: Annotated[str, typer.Argument(help=f"{' or '.join(SHAPES)}.")],
    folder: Annotated[Path, typer.Argument(help="Folder to write.")],
) -> None:
    """Writes a mixture of experts of random weights."""
    if kind not in SHAPES:
        raise typer.BadParameter(f"{kind!r} is not known; expected {' or '.join(SHAPES)}")
    print(f"{write_experts(kind, folder):,} parameters")


if __name__ == "__main__":
    app()
