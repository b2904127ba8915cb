"""``foretoken bench table``: every cell of the table of benchmarks, resumable."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken import __version__
from foretoken.cli.bench_options import PEERS, BenchmarkModels, Peers, models_or_bundled
from foretoken.cli.grouped import grouped, option
from foretoken.cli.options import ReportOptions, speculative
from foretoken.cli.theme import note, wide_console
from foretoken.core.errors import InvalidRequest
from foretoken.propose.methods import check_method

if TYPE_CHECKING:
    from foretoken.bench.grid import GridTask


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
        """Returns the task of a cell. Raises InvalidRequest."""
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
    from foretoken.bench.entrants import Pairing
    from foretoken.bench.grid import CELLS, DEFAULT, GridRecord, run
    from foretoken.bench.page import claims, grid_page, rich_table
    from foretoken.bench.peers.registry import chosen
    from foretoken.bench.peers.worker import start
    from foretoken.bench.setting import setting
    from foretoken.models.formats.checkpoint import load_tokenizer

    candidates = chosen(peers)
    cells = list(dict.fromkeys(cell for parts in only or [""] for cell in CELLS if not parts or cell.has(parts)))
    if not cells:
        raise InvalidRequest(f"no cell has all these parts; the cells are: {'; '.join(cell.name for cell in CELLS)}")
    task = each.task()
    pairing = Pairing(*models_or_bundled(models.target, models.draft, [DEFAULT, *task.picked]), ())
    tokenizer = load_tokenizer(pairing.target)
    facts: dict[str, Any] = {
        "version": __version__,
        "target": pairing.target.name,
        "draft": pairing.draft and pairing.draft.name,
    }
    facts |= {"peers": [peer.name for peer in candidates], **asdict(task)}
    kept, notes = GridRecord(record, facts), wide_console(report.color, stderr=True)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, verbose=False)["input_ids"])

    results = {cell: rows for cell, rows in kept.rows().items() if cell in cells}
    for done, rows in run(cells, pairing, candidates, encode, task, kept, start, partial(note, notes, style="yellow")):
        results[done] = rows
        notes.print(f"{len(results)} of {len(cells)}: {done.name}", markup=False)
    results = {cell: results[cell] for cell in cells}
    about = setting() | facts

    def parts() -> list[Any]:
        return [rich_table(results), *(f"The default: {claim}" for claim in claims(results))]

    every = [{"cell": asdict(cell), "rows": [asdict(row) for row in rows]} for cell, rows in results.items()]
    report.publish({"setting": about, "cells": every}, parts, lambda: grid_page(about, results))
