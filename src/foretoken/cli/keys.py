"""``foretoken keys``: the API keys of a server's key file."""

import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from foretoken.cli.grouped import grouped, option
from foretoken.cli.options import Json
from foretoken.cli.theme import ColorMode, console, wide_console
from foretoken.core.errors import InvalidRequest
from foretoken.serve.key_file import GENERATE, SCOPES, KeyRecord, digest, new_key, read_keys
from foretoken.serve.key_file import add as add_record
from foretoken.serve.key_file import revoke as revoke_record

app = typer.Typer(help="Make, list and revoke the API keys of a server's key file.")

_KNOWN = ", ".join(SCOPES)
KeyFile = Annotated[Path, typer.Argument(metavar="FILE", help="The file that foretoken serve --api-key-file reads.")]


@dataclass(frozen=True, kw_only=True)
class KeyLimits:
    """Limits of the requests with a key."""

    requests_per_minute: int | None = option(None, "Requests per minute. [no limit]", min=1)
    tokens_per_minute: int | None = option(None, "Tokens of prompts and outputs per minute. [no limit]", min=1)
    max_concurrency: int | None = option(None, "Requests at once. [no limit]", min=1)


@app.command()
@grouped
def add(
    file: KeyFile,
    name: Annotated[str, typer.Option(help="Identifies the key in logs and commands.")],
    scope: list[str] | None = option(None, f"What it may do; may be repeated: {_KNOWN}. [{GENERATE}]"),
    model: list[str] | None = option(None, "Model that it may use; may be repeated. [all]"),
    expires: str | None = option(None, "A duration such as 30d or 12h, or a date. [never]"),
    *,
    limits: KeyLimits,
) -> None:
    """Make a key and print it, once: the file keeps its hash only."""
    key, now = new_key(), datetime.now(UTC)
    record = KeyRecord(
        name=name,
        sha256=digest(key).hex(),
        created=now.isoformat(timespec="seconds"),
        expires=_expiry(expires, now),
        scopes=tuple(scope or [GENERATE]),
        models=tuple(model) if model else None,
        **vars(limits),
    )
    add_record(file, record)
    print(key)


@app.command("list")
def list_keys(file: KeyFile, as_json: Json = False) -> None:
    """List the keys of a file, without their hashes."""
    records = read_keys(file)
    if as_json:
        names = [name for name in KeyRecord.__dataclass_fields__ if name != "sha256"]
        print(json.dumps({"keys": [{name: getattr(record, name) for name in names} for record in records]}))
        return
    heads = ("name", "scopes", "models", "expires", "requests/min", "tokens/min", "at once")
    table = Table(*heads, box=box.SIMPLE)
    for record in records:
        limits = (record.requests_per_minute, record.tokens_per_minute, record.max_concurrency)
        expired = record.expiry() <= datetime.now(UTC).timestamp()
        table.add_row(
            record.name,
            " ".join(record.scopes),
            escape(" ".join(record.models or ["all"])),
            f"{record.expires or 'never'}{' (expired)' if expired else ''}",
            *("" if limit is None else str(limit) for limit in limits),
        )
    wide_console(ColorMode.AUTO).print(table)


@app.command()
def revoke(file: KeyFile, name: Annotated[str, typer.Argument(metavar="NAME", help="The key's name.")]) -> None:
    """Remove a key. A running server refuses it within a second of its next request."""
    revoke_record(file, name)
    console(ColorMode.AUTO, stderr=True).print(f"{name} is revoked", markup=False)


def _expiry(text: str | None, now: datetime) -> str | None:
    """Returns the time that --expires names, in ISO 8601. Raises InvalidRequest."""
    if text is None:
        return None
    units = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
    if match := re.fullmatch(r"([0-9]{1,5})([mhdw])", text):
        return (now + timedelta(**{units[match[2]]: int(match[1])})).isoformat(timespec="seconds")
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(f"--expires must be a duration such as 30d or 12h, or a date, got {text!r}") from None
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    if when <= now:
        raise InvalidRequest(f"--expires must be in the future, got {text!r}")
    return when.isoformat(timespec="seconds")
