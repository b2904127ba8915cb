"""Output of a benchmark: tables of figures, the setting of the run, and its record as JSON."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from foretoken.bench.setting import setting

_FIGURE = "0123456789+-."  # first characters of a figure


def wide_console() -> Console:
    """Returns a console that does not fold tables in a pipe or file."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=140)


def figures(heads: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None) -> Table:
    """Returns a table in Markdown. Columns of figures are aligned to the right, other columns to the left.

    Args:
        heads: Heads of the columns.
        rows: Cells of each row, which are printed as ``str`` has them.
        title: A line above the table.
    """
    lines = [[str(cell) for cell in row] for row in rows]
    table = Table(box=box.MARKDOWN, title=title)
    for column, head in enumerate(heads):
        numeric = all(line[column][:1] in _FIGURE for line in lines)
        table.add_column(head, justify="right" if numeric else "left", overflow="fold")
    for line in lines:
        table.add_row(*line)
    return table


def listing(columns: Mapping[str, str], records: Iterable[Mapping[str, Any]], title: str | None = None) -> Table:
    """Returns a table of records.

    Args:
        columns: The format of each column over a record's fields, such as "{seconds:.2f}", by the column's head.
        records: Fields by name. A cell is empty if a field of its format is missing or None.
        title: A line above the table.
    """
    return figures(list(columns), ([_cell(form, each) for form in columns.values()] for each in records), title)


def _cell(form: str, record: Mapping[str, Any]) -> str:
    try:
        return form.format_map({name: value for name, value in record.items() if value is not None})
    except KeyError:
        return ""


def report(
    parts: Iterable[Table | str],
    facts: Mapping[str, Any],
    file: Path | None,
    as_json: bool = False,
    **record: Any,
) -> None:
    """Prints the result of a run with its setting, and writes both to ``file`` as JSON.

    Args:
        parts: Tables and lines to print.
        facts: Facts of the run besides machine, versions, date and command.
        file: The JSON file; None writes none.
        as_json: Whether to print the JSON document instead of the parts.
        record: Results by name, beside "setting" in the file.
    """
    console, facts = wide_console(), setting() | dict(facts)
    text = json.dumps({"setting": facts, **record}, indent=2, default=str, ensure_ascii=False)
    if as_json:
        console.file.write(text + "\n")
    else:
        for part in parts:
            console.print(part, markup=False, soft_wrap=isinstance(part, str))
        console.print(", ".join(f"{key} {value}" for key, value in facts.items()), style="dim", markup=False)
    if file is not None:
        file.write_text(text + "\n", encoding="utf-8")
