"""Long contexts: what attention costs beside reading its KV cache, what a long prompt takes, and what int8 costs.

    python benchmarks/long_context.py                                       # attention and loss
    python benchmarks/long_context.py --part prefill --cache int8           # a whole prompt; minutes

Attention is timed alone: a decoder has the attention of the target (its layers, heads and head size) and little else,
and a pass behind a few tokens is subtracted from one behind many. Its cache is filled by passes whose rows see one key,
because the time of a pass depends on how many keys there are and not on what they hold. The prompt is computed by the
target itself; ask for one cache, so that the most memory is that of this cache. Loss and total variation are those of
the target with each cache, on held-out text, from the one with bfloat16.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from foretoken import zoo
from foretoken.bench.costs import chain
from foretoken.bench.measure import TimedTask, interleaved
from foretoken.bench.output import cores, listing, memory, report
from foretoken.core.draft import Draft
from foretoken.models.base import Handle
from foretoken.models.decoder import Decoder
from foretoken.models.families.architecture import Architecture
from foretoken.models.formats.checkpoint import load_config, open_weights
from foretoken.models.formats.layers import Layers, Source, read_ends
from foretoken.models.loading import load_model
from foretoken.models.runners.native.bindings import BatchSpec
from foretoken.models.runners.native.runner import NativeRunner
from foretoken.models.runners.pass_plan import PassPlan
from options import Output, Rows, Target, Turns, target_path
from quantization import distance, held_out_windows, logits
from systems import Floors

CACHES = ("bfloat16", "int8")
COLUMNS = {
    "attention": {  # of a pass, less that behind a few tokens, and of reading as many bytes alone
        "cache": "{cache}",
        "context": "{context}",
        "rows": "{rows}",
        "KV, MB": "{kv_megabytes:.0f}",
        "attention, ms": "{milliseconds:.1f}",
        "reading, ms": "{read:.1f}",
        "ratio": "{over_read:.2f}",
    },
    "prefill": {
        "cache": "{cache}",
        "prompt": "{tokens}",
        "seconds": "{seconds:.1f}",
        "tokens/s": "{speed:.0f}",
        "KV, MB": "{kv_megabytes:.0f}",
        "peak, MB": "{peak_megabytes:.0f}",
        "loaded, MB": "{before_megabytes:.0f}",
    },
    "loss": {"cache": "{cache}", "loss": "{loss:.4f}", "total variation": "{total_variation:.5f}"},
}
Records = list[dict[str, Any]]
NARROW, VOCAB, CHUNK, SHORT = 64, 256, 256, 64  # hidden size, vocabulary, rows of a pass that fills, a short context


class FillingRunner(NativeRunner):
    """A runner whose rows see one key while it fills its cache."""

    filling = True

    def _batch(self, plan: PassPlan, further: Sequence[int] | None = None) -> BatchSpec:
        batch = super()._batch(plan, further)
        if self.filling:
            batch.hold(prefix=array("i", [1]) * len(plan.tokens))
        return batch


def attention_alone(config: dict[str, Any], cache: str) -> FillingRunner:
    """Returns a decoder with random weights that has the attention of ``config`` and is narrow elsewhere."""
    narrow = config | {
        "hidden_size": NARROW,
        "intermediate_size": NARROW,
        "vocab_size": VOCAB,
        "tie_word_embeddings": True,
    }
    narrow |= {"max_position_embeddings": 1 << 20}
    a = Architecture.of(narrow)
    source = Source(random_weights(a), a, torch.bfloat16, None)
    return FillingRunner(a, Layers(source), read_ends(source), torch.bfloat16, kv_cache_dtype=cache)


def random_weights(a: Architecture) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.1

    weights = {"model.embed_tokens.weight": random(VOCAB, NARROW), "model.norm.weight": torch.ones(NARROW)}
    for layer in range(a.layers):
        at, width, kv_width = f"model.layers.{layer}.", a.heads * a.head_dim, a.kv_heads * a.head_dim
        weights |= {
            at + name: torch.ones(NARROW) for name in ("input_layernorm.weight", "post_attention_layernorm.weight")
        }
        weights |= {f"{at}mlp.{name}_proj.weight": random(NARROW, NARROW) for name in ("gate", "up", "down")}
        weights |= {f"{at}self_attn.{name}_proj.weight": random(kv_width, NARROW) for name in "kv"}
        weights |= {
            f"{at}self_attn.q_proj.weight": random(width, NARROW),
            f"{at}self_attn.o_proj.weight": random(NARROW, width),
        }
    return weights


def tokens_of(count: int) -> list[int]:
    return [(7 * i) % (VOCAB - 1) + 1 for i in range(count)]


def filled(runner: FillingRunner, context: int) -> Handle:
    """Returns a sequence with one token left to compute, whose cache is full of numbers that no attention made."""
    tokens, runner.filling = tokens_of(context), True
    slot, _ = runner.acquire(tokens)
    handle = Handle(slot, tokens)
    while len(handle.pending) > 1:
        rows = min(CHUNK, len(handle.pending) - 1)
        part = Handle(slot, tokens[: handle.cached + rows], handle.cached)
        runner.run(PassPlan.of([part], [Draft.empty()], [0]), (), logits=False)
        handle.cached += rows
    runner.filling = False
    return handle


def one_pass(runner: NativeRunner, plan: PassPlan) -> None:
    runner.run(plan, (), logits=True)


def attention_times(
    config: dict[str, Any], caches: Sequence[str], contexts: Sequence[int], rows: Sequence[int], turns: int
) -> Records:
    """Times passes of all caches, contexts and rows in rotating order, and reading as many bytes."""
    runners = {cache: attention_alone(config, cache) for cache in caches}
    size = {(cache, context): runners[cache].kv_bytes_per_token * context for cache in caches for context in contexts}
    floors = Floors(max(size.values()))
    tasks: dict[tuple[str, str, int, int], TimedTask] = {}
    for cache, runner in runners.items():
        for context in (SHORT, *contexts):
            handle = filled(runner, context)
            for count in rows:
                plan = PassPlan.of([handle], [chain(count)], [0])
                tasks["pass", cache, context, count] = TimedTask(partial(one_pass, runner, plan))
            if context in contexts:
                tasks["read", cache, context, 0] = floors.reading(size[cache, context])
    times = {key: 1000 * spread.median for key, spread in interleaved(tasks, turns).items()}
    records = []
    for cache, context, count in product(caches, contexts, rows):
        own, read = (
            times["pass", cache, context, count] - times["pass", cache, SHORT, count],
            times["read", cache, context, 0],
        )
        record = {"cache": cache, "context": context, "rows": count, "kv_megabytes": size[cache, context] / 1e6}
        records.append(record | {"milliseconds": own, "read": read, "over_read": own / read})
    return records


def prefill(target: Path, cache: str, tokens: int) -> dict[str, Any]:
    """Computes a prompt of the target. Returns its seconds and memory: the most of the process, and that before it."""
    config = load_config(target) | {"max_position_embeddings": tokens + 1}
    weights = open_weights(target)
    model = Decoder(config, weights, torch.bfloat16, torch.device("cpu"), kv_cache_dtype=cache)
    before = memory("VmHWM")
    handle = model.open([i % (config["vocab_size"] - 1) + 1 for i in range(tokens)])
    started = perf_counter()
    model.score([handle], [Draft.empty()])
    seconds = perf_counter() - started
    sizes = {"kv": model.runner.nbytes(), "peak": memory("VmHWM"), "before": before}
    record = {"cache": cache, "tokens": tokens, "seconds": seconds, "speed": tokens / seconds}
    return record | {f"{name}_megabytes": size / 1e6 for name, size in sizes.items()}


def losses(caches: Sequence[str], windows: int) -> Records:
    """Compares the bundled target with each cache on held-out text: loss, and total variation from bfloat16."""
    path = zoo.path("target")
    held_out = held_out_windows(path, windows)
    exact = list(logits(load_model(path, "bfloat16", "cpu"), held_out))
    models = {cache: load_model(path, "bfloat16", "cpu", kv_cache_dtype=cache) for cache in caches}
    apart = {cache: distance(model, held_out, exact) for cache, model in models.items()}
    return [{"cache": cache, "loss": loss, "total_variation": change} for cache, (loss, change) in apart.items()]


def main(
    target: Target = None,
    part: Annotated[list[str], typer.Option(help=f"{', '.join(COLUMNS)}; may be repeated.")] = ["attention", "loss"],
    cache: Annotated[list[str], typer.Option(help="bfloat16 or int8; may be repeated.")] = [*CACHES],
    context: Annotated[list[int], typer.Option(min=1, help="May be repeated.")] = [4096, 16384, 32768],
    rows: Rows = [1, 8],
    turns: Turns = 15,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 32768,
    windows: Annotated[int, typer.Option(min=1, help="Held-out windows of 512 tokens.")] = 40,
    output: Output = None,
) -> None:
    """Time attention over long contexts and the prefill of a long prompt, and compare the caches' accuracy."""
    torch.set_num_threads(cores())
    where = target_path(target)
    parts: dict[str, Records] = {
        "prefill": [prefill(where, each, prompt) for each in cache] if "prefill" in part else [],
        "attention": attention_times(load_config(where), cache, context, rows, turns) if "attention" in part else [],
        "loss": losses(cache, windows) if "loss" in part else [],
    }
    tables = [listing(COLUMNS[name], records) for name, records in parts.items() if records]
    attention, prefills, accuracy = (parts[name] for name in COLUMNS)
    report(tables, {"target": where.name}, output, attention=attention, prefill=prefills, loss=accuracy)


if __name__ == "__main__":
    typer.run(main)
