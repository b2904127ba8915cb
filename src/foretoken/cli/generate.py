"""``foretoken generate``: completes one prompt, streamed and coloured by origin."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.files import standard_input, write_text
from foretoken.cli.grouped import grouped, option
from foretoken.cli.options import (
    Json,
    MaxModelLen,
    ModelOptions,
    RuntimeOptions,
    SpeculativeTokens,
    TensorParallel,
    TextColor,
    TopP,
    load,
)
from foretoken.cli.theme import ColorMode, console, note
from foretoken.core.files import read_text
from foretoken.params import SamplingParams

if TYPE_CHECKING:
    from foretoken.core.step import StepOutput
    from foretoken.llm import LLM
    from foretoken.outputs import SpeculationStats, StreamPiece
    from foretoken.report.tokens import Tracer

LOGPROBS = 5  # of the most probable tokens, for the page


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Sampling parameters of the text."""

    max_tokens: int = option(128, "Tokens to generate at most.")
    temperature: float = option(0.0, "0 is greedy.")
    top_p: TopP = 1.0
    top_k: int = option(0, "Keep this many of the likeliest tokens; 0 keeps all.")
    min_p: float = option(0.0, "Drop tokens below this share of the likeliest.")
    seed: int | None = option(None, "The same seed gives the same text, however it is drafted.")
    stop: list[str] | None = option(None, "Stop before this string; may be repeated.")
    n: int = option(1, "Completions to make.", "--n", "-n")
    speculative_tokens: SpeculativeTokens = None
    exactness: str | None = option(None, "distribution, trajectory or lossy-typical. [trajectory with --seed]")
    prediction_file: Path | None = option(
        None, "A text that the output is expected to follow; for methods that draft from it."
    )
    lora: str | None = option(None, "LoRA adapter in PEFT's format.", metavar="PATH")

    def params(self, logprobs: int | None) -> SamplingParams:
        """Returns the parameters of the request. Raises InvalidRequest."""
        given = vars(self) | {"stop": self.stop or None, "logprobs": logprobs}
        file = given.pop("prediction_file")
        return SamplingParams(
            **given, prediction=None if file is None else read_text("the prediction", file, "a text file")
        )


@dataclass(frozen=True, kw_only=True)
class TextRuntimeOptions(RuntimeOptions):
    """Number formats and devices of the models."""

    max_model_len: MaxModelLen = None
    tensor_parallel_size: TensorParallel = 1


@grouped
def generate(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The text to continue; - reads it from standard input.")
    ],
    models: ModelOptions,
    wanted: TextOptions,
    runtime: TextRuntimeOptions,
    color: TextColor = ColorMode.AUTO,
    stats: bool = option(True, "A line of figures at the end, on standard error."),
    explain_drafts: bool = option(False, "A line for each step with the draft policy's numbers, on standard error."),
    as_json: Json = False,
    html_file: Path | None = option(None, "Write a page with every token's probabilities.", "--html", metavar="FILE"),
) -> None:
    """Continue a prompt, faster, with exactly the target's distribution."""
    config = models.config
    params = wanted.params(LOGPROBS if html_file is not None else None)
    text = standard_input(sys.stdin.read) if prompt == "-" else prompt
    llm = load(
        models.model,
        models.draft_model,
        color,
        speculative_config=config,
        lora={} if params.lora is None else {params.lora: params.lora},
        seed=secrets.randbits(63),  # the library's default seed would repeat texts
        **vars(runtime),
    )
    with closing(llm):
        tracers = []
        if html_file is not None:
            from foretoken.report.tokens import Tracer

            ids = llm.requests.tokenize(text).ids
            tracers = [Tracer(llm.tokenizer, ids) for _ in range(params.n)]
        pieces = _traced(llm.stream(text, params), tracers)
        if as_json:
            print(json.dumps(_record(llm, pieces), ensure_ascii=False))
        else:
            _stream(llm, text, params.n, pieces, color, stats, explain_drafts)
        if html_file is not None:
            write_text(html_file, _page(llm, params, tracers))


def _traced(pieces: Iterable[StreamPiece], tracers: Sequence[Tracer]) -> Iterator[StreamPiece]:
    """Yields the pieces of all completions after passing them to the tracers, if any."""
    for piece in pieces:
        if tracers:
            tracers[piece.index].push(piece)
        yield piece


def _page(llm: LLM, params: SamplingParams, tracers: Iterable[Tracer]) -> str:
    """Returns a page of all completions."""
    from foretoken.bench.output import setting
    from foretoken.report.tokens import page

    facts = setting() | {
        "model": llm.model,
        "draft_model": llm.draft_model,
        "method": llm.speculative_config.method_in_force,
        "temperature": params.temperature,
        "seed": params.seed,
    }
    return page([tracer.trace() for tracer in tracers], facts)


def _stream(
    llm: LLM, prompt: str, count: int, pieces: Iterable[StreamPiece], color: ColorMode, stats: bool, explain: bool
) -> None:
    """Prints tokens as they are accepted. Several completions are printed one after another, each with its number."""
    from foretoken.cli.render import Origins, Span, TextWriter, decisions, summary

    out = console(color)
    writer = TextWriter(out)
    origins = [Origins(llm.tokenizer, llm.requests.tokenize(prompt).ids) for _ in range(count)]
    later: dict[int, list[Span]] = {index: [] for index in range(1, count)}
    done: list[SpeculationStats] = []
    steps: list[StepOutput] = []
    started = perf_counter()
    for piece in pieces:
        if explain and piece.step is not None:
            steps.append(piece.step)
        spans = origins[piece.index].push(piece)
        if piece.index == 0:
            writer.write(spans)
        else:
            later[piece.index] += spans
        if piece.output is not None:
            done.append(piece.output.stats)
    seconds = perf_counter() - started
    writer.end_line()
    for index, spans in later.items():
        out.print(f"--- {index + 1} of {count}", style="dim")
        writer.write(spans)
        writer.end_line()
    if explain:
        console(color, stderr=True).print(decisions(steps))
    if stats:
        note(console(color, stderr=True), summary(done, seconds))


def _record(llm: LLM, pieces: Iterable[StreamPiece]) -> dict[str, Any]:
    """Returns the models' names and the first completion's fields; with --n above 1 also all of them as ``outputs``."""
    outputs = {piece.index: piece.output for piece in pieces if piece.output is not None}
    rows = [
        {
            "text": output.text,
            "token_ids": list(output.token_ids),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "exactness": output.exactness,
            "stats": output.stats.to_dict(),
        }
        for _, output in sorted(outputs.items())
    ]
    names = {"model": llm.model, "draft_model": llm.draft_model}
    return {**names, **rows[0], **({"outputs": rows} if len(rows) > 1 else {})}
