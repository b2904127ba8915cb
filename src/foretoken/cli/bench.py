"""``foretoken bench``: races against peers, one by one or as the resumable table, and servers under load."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from foretoken import __version__, zoo
from foretoken.bench.workloads import encode, encoded_prompts, ragged, repairs
from foretoken.cli.costs import costs, tracker
from foretoken.cli.grouped import grouped, option
from foretoken.cli.options import (
    MODEL,
    PEERS,
    BenchmarkModels,
    Peers,
    ReportOptions,
    counts,
    models_or_bundled,
    names,
    speculative,
)
from foretoken.cli.theme import note, waiting, wide_console
from foretoken.core.errors import ForetokenError, InvalidRequest
from foretoken.propose.methods import check_method

if TYPE_CHECKING:
    from rich.console import Console

    from foretoken.bench.grid import GridTask
    from foretoken.bench.http_load import LoadedServer, LoadPlan
    from foretoken.bench.peers.protocol import Setup
    from foretoken.bench.race import RaceRow, RaceTask


app = typer.Typer(help="Measure: the race against other engines, the cost of a pass, a server under load.")

app.command()(costs)


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

    prompts: str | None = option(
        None,
        'JSON lines with a "prompt" each; ragged; repairs, for encoder-decoders; or the tokens of one long prompt. '
        "[our own functions]",
    )
    count: int | None = option(None, "Prompts to take from the start. [all, 16 ragged]", min=1)
    max_tokens: int = option(96, "Tokens for each prompt.", min=2)
    temperature: list[float] | None = option(None, "Repeatable. [0]")
    batch: int = option(1, "Prompts completed at once.", min=1)
    depth: list[int] | None = option(None, "Drafted tokens (repeatable). [2, 4, 6, 8]", min=1)
    repeats: int = option(3, "Turns of every system.", min=1)

    def tasks(self, ids: list[list[int]], limits: list[int]) -> list[RaceTask]:
        """Returns a task for each temperature. limits: Tokens of each prompt; a batch has its shortest."""
        from foretoken.bench.race import RaceTask

        starts = range(0, len(ids), self.batch)
        groups, shortest = [ids[i : i + self.batch] for i in starts], [min(limits[i : i + self.batch]) for i in starts]
        return [RaceTask(groups, shortest, value) for value in dict.fromkeys(self.temperature or [0.0])]


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
    from foretoken.bench.output import setting
    from foretoken.bench.page import page, race_tables
    from foretoken.bench.peers.registry import check_quantization, chosen
    from foretoken.bench.race import stretched

    configs = pair.configs
    candidates = chosen(peers)
    quantization = check_quantization(quantization) if quantization else None
    target, draft = models_or_bundled(pair.target, pair.draft, configs)
    quantization = _quantization(target, quantization)
    ids, limits, source = _prompts(target, asked)
    longest = max(map(len, ids)) + max(limits) + 32
    target = stretched(target, longest) if (asked.prompts or "").isdigit() else target
    depths = tuple(dict.fromkeys(asked.depth or (2, 4, 6, 8)))
    shared = _setup(target, draft, quantization=quantization, max_length=longest, batch=asked.batch)
    notes = wide_console(report.color, stderr=True)
    rows = _race(shared, configs, depths, candidates, asked.tasks(ids, limits), asked.repeats, notes)
    facts = setting() | {
        "target": target.name,
        "draft": None if draft is None else draft.name,
        "prompts": f"{len(ids)} of {source}",
        "max_tokens": asked.max_tokens,
        "repeats": asked.repeats,
        "peers": {row.system: row.version for row in rows if row.system != "foretoken"},
    }
    record = {"setting": facts, "rows": [asdict(row) for row in rows]}
    report.publish(record, lambda: race_tables(rows), lambda: page(facts, rows), facts)
    if not any(row.system == "foretoken" for row in rows):
        raise typer.Exit(1)


def _setup(target: Path, draft: Path | None, **settings: Any) -> Setup:
    """Returns the models and settings that all entrants share."""
    from foretoken.bench.output import cores
    from foretoken.bench.peers.protocol import Setup

    return Setup("foretoken", "plain", str(target), str(draft or ""), threads=cores(), **settings)


def _race(
    shared: Setup,
    configs: list[dict[str, Any]],
    depths: tuple[int, ...],
    candidates: Sequence[Any],
    tasks: list[RaceTask],
    repeats: int,
    notes: Console,
) -> list[RaceRow]:
    from foretoken.bench.costs import Loaded
    from foretoken.bench.peers.foretoken import quantization
    from foretoken.bench.peers.worker import start
    from foretoken.bench.race import own, peers, race
    from foretoken.bench.sampling_bias import with_sampling_bias

    say = partial(note, notes, style="yellow")
    with waiting(notes, "setting up"):
        entrants = own(shared, configs, depths) + peers(shared, configs, depths, candidates, say)
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


def _prompts(target: Path, asked: RaceOptions) -> tuple[list[list[int]], list[int], str]:
    """Returns the prompts as token ids, the tokens to generate after each, and the name of their source."""
    from foretoken.models.formats.checkpoint import load_tokenizer

    name, tokenizer = asked.prompts, load_tokenizer(target)
    if name == "repairs":
        sources, limits = map(list, zip(*repairs(tokenizer, asked.count or 8), strict=True))
        return sources, limits, "repairs"
    if name == "ragged":
        ids, source = ragged(partial(encode, tokenizer), asked.count or 16), "ragged prompts of 20 to 1,000 tokens"
    elif name is not None and name.isdigit():
        ids = [[(7 * i) % min(4000, len(tokenizer) - 5) + 5 for i in range(int(name))]]
        source = f"prompts of {name} tokens"
    else:
        file = Path(name) if name else None
        ids, source = encoded_prompts(tokenizer, file, asked.count), file.name if file else "our own functions"
    return ids, [asked.max_tokens] * len(ids), source


@dataclass(frozen=True, kw_only=True)
class CellOptions:
    """Work of every cell."""

    fixed: list[str] | None = option(
        None, "A fixed speculative_config to race (repeatable). [the usual ones]", metavar="JSON"
    )
    count: int = option(4, "Prompts of a cell; larger batches run one batch.", min=1)
    max_tokens: int = option(64, "Tokens for each prompt.", min=2)
    repeats: int = option(3, "Turns of every system in a cell.", min=1)
    peer_depth: list[int] | None = option(None, "Draft length of the peers (repeatable). [4 and 8]", min=1)
    peer_method: list[str] | None = option(None, "Method of the peers (repeatable). [draft_model and ngram]")

    def task(self) -> GridTask:
        from foretoken.bench.grid import GridTask

        usual = GridTask()
        picked = tuple(speculative(text) for text in self.fixed) if self.fixed else usual.picked
        for method in self.peer_method or ():
            check_method(method)
        return GridTask(
            self.count,
            self.max_tokens,
            self.repeats,
            picked,
            tuple(self.peer_depth or usual.peer_depths),
            tuple(self.peer_method or usual.peer_methods),
        )


@app.command("table")
@grouped
def bench_table(
    models: BenchmarkModels,
    only: list[str] | None = option(
        None, 'Cells by parts of their name, "T=1, int8" (repeatable), in this order.', metavar="PARTS"
    ),
    *,
    each: CellOptions,
    peers: Peers = PEERS,
    record: Path = option(Path("bench-table.jsonl"), "Finished cells, which the next start skips."),
    report: ReportOptions,
) -> None:
    """Race the default beside fixed configurations and peers, over prompts, temperatures, weights and batches."""
    from foretoken.bench.grid import CELLS, DEFAULT, GridRecord, run
    from foretoken.bench.output import setting
    from foretoken.bench.page import claims, grid_page, rich_table
    from foretoken.bench.peers.registry import chosen
    from foretoken.bench.peers.worker import start
    from foretoken.models.formats.checkpoint import load_tokenizer

    candidates = chosen(peers)
    cells = list(dict.fromkeys(cell for parts in only or [""] for cell in CELLS if not parts or cell.has(parts)))
    if not cells:
        raise InvalidRequest(f"no cell has all these parts; the cells are: {'; '.join(cell.name for cell in CELLS)}")
    task = each.task()
    target, draft = models_or_bundled(models.target, models.draft, [DEFAULT, *task.picked])
    facts: dict[str, Any] = {"version": __version__, "target": target.name, "draft": draft and draft.name}
    facts |= {"peers": [peer.name for peer in candidates], **asdict(task)}
    kept, notes = GridRecord(record, facts), wide_console(report.color, stderr=True)
    results = {cell: rows for cell, rows in kept.rows().items() if cell in cells}
    shared, ids_of = _setup(target, draft), partial(encode, load_tokenizer(target))
    say = partial(note, notes, style="yellow")
    for done, rows in run(cells, shared, candidates, ids_of, task, kept, start, say):
        results[done] = rows
        notes.print(f"{len(results)} of {len(cells)}: {done.name}", markup=False)
    results = {cell: results[cell] for cell in cells}
    about = setting() | facts

    def parts() -> list[Any]:
        return [rich_table(results), *(f"The default: {claim}" for claim in claims(results))]

    every = [{"cell": asdict(cell), "rows": [asdict(row) for row in rows]} for cell, rows in results.items()]
    report.publish({"setting": about, "cells": every}, parts, lambda: grid_page(about, results))


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Requests to send, and their number."""

    workloads: str = option("short,long,shared,agents", "Comma-separated: short, long, shared, agents.")
    concurrency: str = option("1,4,16,64", "Requests at once, comma-separated.")
    requests: int = option(2, "Requests of each concurrent client.", min=1)
    max_tokens: int = option(64, "Tokens of each answer.", min=1)
    long_tokens: int = option(1500, "Tokens of a long prompt, about.", min=1)
    shared_tokens: int = option(2000, "Tokens of a shared beginning, about.", min=1)
    agents: int = option(8, "Agents on one beginning.", min=1)
    temperature: float = option(0.0, "Of every request.", min=0)
    generator: str = option(
        "foretoken", "What makes the load: foretoken, or vllm for `vllm bench serve` where it is installed."
    )
    tokenizer: str | None = option(None, "Tokenizer with which vllm counts tokens. [the bundled target's]")

    def plan(self) -> LoadPlan:
        """Returns the numbers of requests and tokens. Raises InvalidRequest."""
        from foretoken.bench.http_load import LoadPlan

        at_once = counts("--concurrency", self.concurrency)
        return LoadPlan(at_once, self.requests, self.long_tokens, self.shared_tokens, self.agents)

    def server(self, address: str, api_key: str | None, model: str | None) -> LoadedServer:
        """Returns the server under load. Raises ForetokenError if it does not answer."""
        from foretoken.bench.http_load import LoadedServer, VllmLoadedServer

        options = {"max_tokens": self.max_tokens, "temperature": self.temperature, "ignore_eos": True}
        if self.generator == "vllm":
            return VllmLoadedServer(address, api_key, model, options, self.tokenizer or str(zoo.path("target")))
        return LoadedServer(address, api_key, model, options)


@app.command("serve")
@grouped
def bench_serve(
    url: str | None = option(None, "Address of a running OpenAI-compatible server. [one of our own is started]"),
    server_options: str = option("", 'Options of the server to start, such as "TARGET".', metavar="OPTIONS"),
    model: str | None = option(None, "Model to ask for. [the first that is listed]", *MODEL),
    api_key: str | None = option(None, "API key of the server.", envvar="FORETOKEN_API_KEY"),
    *,
    load: LoadOptions,
    report: ReportOptions,
) -> None:
    """Load a server with concurrent requests: throughput, TTFT and ITL percentiles, and the gain of shared prefixes."""
    from foretoken.bench.http_load import GENERATORS, WORKLOADS, run_workload, serving
    from foretoken.bench.output import setting
    from foretoken.bench.page import load_page, load_table, speedup_lines

    if url is not None and server_options:
        raise InvalidRequest("--server-options are for a server that is started; omit --url or them")
    names("--generator", load.generator, GENERATORS)
    chosen, plan = names("workload", load.workloads, WORKLOADS), load.plan()
    notes, results = wide_console(report.color, stderr=True), []
    started = serving("--max-num-seqs", "64", *shlex.split(server_options), key=api_key)
    with started if url is None else nullcontext((url, 0)) as (address, _):
        server = load.server(address, api_key, model)
        server.run("warm-up", ["import os\n"] * 2, 1)
        for name in chosen:
            for result in run_workload(name, server, plan):
                results.append(result)
                notes.print(
                    f"{result.workload}, {result.concurrency} at once: {result.output_tokens_per_second:.1f} tokens/s",
                    style="dim",
                    markup=False,
                )
    sent = {"model": server.model, "max_tokens": load.max_tokens, "generator": load.generator}
    facts = setting() | {"server": url or "foretoken serve"} | sent

    record = {"setting": facts, "results": [asdict(result) for result in results]}
    parts = [load_table(results), *speedup_lines(results)]
    report.publish(record, lambda: parts, lambda: load_page(facts, results), facts)
    if failed := [result for result in results if result.failed]:
        count = sum(result.failed for result in failed)
        raise ForetokenError(f"{count} requests failed; the first: {failed[0].error}")
