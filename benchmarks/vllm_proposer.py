"""Our proposers inside vLLM: is the greedy text the same, and how many tokens per pass do they give?

    python benchmarks/vllm_proposer.py --output vllm_proposer.json

vLLM's CPU build (`make peers`) in float32, with the bundled target. Two kinds of prompts: functions to complete, and
the same after their own text, to be repeated. Texts are compared, token for token, with vLLM's without speculation. In
bf16 (`--dtype bfloat16`) vLLM's own passes over one row and over several round differently, so texts may diverge with
any proposer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track

from foretoken import zoo
from foretoken.bench.output import listing, report
from foretoken.bench.peers.protocol import Answer, PeerRequest
from foretoken.bench.workloads import prompts_or_functions
from foretoken.cli.plan_vllm import OURS
from foretoken.models.formats.checkpoint import load_tokenizer
from foretoken.plan.vllm import Bench, PromptCompleter, VllmCandidate
from options import Output, Prompts

METHODS: tuple[Mapping[str, Any], ...] = (
    {"method": "suffix"},
    {"method": "recycling"},
    {"method": "prediction"},
    {"method": "mixture"},
)
COLUMNS = {
    "proposer": "{method}",
    "prompts": "{kind}",
    "equal": "{equal} of {texts}",
    "tokens/pass": "{tokens_per_pass:.2f}",
    "step / plain": "{step_over_plain:.2f}",
    "speedup": "{speedup:.2f}x",
}
KINDS = ("write", "rewrite")
Ids = list[int]


def ask_all(
    asked: PromptCompleter, prompts: Sequence[Ids], depth: int, max_tokens: int, batch: int, what: str
) -> list[Answer]:
    """Completes all prompts after a warm-up request, whose text is not kept in any store."""
    asked.answer(PeerRequest([prompts[0]], 8, depth=depth))
    asked.answer(PeerRequest([], 0, depth=depth))
    groups = [list(prompts[i : i + batch]) for i in range(0, len(prompts), batch)]
    return [asked.answer(PeerRequest(group, max_tokens, depth=depth)) for group in track(groups, what)]


def texts(answers: Sequence[Answer]) -> list[Ids]:
    """Returns the token ids of all completions."""
    return [text for answer in answers for text in answer.tokens]


def line(method: str, kind: str, plain: Sequence[Answer], own: Sequence[Answer]) -> dict[str, Any]:
    """Returns the result of one method beside plain decoding. equal: equal texts. step_over_plain: of step times."""

    def mean(answers: Sequence[Answer]) -> float:
        seconds = [each for answer in answers for each in answer.step_seconds]
        return sum(seconds) / len(seconds)

    equal = sum(a == b for a, b in zip(texts(plain), texts(own), strict=True))
    tokens = sum(len(text) - 1 for text in texts(own))
    passes = sum(passes for answer in own for passes in answer.passes_each)
    ratio, result = mean(own) / mean(plain), {"method": method, "kind": kind, "equal": equal, "texts": len(texts(own))}
    return result | {"tokens_per_pass": tokens / passes, "step_over_plain": ratio, "speedup": tokens / passes / ratio}


def main(
    prompts: Prompts = None,
    count: Annotated[int, typer.Option(min=1)] = 8,
    max_tokens: Annotated[int, typer.Option(min=8)] = 96,
    depth: Annotated[int, typer.Option(min=1)] = 8,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    dtype: Annotated[str, typer.Option()] = "float32",
    python: Annotated[Path | None, typer.Option(help="Of vLLM's environment.")] = None,
    engine_args: Annotated[str, typer.Option(metavar="JSON", help="Further arguments of vllm.LLM.")] = "{}",
    output: Output = None,
) -> None:
    """Compares texts and tokens per pass; the exit code is 1 if a text differs."""
    target = zoo.path("target")
    tokenizer = load_tokenizer(target)
    write = [list(tokenizer.encode(text)) for text in prompts_or_functions(prompts, count)]
    engine = {"dtype": dtype} | json.loads(engine_args)
    bench = Bench(target=str(target), max_tokens=max_tokens, batches=(batch,), python=python, engine=engine)
    plain_process = bench.start(None)
    try:
        written = texts(ask_all(plain_process, write, 0, 2 * max_tokens, 1, "plain, the functions"))
        gap = list(tokenizer.encode("\n\n\n", add_special_tokens=False))
        asked = {"write": write, "rewrite": [p + w + gap + p for p, w in zip(write, written, strict=True)]}
        plain = {kind: ask_all(plain_process, asked[kind], 0, max_tokens, batch, f"plain {kind}") for kind in KINDS}
    finally:
        plain_process.close()
    lines = []
    for options in METHODS:
        config = {"method": "custom_class", "model": OURS, "num_speculative_tokens": depth}
        process = bench.start(VllmCandidate.of(config, options["method"], {"foretoken": options}))
        try:
            for kind in KINDS:
                own = ask_all(process, asked[kind], depth, max_tokens, batch, f"{options['method']} {kind}")
                lines.append(line(options["method"], kind, plain[kind], own))
        finally:
            process.close()
    report(
        [listing(COLUMNS, lines)],
        {"target": target.name, "dtype": dtype, "depth": depth, "max_tokens": max_tokens, "batch": batch},
        output,
        rows=lines,
    )
    raise typer.Exit(any(each["equal"] < each["texts"] for each in lines))


if __name__ == "__main__":
    typer.run(main)
