"""Sampling parameters at a real vocabulary: milliseconds per token beside plain greedy decoding and beside its passes.

    make real && python benchmarks/vocabulary.py
    python benchmarks/vocabulary.py --model gemma3 --history 2000 --tokens 32 --output vocabulary.json

All cases take turns in one process. A time is the median over the repeats of the seconds between the first and the last
token; the pass is the target's part of the greedy case. With --history the prompt has that many tokens.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Annotated, Any

import torch
import typer

from foretoken import LLM, SamplingParams
from foretoken.bench.clock import Stopwatch
from foretoken.bench.output import figures, report
from foretoken.bench.setting import cores
from options import MODEL_HELP, Output, Repeats, model_path

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


def times(llm: LLM, passes: Stopwatch, prompt: list[int], options: dict[str, Any], tokens: int) -> tuple[float, float]:
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
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "smollm2",
    case: Annotated[
        list[str] | None, typer.Option(help="Only these cases (repeatable), beside the greedy one.")
    ] = None,
    history: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 100,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = 32,
    repeats: Repeats = 5,
    output: Output = None,
) -> None:
    """Milliseconds per token of each sampling parameter, beside plain greedy decoding in the same run."""
    torch.set_num_threads(cores())
    path = model_path(model)
    llm = LLM(str(path), methods=["recycling"])
    words: list[int] = llm.tokenizer(SENTENCE * (history // 8 + 1))["input_ids"]
    chosen = {name: CASES[name] for name in dict.fromkeys([PLAIN, *(case or CASES)])}
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in chosen}
    with Stopwatch([(llm.target, "score")]) as passes:
        for repeat in range(repeats + 1):
            for name, options in chosen.items():
                result = times(llm, passes, words[:history], options, tokens)
                if repeat:  # the first one fills caches
                    measured[name].append(result)
    plain = median(total for total, _ in measured[PLAIN])
    rows = []
    for name, results in measured.items():
        total, outside = median(t for t, _ in results), median(t - passed for t, passed in results)
        rows.append({"case": name, "ms": total, "over_greedy": total / plain, "outside_ms": outside})
    cells = [(row.pop("case"), *(f"{value:.2f}" for value in row.values())) for row in map(dict, rows)]
    table = figures(("parameter", "ms per token", "over greedy", "outside passes, ms"), cells)
    facts = {"model": path.name, "history": history, "tokens": tokens, "repeats": repeats}
    report([table], facts, output, rows=rows)


if __name__ == "__main__":
    typer.run(main)
