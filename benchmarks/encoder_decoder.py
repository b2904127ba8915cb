"""An encoder-decoder that repairs code: plain, speculative, and transformers, interleaved in one process.

Tokens per second from the prompt to the last token, the encoder's pass included. Every system generates as many tokens
as the expected output has, so that none is faster by ending early. Only ours has batches of 8: transformers drafts for
one sequence. Beside them, passes of the decoder alone and their lower bound: the same matrix products alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from rich.table import Table

from foretoken import LLM, SamplingParams, zoo
from foretoken.bench import tables
from foretoken.bench.clock import TimedTask, interleaved
from foretoken.bench.costs import Loaded, pass_costs
from foretoken.bench.output import figures, report
from foretoken.bench.setting import cores
from foretoken.bench.workloads import Repair, repairs
from foretoken.costs.measured import TimeSpread
from foretoken.models.formats.checkpoint import load_config, resolve
from foretoken.train.widen.checkpoint import scaled
from options import Output

Texts = list[tuple[int, ...]]
OWN = ("none", "draft_model", "ngram", "prediction", "mixture")


@dataclass(frozen=True)
class Row:
    """Result of one system. seconds: for all tasks. identical_to_plain: texts equal to its own plain decoding."""

    system: str
    method: str
    num_speculative_tokens: int
    batch: int
    tokens: int
    seconds: TimeSpread
    tokens_per_pass: float
    identical_to_plain: int

    @property
    def rate(self) -> float:
        """Returns tokens per second."""
        return self.tokens / self.seconds.median


class Own:
    """Foretoken: one target with every method."""

    def __init__(self, target: Path, draft: Path, max_depth: int, dtype: str, quantization: str | None) -> None:
        drafts = {"method": "draft_model", "model": str(draft)}
        self.llm = LLM(
            target,
            speculative_config={**drafts, "num_speculative_tokens": max_depth},
            methods=["ngram", "prediction", {"method": "mixture", "members": [drafts, {"method": "prediction"}]}],
            dtype=dtype,
            quantization=quantization,
        )

    def write(
        self, method: str, depth: int, batch: int, tasks: list[Repair], temperature: float
    ) -> tuple[Texts, float]:
        """Completes all tasks. Returns the texts, and tokens per pass."""
        texts, passes = [], 0
        for start in range(0, len(tasks), batch):
            some = tasks[start : start + batch]
            params = [
                SamplingParams(
                    max_tokens=task.length,
                    temperature=temperature,
                    ignore_eos=True,
                    seed=start + i,
                    speculative_method=method if depth else None,
                    speculative_tokens=depth,
                )
                for i, task in enumerate(some)
            ]
            for output in self.llm.generate([list(task.source) for task in some], params):
                texts.append(output.outputs[0].token_ids)
                passes += output.stats.steps
        return texts, sum(map(len, texts)) / passes


class Theirs:
    """transformers' ``generate``, plain and with an assistant model, as its documentation recommends."""

    def __init__(self, target: Path, draft: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForSeq2SeqLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self.target, self.draft = (
            AutoModelForSeq2SeqLM.from_pretrained(path, dtype=dtype).eval() for path in (target, draft)
        )
        for model in (self.target, self.draft):
            model.generation_config.eos_token_id = None
            model.generation_config.pad_token_id = 0
        own = self.draft.generation_config
        own.num_assistant_tokens_schedule, own.assistant_confidence_threshold, own.top_k = "constant", 0.0, 0

    def write(
        self, method: str, depth: int, batch: int, tasks: list[Repair], temperature: float
    ) -> tuple[Texts, float]:
        """Completes all tasks. Returns the texts, and tokens per pass."""
        options: dict[str, Any] = {"do_sample": False}
        if temperature:
            options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if method != "none":
            self.draft.generation_config.num_assistant_tokens = depth
            options["assistant_model"] = self.draft
        texts, passes = [], 0

        def count(*_: Any) -> None:
            nonlocal passes
            passes += 1

        hook = self.target.decoder.register_forward_hook(count)
        try:
            for task in tasks:
                ids = torch.tensor([task.source])
                out = self.target.generate(
                    input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=task.length, **options
                )
                texts.append(tuple(out[0, 1:].tolist()))
        finally:
            hook.remove()
        return texts, sum(map(len, texts)) / passes


def table(rows: list[Row]) -> Table:
    """Returns a table with a line for each system."""
    plain = {(row.system, row.batch): row.rate for row in rows if row.method == "none"}
    lines = []
    for row in rows:
        name = row.method if row.method == "none" else f"{row.method}, {row.num_speculative_tokens}"
        low, high = row.tokens / row.seconds.high, row.tokens / row.seconds.low
        ratio = row.rate / plain[row.system, row.batch]
        speed = (f"{row.rate:.1f}", f"{low:.1f}-{high:.1f}", f"{ratio:.2f}", f"{row.tokens_per_pass:.2f}")
        lines.append((f"{row.system}, {name}", row.batch, *speed, row.identical_to_plain))
    return figures(
        ("system", "batch", "tokens/s", "low-high", "own plain = 1", "tokens a pass", "texts as plain"), lines
    )


def over_assisted(rows: list[Row]) -> float | None:
    """Returns our fastest method over transformers' assisted generation at its best depth, one text at a time."""
    ours, theirs = (
        [row.rate for row in rows if row.system == system and row.batch == 1 and row.method != "none"]
        for system in ("foretoken", "transformers")
    )
    return max(ours) / max(theirs) if ours and theirs else None


def main(
    target: Annotated[str | None, typer.Option(help="Folder or hub name. [the bundled one, widened]")] = None,
    draft: Annotated[str | None, typer.Option(help="Folder or hub name. [the bundled one]")] = None,
    like: Annotated[str, typer.Option(help="How far the bundled target is widened.")] = "t5-large",
    count: Annotated[int, typer.Option(min=1, max=32, help="Tasks.")] = 8,
    repeats: Annotated[int, typer.Option(min=1)] = 2,
    depth: Annotated[list[int], typer.Option(help="Tokens to draft, repeatable.")] = [4, 8],
    batch: Annotated[list[int], typer.Option(help="Texts at once, repeatable.")] = [1, 8],
    temperature: float = 0.0,
    pass_rows: Annotated[list[int], typer.Option(help="Rows of passes that are timed, repeatable.")] = [1, 8],
    turns: Annotated[int, typer.Option(min=1, help="Timings of each pass.")] = 20,
    dtype: str = "bfloat16",
    quantization: Annotated[str | None, typer.Option(help="int8, of our target.")] = None,
    peer: Annotated[bool, typer.Option(help="transformers beside ours.")] = True,
    output: Output = None,
) -> None:
    torch.set_num_threads(cores())
    big = resolve(target) if target else scaled(like, "seq2seq-target")
    small = resolve(draft) if draft else zoo.path("seq2seq-draft")
    tasks = repairs(big, count)
    own = Own(big, small, max(depth), dtype, quantization)
    size = sum(file.stat().st_size for file in big.glob("*.safetensors"))
    loaded = Loaded(big, own.llm.target, load_config(big), size, quantization or "")
    costs = pass_costs(loaded, pass_rows, [64], turns)
    systems: dict[str, Any] = {"foretoken": own}
    if peer:
        systems["transformers"] = Theirs(big, small, getattr(torch, dtype))
    runs: dict[tuple[str, str, int, int], Callable[[], tuple[Texts, float]]] = {}
    for size in batch:
        for name, system in systems.items():
            methods = OWN if name == "foretoken" else ("none", "draft_model") if size == 1 else ()
            for method in methods:
                for tokens in depth if method != "none" else [0]:
                    runs[name, method, tokens, size] = partial(system.write, method, tokens, size, tasks, temperature)
    outputs: dict[tuple[str, str, int, int], tuple[Texts, float]] = {}

    def turn(key: tuple[str, str, int, int]) -> float:
        started = perf_counter()
        outputs[key] = runs[key]()
        return perf_counter() - started

    timed = interleaved(
        {key: TimedTask(partial(turn, key)) for key in runs}, repeats, lambda order: track(order, "repeats")
    )
    rows = [
        Row(
            *key,
            tokens=sum(map(len, outputs[key][0])),
            seconds=timed[key],
            tokens_per_pass=outputs[key][1],
            identical_to_plain=sum(
                a == b for a, b in zip(outputs[key][0], outputs[key[0], "none", 0, batch[0]][0], strict=True)
            ),
        )
        for key in runs
    ]
    parts: list[Table | str] = [table(rows), tables.passes(costs)]
    assisted = over_assisted(rows)
    if assisted is not None:
        parts.append(f"best speculation over transformers' assisted generation, one text at a time: {assisted:.2f}")
    report(
        parts,
        {"target": str(big), "draft": str(small), "tasks": len(tasks), "temperature": temperature},
        output,
        rows=[{**asdict(row), "tokens_per_second": row.rate} for row in rows],
        passes=[{**asdict(cost), "over_floor": cost.over_floor} for cost in costs],
        over_assisted=assisted,
    )


if __name__ == "__main__":
    typer.run(main)
