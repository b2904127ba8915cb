"""``foretoken generate``: completes one prompt, streamed and coloured by origin."""

from __future__ import annotations

import json
import secrets
import sys
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.files import check_places, standard_input, write_text
from foretoken.cli.options import (
    Device,
    DraftModel,
    Dtype,
    Json,
    KVCacheDtype,
    MaxModelLen,
    Quantization,
    Speculation,
    Target,
    TensorParallel,
    WeightFormat,
    load,
)
from foretoken.cli.theme import ColorMode

if TYPE_CHECKING:
    from foretoken.llm import LLM
    from foretoken.outputs import CompletionOutput, StreamPiece
    from foretoken.params import SamplingParams

LOGPROBS = 5  # of the most probable tokens, for the page


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from standard input.")],
    model: Target = None,
    draft_model: DraftModel = None,
    speculative_config: Speculation = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this mass.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep this many of the likeliest tokens; 0 keeps all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text, however it is drafted.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this string; may be repeated.")] = None,
    n: Annotated[int, typer.Option("--n", "-n", help="Completions to make.")] = 1,
    speculative_tokens: Annotated[
        int | None, typer.Option(help="Tokens drafted per step; 0 is plain decoding.")
    ] = None,
    exactness: Annotated[
        str | None, typer.Option(help="distribution, trajectory or lossy-typical. [trajectory with --seed]")
    ] = None,
    prediction_file: Annotated[
        Path | None, typer.Option(help="A text that the output is expected to follow; for methods that draft from it.")
    ] = None,
    lora: Annotated[str | None, typer.Option(metavar="PATH", help="LoRA adapter in PEFT's format.")] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    quantization: Quantization = None,
    weight_format: WeightFormat = "auto",
    kv_cache_dtype: KVCacheDtype = "auto",
    max_model_len: MaxModelLen = None,
    tensor_parallel_size: TensorParallel = 1,
    color: Annotated[ColorMode, typer.Option(help="Colour text by origin.")] = ColorMode.AUTO,
    stats: Annotated[bool, typer.Option(help="A line of figures at the end, on standard error.")] = True,
    as_json: Json = False,
    html_file: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with every token's probabilities.")
    ] = None,
) -> None:
    """Continue a prompt, faster, with exactly the target's distribution."""
    config = speculative(speculative_config)
    check_places(html=html_file)
    from foretoken import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=stop or None,
        n=n,
        speculative_tokens=speculative_tokens,
        exactness=exactness,
        prediction=_text_of(prediction_file) if prediction_file is not None else None,
        logprobs=LOGPROBS if html_file is not None else None,
        lora=lora,
    )
    text = standard_input(sys.stdin.read) if prompt == "-" else prompt
    llm = load(
        model,
        draft_model,
        color,
        speculative_config=config,
        dtype=dtype,
        device=device,
        quantization=quantization,
        weight_format=weight_format,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=max_model_len,
        tensor_parallel_size=tensor_parallel_size,
        lora={} if lora is None else {lora: lora},
        seed=secrets.randbits(63),  # the library's default seed would repeat texts
    )
    page = _Page(llm, text, params, html_file) if html_file is not None else None
    try:
        if as_json:
            print(json.dumps(_record(llm, _complete(llm, text, params, page)), ensure_ascii=False))
        else:
            _stream(llm, text, params, color, stats, page)
        if page is not None:
            page.write()
    finally:
        llm.close()


class _Page:
    """Collects the streamed pieces and writes a page of them."""

    def __init__(self, llm: LLM, prompt: str, params: SamplingParams, file: Path) -> None:
        from foretoken.report.trace import Tracer

        self._llm, self._params, self._file = llm, params, file
        ids = llm.tokenizer.encode(prompt)
        self._tracers = [Tracer(llm.tokenizer, ids) for _ in range(params.n)]

    def push(self, piece: StreamPiece) -> None:
        self._tracers[piece.index].push(piece)

    def write(self) -> None:
        from foretoken.bench.setting import setting
        from foretoken.report.tokens import page

        facts = setting() | {
            "model": self._llm.model,
            "draft_model": self._llm.draft_model,
            "method": self._llm.speculative_config.method_in_force,
            "temperature": self._params.temperature,
            "seed": self._params.seed,
        }
        write_text(self._file, page([tracer.trace() for tracer in self._tracers], facts))


def _complete(llm: LLM, prompt: str, params: SamplingParams, page: _Page | None) -> tuple[CompletionOutput, ...]:
    """Returns all completions in order."""
    done: dict[int, CompletionOutput] = {}
    for piece in llm.stream(prompt, params):
        if page is not None:
            page.push(piece)
        if piece.output is not None:
            done[piece.index] = piece.output
    return tuple(done[index] for index in range(params.n))


def _text_of(file: Path) -> str:
    from foretoken.core.errors import InvalidRequest

    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read the prediction {file}: {error}; expected a text file in UTF-8") from error


def speculative(text: str | None) -> dict[str, Any] | None:
    """Returns the configuration in a JSON text, or None. Raises InvalidRequest."""
    if text is None:
        return None
    from foretoken.core.errors import InvalidRequest
    from foretoken.propose.methods import check_method

    try:
        config = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(
            f"""--speculative-config is not JSON ({error}); expected for instance '{{"method": "ngram"}}'"""
        ) from error
    if not isinstance(config, dict):
        raise InvalidRequest(f"--speculative-config must be a JSON object, got {text}")
    if isinstance(config.get("method"), str):
        check_method(config["method"])
    return config


def _stream(
    llm: LLM, prompt: str, params: SamplingParams, color: ColorMode, stats: bool, page: _Page | None = None
) -> None:
    """Prints tokens as they are accepted. Several completions are printed one after another, each with its number."""
    from foretoken.cli.render import Origins, Span, TextWriter, summary
    from foretoken.cli.theme import console

    out = console(color)
    writer = TextWriter(out)
    origins = [Origins(llm.tokenizer, llm.tokenizer.encode(prompt)) for _ in range(params.n)]
    later: dict[int, list[Span]] = {index: [] for index in range(1, params.n)}
    done: list[CompletionOutput] = []
    started = perf_counter()
    for piece in llm.stream(prompt, params):
        if page is not None:
            page.push(piece)
        spans = origins[piece.index].push(piece)
        if piece.index == 0:
            writer.write(spans)
        else:
            later[piece.index] += spans
        if piece.output is not None:
            done.append(piece.output)
    seconds = perf_counter() - started
    writer.end_line()
    for index, spans in later.items():
        out.print(f"--- {index + 1} of {params.n}", style="dim")
        writer.write(spans)
        writer.end_line()
    if stats:
        console(color, stderr=True).print(summary([o.stats for o in done], seconds), style="dim")


def _record(llm: LLM, outputs: tuple[CompletionOutput, ...]) -> dict[str, Any]:
    """Returns the models' names and the first completion's fields; with --n above 1 also all of them as ``outputs``."""
    rows = [
        {
            "text": output.text,
            "token_ids": list(output.token_ids),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "exactness": output.exactness,
            "stats": output.stats.to_dict(),
        }
        for output in outputs
    ]
    names = {"model": llm.model, "draft_model": llm.draft_model}
    return {**names, **rows[0], **({"outputs": rows} if len(rows) > 1 else {})}
