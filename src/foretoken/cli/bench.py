"""``foretoken bench race``: Foretoken and its peers, interleaved in one run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.bench_serve import bench_serve
from foretoken.cli.bench_table import bench_table
from foretoken.cli.costs import costs, tracker
from foretoken.cli.files import check_places, publish, write_text
from foretoken.cli.options import Color, Html, Json, Output
from foretoken.cli.theme import ColorMode, wide_console

if TYPE_CHECKING:
    from rich.console import Console

    from foretoken.bench.entrants import Pairing
    from foretoken.bench.race import RaceRow

app = typer.Typer(
    help="Measure: the race against other engines, the cost of a pass, a server under load.", no_args_is_help=True
)

app.command()(costs)
app.command("serve")(bench_serve)
app.command("table")(bench_table)


@app.command()
def race(
    target: Annotated[
        Path | None, typer.Option(help="Target: a folder or GGUF file. [the bundled one, widened to 0.7b]")
    ] = None,
    draft: Annotated[Path | None, typer.Option(help="Draft: a folder or GGUF file. [the bundled one]")] = None,
    speculative_config: Annotated[
        list[str] | None, typer.Option(metavar="JSON", help="How to speculate (repeatable). [the draft model]")
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(help='JSON lines with a "prompt" each, or the word ragged. [our own functions]')
    ] = None,
    count: Annotated[int | None, typer.Option(min=1, help="Prompts to take from the start. [all, 16 ragged]")] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens for each prompt.")] = 96,
    temperature: Annotated[list[float] | None, typer.Option(help="Repeatable. [0]")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Prompts completed at once.")] = 1,
    depth: Annotated[list[int] | None, typer.Option(min=1, help="Drafted tokens (repeatable). [2, 4, 6, 8]")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of every system.")] = 3,
    peers: Annotated[str, typer.Option(help="Comma-separated, or none.")] = "transformers,openvino,vllm,llamacpp",
    quantization: Annotated[
        str | None, typer.Option(help="int8, int4-g64 ..., or a GGUF type such as Q4_K_M, for all systems. [bf16]")
    ] = None,
    as_json: Json = False,
    output: Output = None,
    html_file: Html = None,
    color: Color = ColorMode.AUTO,
) -> None:
    """Race plain and speculative decoding of Foretoken and its peers, each at its best draft length."""
    from foretoken import zoo
    from foretoken.bench.entrants import Pairing
    from foretoken.bench.peers.registry import check_quantization, chosen
    from foretoken.bench.setting import setting
    from foretoken.train.widen.checkpoint import scaled

    check_places(output=output, html=html_file)
    configs = _configs(speculative_config)
    candidates = chosen(peers)
    quantization = check_quantization(quantization) if quantization else None
    if target is None:
        target, draft = scaled("0.7b"), draft or zoo.path("draft")
    if draft is None:
        from foretoken.core.errors import InvalidRequest

        raise InvalidRequest("--target was given without --draft; name its draft too")
    quantization = _quantization(target, quantization)
    ids, source = _prompts(target, prompts, count)
    longest = max(map(len, ids)) + max_tokens + 32
    depths = tuple(dict.fromkeys(depth or (2, 4, 6, 8)))
    pairing = Pairing(target, draft, depths, batch, quantization, longest)
    groups = [ids[i : i + batch] for i in range(0, len(ids), batch)]
    console, notes = wide_console(color), wide_console(color, stderr=True)
    rows = _race(pairing, configs, candidates, groups, (max_tokens, temperature or [0.0], repeats), notes)
    facts = setting() | {
        "target": target.name,
        "draft": draft.name,
        "prompts": f"{len(ids)} of {source}",
        "max_tokens": max_tokens,
        "repeats": repeats,
        "peers": {row.system: row.version for row in rows if row.system != "foretoken"},
    }
    _publish(facts, rows, console, (as_json, output, html_file))
    if not any(row.system == "foretoken" for row in rows):
        raise typer.Exit(1)


def _race(
    pairing: Pairing,
    configs: list[dict[str, Any]],
    candidates: Sequence[Any],
    groups: list[list[list[int]]],
    task: tuple[int, list[float], int],
    notes: Console,
) -> list[RaceRow]:
    """Runs the race. Returns its rows."""
    from foretoken.bench.costs import Loaded
    from foretoken.bench.entrants import own, peers
    from foretoken.bench.peers.foretoken import quantization
    from foretoken.bench.peers.worker import start
    from foretoken.bench.race import RaceTask, race
    from foretoken.bench.sampling_bias import with_sampling_bias
    from foretoken.cli.theme import waiting
    from foretoken.core.errors import ForetokenError

    def say(text: str) -> None:
        notes.print(text, style="yellow", markup=False, soft_wrap=True)

    with waiting(notes, "setting up"):
        entrants = own(pairing, configs) + peers(pairing, configs, candidates, say)
    max_tokens, temperatures, repeats = task
    tasks = [RaceTask(groups, max_tokens, value) for value in dict.fromkeys(temperatures)]
    rows, race_answers = race(entrants, tasks, repeats, start, say, tracker(notes, "race"))
    try:
        ours = entrants[0].setup
        with waiting(notes, "testing sampled texts"):
            return with_sampling_bias(
                rows, race_answers, tasks, lambda: Loaded.of(Path(ours.target), quantization(ours) or "").model
            )
    except ForetokenError as error:  # keeps the result of the race
        say(f"sampled texts were not tested: {error}")
        return rows


def _publish(
    facts: dict[str, Any],
    rows: Sequence[RaceRow],
    console: Console,
    options: tuple[bool, Path | None, Path | None],
) -> None:
    """Prints and writes the result. options: values of --json, --output and --html."""
    from dataclasses import asdict

    from foretoken.bench import tables
    from foretoken.bench.page import page

    def show() -> None:
        for part in tables.race(rows):
            console.print(part)
        console.print(", ".join(f"{key} {value}" for key, value in facts.items()), style="dim", markup=False)

    as_json, output, html_file = options
    publish({"setting": facts, "rows": [asdict(row) for row in rows]}, show, as_json, output)
    if html_file is not None:
        write_text(html_file, page(facts, rows))


# options


def _configs(texts: Sequence[str] | None) -> list[dict[str, Any]]:
    from foretoken.cli.generate import speculative

    return [speculative(text) or {} for text in texts] if texts else [{"method": "draft_model"}]


def _quantization(target: Path, name: str | None) -> str:
    """Returns the quantization that was asked for, or the type of a GGUF file. Raises InvalidRequest."""
    from foretoken.bench.peers.export import file_type
    from foretoken.core.errors import InvalidRequest
    from foretoken.models.formats.gguf.names import is_gguf

    if not is_gguf(target):
        return name or ""
    if name is not None:
        raise InvalidRequest(f"--quantization does not change the weights of {target.name}; leave it out")
    return file_type(target)


def _prompts(target: Path, name: str | None, count: int | None) -> tuple[list[list[int]], str]:
    """Returns the prompts as token ids, which are the same for every system, and the name of their source."""
    from foretoken.bench.workloads import FUNCTIONS, load_prompts, ragged
    from foretoken.models.formats.checkpoint import load_tokenizer

    tokenizer = load_tokenizer(target)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, verbose=False)["input_ids"])

    if name == "ragged":
        return ragged(encode, count or 16), "ragged prompts of 20 to 1,000 tokens"
    texts = load_prompts(Path(name), count) if name else list(FUNCTIONS)[:count]
    return [encode(text) for text in texts], Path(name).name if name else "our own functions"
