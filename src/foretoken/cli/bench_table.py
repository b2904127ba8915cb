"""``foretoken bench table``: every cell of the table of benchmarks, resumable."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.cli.files import check_places, publish, write_text
from foretoken.cli.options import Color, Html, Json, Output
from foretoken.cli.theme import ColorMode, wide_console


def bench_table(
    target: Annotated[Path | None, typer.Option(help="Target folder. [the bundled one, widened to 0.7b]")] = None,
    draft: Annotated[Path | None, typer.Option(help="Draft folder. [the bundled one]")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="PARTS", help='Cells by parts of their name, "T=1, int8" (repeatable), in this order.'),
    ] = None,
    fixed: Annotated[
        list[str] | None,
        typer.Option(metavar="JSON", help="A fixed speculative_config to race (repeatable). [the usual ones]"),
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Prompts of a cell; larger batches run one batch.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens for each prompt.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of every system in a cell.")] = 3,
    peer_depth: Annotated[
        list[int] | None, typer.Option(min=1, help="Draft length of the peers (repeatable). [4 and 8]")
    ] = None,
    peer_method: Annotated[
        list[str] | None, typer.Option(help="Method of the peers (repeatable). [draft_model and ngram]")
    ] = None,
    peers: Annotated[str, typer.Option(help="Comma-separated, or none.")] = "transformers,openvino,vllm,llamacpp",
    record: Annotated[Path, typer.Option(help="Finished cells, which the next start skips.")] = Path(
        "bench-table.jsonl"
    ),
    as_json: Json = False,
    output: Output = None,
    html_file: Html = None,
    color: Color = ColorMode.AUTO,
) -> None:
    """Race the default beside fixed configurations and peers, over prompts, temperatures, weights and batches."""
    from foretoken import __version__, zoo
    from foretoken.bench.entrants import Pairing
    from foretoken.bench.grid import CELLS, HAND_PICKED, GridRecord, GridTask, run
    from foretoken.bench.grid_page import claims, grid_page, rich_table
    from foretoken.bench.peers.registry import chosen
    from foretoken.bench.peers.worker import start
    from foretoken.bench.setting import setting
    from foretoken.cli.generate import speculative
    from foretoken.core.errors import InvalidRequest
    from foretoken.models.formats.checkpoint import load_tokenizer
    from foretoken.propose.methods import check_method
    from foretoken.train.widen.checkpoint import scaled

    check_places(output=output, html=html_file)
    candidates = chosen(peers)
    cells = list(dict.fromkeys(cell for parts in only or [""] for cell in CELLS if not parts or cell.has(parts)))
    if not cells:
        raise InvalidRequest(f"no cell has all these parts; the cells are: {'; '.join(cell.name for cell in CELLS)}")
    if target is not None and draft is None:
        raise InvalidRequest("--target was given without --draft; name its draft too")
    pairing = Pairing(target or scaled("0.7b"), draft or zoo.path("draft"), ())
    tokenizer = load_tokenizer(pairing.target)
    picked = tuple(speculative(text) or {} for text in fixed) if fixed else HAND_PICKED
    for method in peer_method or ():
        check_method(method)
    usual = GridTask()
    depths, methods = tuple(peer_depth or usual.peer_depths), tuple(peer_method or usual.peer_methods)
    task = GridTask(count, max_tokens, repeats, picked, depths, methods)
    facts: dict[str, Any] = {"version": __version__, "target": pairing.target.name, "draft": pairing.draft.name}
    facts |= {"peers": [peer.name for peer in candidates], **asdict(task)}
    kept, console, notes = GridRecord(record, facts), wide_console(color), wide_console(color, stderr=True)

    def say(text: str) -> None:
        notes.print(text, style="yellow", markup=False, soft_wrap=True)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, verbose=False)["input_ids"])

    results = {cell: rows for cell, rows in kept.rows().items() if cell in cells}
    for cell, rows in run(cells, pairing, candidates, encode, task, kept, start, say):
        results[cell] = rows
        notes.print(f"{len(results)} of {len(cells)}: {cell.name}", markup=False)
    results = {cell: results[cell] for cell in cells}
    about = setting() | facts

    def show() -> None:
        console.print(rich_table(results))
        for claim in claims(results):
            console.print(f"The default: {claim}")

    every = [{"cell": asdict(cell), "rows": [asdict(row) for row in rows]} for cell, rows in results.items()]
    publish({"setting": about, "cells": every}, show, as_json, output)
    if html_file is not None:
        write_text(html_file, grid_page(about, results))
