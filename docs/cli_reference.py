"""A hook of MkDocs that writes the command line's reference from typer, in the place of ``<!-- cli -->``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MARKER = "<!-- cli -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs for every page."""
    return markdown.replace(MARKER, reference()) if MARKER in markdown else markdown


def reference() -> str:
    """The commands, their arguments and options, as Markdown."""
    import typer.main

    from foretoken.cli.main import app

    root = typer.main.get_command(app)
    return "\n".join(line for name, command in root.commands.items() for line in _command(command, f"foretoken {name}"))


def _command(command: Any, name: str) -> Iterator[str]:
    context = command.context_class(command, info_name=name)
    yield f"{'#' * len(name.split())} {name}\n"
    yield f"{(command.help or '').strip()}\n"
    children = getattr(command, "commands", {})
    if not children:
        yield f"    {name} {' '.join(command.collect_usage_pieces(context))}\n"
    records = [parameter.get_help_record(context) for parameter in command.params if not parameter.hidden]
    rows = [record for record in records if record is not None]
    if rows:
        yield "| argument or option | meaning |\n|---|---|"
        yield from (f"| `{flags}` | {_cell(text)} |" for flags, text in rows)
        yield ""
    for child, each in children.items():
        yield from _command(each, f"{name} {child}")


def _cell(text: str) -> str:
    """``text`` as it is, on one line of a table."""
    escaped = " ".join(text.split()).replace("\\", "\\\\")
    for character in "|*_`<[":
        escaped = escaped.replace(character, f"\\{character}")
    return escaped
