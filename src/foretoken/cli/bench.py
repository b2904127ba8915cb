"""``foretoken bench race``: Foretoken and its peers, interleaved in one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from foretoken.bench.workloads import encoded_prompts, ragged
from foretoken.cli.bench_options import PEERS, BenchmarkModels, Peers, models_or_bundled
from foretoken.cli.bench_serve import bench_serve
from foretoken.cli.bench_table import bench_table
from foretoken.cli.costs import costs, tracker
from foretoken.cli.grouped import grouped, option
from foretoken.cli.options import ReportOptions, speculative
from foretoken.cli.theme import note, waiting, wide_console
from foretoken.core.errors import ForetokenError, InvalidRequest

if TYPE_CHECKING:
    from rich.console import Console

    from foretoken.bench.entrants import Pairing
    from foretoken.bench.race import RaceRow, RaceTask

app = typer.Typer(help="Measure: the race against other engines, the cost of a pass, a server under load.")

app.command()(costs)
app.command("serve")(bench_serve)
app.command("table")(bench_table)


@dataclass(frozen=True, kw_only=True)
class PairOptions(BenchmarkModels):
    """The models, and how they speculate."""

    speculative_config: list[str] | None = option(
        None, "How to speculate (repeatable). [the draft model]", metavar="JSON"
    )

    @property
    def configs(self) -> list[dict[str, Any]]:
        """The ways to speculate. Raises InvalidRequest."""
        return [speculative(text) for text in self.speculative_config or ()] or [{"method": "draft_model"}]


@dataclass(frozen=True, kw_only=True)
class RaceOptions:
    """Prompts and settings of a race."""

    prompts: str | None = option(None, 'JSON lines with a "prompt" each, or the word ragged. [our own functions]')
    count: int | None = option(None, "Prompts to take from the start. [all, 16 ragged]", min=1)
    max_tokens: int = option(96, "Tokens for each prompt.", min=2)
    temperature: list[float] | None = option(None, "Repeatable. [0]")
    batch: int = option(1, "Prompts completed at once.", min=1)
    depth: list[int] | None = option(None, "Drafted tokens (repeatable). [2, 4, 6, 8]", min=1)
    repeats: int = option(3, "Turns of every system.", min=1)

    def tasks(self, ids: list[list[int]]) -> list[RaceTask]:
        """Returns a task for each temperature."""
        from foretoken.bench.race import RaceTask

        groups = [ids[i : i + self.batch] for i in range(0, len(ids), self.batch)]
        return [RaceTask(groups, self.max_tokens, value) for value in dict.fromkeys(self.temperature or [0.0])]


@app.command()
@grouped
def race(
    pair: PairOptions,
    asked: RaceOptions,
    peers: Peers = PEERS,
    quantization: str | None = option(
        None, "int8, int4-g64 ..., or a GGUF type such as Q4_K_M, for all systems. [bf16]"
    ),
    *,
    report: ReportOptions,
) -> None:
    """Race plain and speculative decoding of Foretoken and its peers, each at its best draft length."""
    from foretoken.bench import tables
    from foretoken.bench.entrants import Pairing
    from foretoken.bench.page import page
    from foretoken.bench.peers.registry import check_quantization, chosen
    from foretoken.bench.setting import setting

    configs = pair.configs
    candidates = chosen(peers)
    quantization = check_quantization(quantization) if quantization else None
    target, draft = models_or_bundled(pair.target, pair.draft, configs)
    quantization = _quantization(target, quantization)
    ids, source = _prompts(target, asked.prompts, asked.count)
    longest = max(map(len, ids)) + asked.max_tokens + 32
    depths = tuple(dict.fromkeys(asked.depth or (2, 4, 6, 8)))
    pairing = Pairing(target, draft, depths, asked.batch, quantization, longest)
    notes = wide_console(report.color, stderr=True)
    rows = _race(pairing, configs, candidates, asked.tasks(ids), asked.repeats, notes)
    facts = setting() | {
        "target": target.name,
        "draft": None if draft is None else draft.name,
        "prompts": f"{len(ids)} of {source}",
        "max_tokens": asked.max_tokens,
        "repeats": asked.repeats,
        "peers": {row.system: row.version for row in rows if row.system != "foretoken"},
    }
    record = {"setting": facts, "rows": [asdict(row) for row in rows]}
    report.publish(record, lambda: tables.race(rows), lambda: page(facts, rows), facts)
    if not any(row.system == "foretoken" for row in rows):
        raise typer.Exit(1)


def _race(
    pairing: Pairing,
    configs: list[dict[str, Any]],
    candidates: Sequence[Any],
    tasks: list[RaceTask],
    repeats: int,
    notes: Console,
) -> list[RaceRow]:
    """Runs the race. Returns its rows."""
    from foretoken.bench.costs import Loaded
    from foretoken.bench.entrants import own, peers
    from foretoken.bench.peers.foretoken import quantization
    from foretoken.bench.peers.worker import start
    from foretoken.bench.race import race
    from foretoken.bench.sampling_bias import with_sampling_bias

    say = partial(note, notes, style="yellow")
    with waiting(notes, "setting up"):
        entrants = own(pairing, configs) + peers(pairing, configs, candidates, say)
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


def _quantization(target: Path, name: str | None) -> str:
    """Returns the quantization that was asked for, or the type of a GGUF file. Raises InvalidRequest."""
    from foretoken.bench.peers.export import file_type
    from foretoken.models.formats.gguf import is_gguf

    if not is_gguf(target):
        return name or ""
    if name is not None:
        raise InvalidRequest(f"--quantization does not change the weights of {target.name}; leave it out")
    return file_type(target)


def _prompts(target: Path, name: str | None, count: int | None) -> tuple[list[list[int]], str]:
    """Returns the prompts as token ids, which are the same for every system, and the name of their source."""
    from foretoken.models.formats.checkpoint import load_tokenizer

    tokenizer = load_tokenizer(target)
    if name == "ragged":
        encode = lambda text: list(tokenizer(text, verbose=False)["input_ids"])  # noqa: E731
        return ragged(encode, count or 16), "ragged prompts of 20 to 1,000 tokens"
    file = Path(name) if name else None
    return encoded_prompts(tokenizer, file, count), file.name if file else "our own functions"
