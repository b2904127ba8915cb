"""``foretoken drafts``: the published drafters of a model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from foretoken.cli.options import Json
from foretoken.cli.theme import ColorMode, print_parts, wide_console

if TYPE_CHECKING:
    from foretoken.models.heads.published import FoundDrafter


def drafts(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Target model: a folder, GGUF file or hub name.")],
    as_json: Json = False,
) -> None:
    """List the published drafters of a model, and those that are on this machine. Downloads nothing."""
    from foretoken.models.heads.published import published_drafters

    found = published_drafters(model)
    if as_json:
        print(json.dumps([_record(drafter) for drafter in found], indent=2))
    else:
        print_parts(wide_console(ColorMode.AUTO), _parts(model, found))


def _record(drafter: FoundDrafter) -> dict[str, Any]:
    row, path = drafter.row, None if drafter.path is None else str(drafter.path)
    facts = {name: getattr(row, name) for name in ("target", "form", "method", "licence", "source")}
    return {"drafter": row.name, **facts, "place": drafter.place, "path": path}


def _parts(model: str, found: list[FoundDrafter]) -> Iterator[Any]:
    if not found:
        yield f"no drafter of {escape(model)} is known; any model with the same tokenizer may draft: --draft-model NAME"
        return
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("drafter", "target", "form", "licence", "place", "source"):
        table.add_column(title, overflow="fold")
    for row, place in ((drafter.row, drafter.place) for drafter in found):
        table.add_row(row.name, row.target, row.form, row.licence, place, row.source)
    yield table
    yield "use one: --draft-model NAME, which downloads it; the first one that is here: --draft-model auto"
