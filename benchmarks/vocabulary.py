"""Sampling parameters at a real vocabulary: milliseconds per token beside plain greedy decoding and beside its passes.

    make real && python benchmarks/vocabulary.py
    python benchmarks/vocabulary.py --model gemma3 --history 2000 --tokens 32 --output vocabulary.json

All cases take turns in one process. A time is the median over the repeats of the seconds between the first and the last
token; the pass is the target's part of the greedy case. With --history the prompt has that many tokens.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.table import Table

from foretoken import LLM, SamplingParams
from foretoken.bench.setting import cores, setting, wide_console
from foretoken.zoo.real import REAL_MODELS, real_model_path

PLAIN = "greedy"
CASES: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "temperature": {"temperature": 1.0},
    "temperature, seed": {"temperature": 1.0, "seed": 1},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "top_k": {"temperature": 1.0, "top_k": 40},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "presence_penalty": {"presence_penalty": 0.5},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "logit_bias": {"logit_bias": {5: 1.0}},
    "bad_words": {"bad_words": ["never"]},
    "min_tokens": {"min_tokens": 2, "stop_token_ids": [0, 2]},
    "allowed_token_ids": {"allowed_token_ids": list(range(0, 4_000, 2))},
    "regex": {"structured_outputs": {"regex": "(.|\n)*"}, "ignore_eos": False},
    "logprobs 5": {"logprobs": 5},
    "logprobs 20": {"logprobs": 20},
    "recycling, idle": {"speculative_method": "recycling"},
}
SENTENCE = "The harbour was quiet that morning, and the men who had been out on the boats sat on the wall. "


class TimedPasses:
    """Sums the seconds of a target's passes."""

    def __init__(self, target: Any) -> None:
        self.seconds, self._score = 0.0, target.score
        target.score = self

    def __call__(self, *args: Any) -> Any:
        started = time.perf_counter()
        scores = self._score(*args)
        self.seconds += time.perf_counter() - started
        return scores


def times(
    llm: LLM, passes: TimedPasses, prompt: list[int], options: dict[str, Any], tokens: int
) -> tuple[float, float]:
    """Returns the milliseconds per token behind the first one, and those of them that the target's passes take."""
    common = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, "speculative_tokens": 0}
    started, count, before = 0.0, 0, 0.0
    for piece in llm.stream(prompt, SamplingParams(**common | options)):
        if not count:
            started, before = time.perf_counter(), passes.seconds
        count += len(piece.token_ids)
    steps = max(1, count - 1)
    return (time.perf_counter() - started) / steps * 1e3, (passes.seconds - before) / steps * 1e3


def main(
    model: Annotated[
        str, typer.Option(help=f"A folder, a GGUF file, or one of: {', '.join(REAL_MODELS)}.")
    ] = "smollm2",
    case: Annotated[
        list[str] | None, typer.Option(help="Only these cases (repeatable), beside the greedy one.")
    ] = None,
    history: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 100,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = 32,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    json_file: Annotated[Path | None, typer.Option("--output", help="Write setting and rows here.")] = None,
) -> None:
    """Milliseconds per token of each sampling parameter, beside plain greedy decoding in the same run."""
    torch.set_num_threads(cores())
    path = real_model_path(model) if model in REAL_MODELS else Path(model)
    llm = LLM(str(path), methods=["recycling"])
    passes = TimedPasses(llm.target)
    words: list[int] = llm.tokenizer(SENTENCE * (history // 8 + 1))["input_ids"]
    prompt = words[:history]
    chosen = {name: CASES[name] for name in dict.fromkeys([PLAIN, *(case or CASES)])}
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in chosen}
    for repeat in range(repeats + 1):
        for name, options in chosen.items():
            result = times(llm, passes, prompt, options, tokens)
            if repeat:  # the first one fills caches
                measured[name].append(result)
    plain = median(total for total, _ in measured[PLAIN])
    table = Table(box=box.MARKDOWN)
    for column in ("parameter", "ms per token", "over greedy", "outside passes, ms"):
        table.add_column(column, justify="left" if column == "parameter" else "right")
    rows = []
    for name, results in measured.items():
        total, outside = median(t for t, _ in results), median(t - passed for t, passed in results)
        rows.append({"case": name, "ms": total, "over_greedy": total / plain, "outside_ms": outside})
        table.add_row(name, f"{total:.2f}", f"{total / plain:.2f}", f"{outside:.2f}")
    console = wide_console()
    console.print(table)
    facts = setting() | {"model": path.name, "history": history, "tokens": tokens, "repeats": repeats}
    console.print(", ".join(f"{key} {value}" for key, value in facts.items()), style="dim")
    if json_file is not None:
        json_file.write_text(json.dumps({"setting": facts, "rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
