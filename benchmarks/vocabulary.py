"""Sampling parameters at a real vocabulary: milliseconds per step beside plain greedy decoding and beside its passes.

    make real && python benchmarks/vocabulary.py
    python benchmarks/vocabulary.py --model gemma3 --pairs --steps 100 --output vocabulary.json
    python benchmarks/vocabulary.py --history 8000 --case repetition_penalty --busy 2

Each case has one sequence in an engine of its own, all on one model, and they take turns step by step, so that whatever
else the machine does meets all alike. A ratio is the median over the rounds of a time over the greedy one in the same
round. With --history each prompt has that many tokens. With --busy that many other processes compute meanwhile.
"""

from itertools import combinations
from statistics import median
from typing import Annotated, Any

import torch
import typer

from foretoken import LLM, SamplingParams
from foretoken.bench.measure import Stopwatch
from foretoken.bench.output import busy_programs, cores, listing, report
from options import MODEL_HELP, Output, model_path
from systems import System, Workload, engine_on

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
PAIRED = [
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "repetition_penalty", "logit_bias", "bad_words"),
    *("min_tokens", "allowed_token_ids", "logprobs 5"),
]
SENTENCE = "The harbour was quiet that morning, and the men who had been out on the boats sat on the wall. "


class Case(System):
    """One sequence in an engine of its own.

    Attributes:
        totals: Milliseconds of each step.
        outside: Of these, those outside the target's pass.
    """

    def __init__(self, llm: LLM, prompt: list[int], options: dict[str, Any], steps: int) -> None:
        super().__init__(llm, engine_on(llm.target, llm))
        plain = {"temperature": 0.0, "ignore_eos": True, "speculative_tokens": 0}
        self.add(Workload("", [prompt], SamplingParams(**plain | options, max_tokens=steps)))
        self.totals: list[float] = []
        self.outside: list[float] = []

    def step(self, passes: Stopwatch) -> None:
        """Runs a step and records its times."""
        before, total = passes.seconds, self.advance(1).seconds
        self.totals.append(total * 1e3)
        self.outside.append((total - passes.seconds + before) * 1e3)


def chosen_cases(names: list[str] | None, pairs: bool) -> dict[str, dict[str, Any]]:
    """Returns the options of each case, the greedy one first."""
    chosen = {name: CASES[name] for name in dict.fromkeys([PLAIN, *(names or CASES)])}
    for one, other in combinations([name for name in PAIRED if name in chosen], 2) if pairs else ():
        chosen[f"{one} + {other}"] = CASES[one] | CASES[other]
    return chosen


def main(
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "smollm2",
    case: Annotated[
        list[str] | None, typer.Option(help="Only these cases (repeatable), beside the greedy one.")
    ] = None,
    pairs: Annotated[bool, typer.Option("--pairs", help="Add each pair of parameters.")] = False,
    history: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 100,
    steps: Annotated[int, typer.Option(min=2, help="Steps of each case.")] = 100,
    busy: Annotated[int, typer.Option(min=0, help="Other processes that keep the processor busy.")] = 0,
    output: Output = None,
) -> None:
    """Milliseconds per step of each sampling parameter, beside plain greedy decoding in the same rounds."""
    torch.set_num_threads(cores())
    path = model_path(model)
    llm = LLM(str(path), methods=["recycling"])
    words: list[int] = llm.tokenizer(SENTENCE * (history // 8 + 1))["input_ids"]
    warm = 2  # steps that compute the prompt and fill caches
    chosen = chosen_cases(case, pairs).items()
    cases = {name: Case(llm, words[:history], options, steps + warm) for name, options in chosen}
    with Stopwatch([(llm.target, "score")]) as passes, busy_programs(busy):
        for _ in range(steps + warm):
            for each in cases.values():
                each.step(passes)
    rows, plain = [], cases[PLAIN].totals[warm:]
    for name, each in cases.items():
        ratio = median(total / greedy for total, greedy in zip(each.totals[warm:], plain, strict=True))
        total, outside = median(each.totals[warm:]), median(each.outside[warm:])
        rows.append({"case": name, "ms": total, "over_greedy": ratio, "outside_ms": outside})
    heads = {"parameter": "{case}", "ms per step": "{ms:.3f}", "over greedy": "{over_greedy:.3f}"}
    table = listing(heads | {"outside passes, ms": "{outside_ms:.3f}"}, rows)
    report([table], {"model": path.name, "history": history, "steps": steps, "busy": busy}, output, rows=rows)


if __name__ == "__main__":
    typer.run(main)
