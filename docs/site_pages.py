"""Hooks of MkDocs: the command line's reference from typer, in the place of ``<!-- cli -->``, and the pages that the
repository keeps beside its README.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MARKER = "<!-- cli -->"
ROOT = Path(__file__).parents[1]
ROOT_PAGES = {name: name.lower() for name in ("CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md", "CHANGELOG.md")}
REPOSITORY = "https://github.com/foretoken/foretoken/blob/main/"


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Called by MkDocs with all files: adds the pages of the repository's root."""
    from mkdocs.structure.files import File

    for name, page in ROOT_PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        text = re.sub(r"\]\((?!https://|#)([^)]+)\)", lambda link: f"]({_from_root(link[1])})", text)
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs for every page: links to pages of the root lead to their copies."""
    for name, page in ROOT_PAGES.items():
        markdown = markdown.replace(f"](../../{name}", f"](../{page}").replace(f"](../{name}", f"]({page}")
    return markdown.replace(MARKER, reference()) if MARKER in markdown else markdown


def _from_root(link: str) -> str:
    """A link of a page in the repository's root, as one of the site."""
    return ROOT_PAGES.get(link) or (link.removeprefix("docs/") if link.startswith("docs/") else REPOSITORY + link)


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
