"""``foretoken zoo``: the bundled models."""

from __future__ import annotations

from foretoken.cli.options import Json
from foretoken.cli.theme import ColorMode, wide_console


def zoo(as_json: Json = False) -> None:
    """List the bundled models: name, role, size, path and card."""
    import json

    from foretoken.zoo import list_models

    models = list_models()
    if as_json:
        print(json.dumps([vars(m) | {"path": str(m.path)} for m in models], indent=2))
        return
    if not models:
        print("no bundled models in this installation; 'foretoken train target' makes one")
        return

    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for title in ("name", "role", "parameters", "size", "path"):
        table.add_column(title, justify="right" if title in ("parameters", "size") else "left", overflow="fold")
    for m in models:
        table.add_row(m.name, m.role, f"{m.parameters / 1e6:.1f} M", f"{m.size_bytes / 1e6:.1f} MB", str(m.path))
    wide_console(ColorMode.AUTO).print(table)
    print("cards: README.md in each folder, or foretoken zoo --json")
