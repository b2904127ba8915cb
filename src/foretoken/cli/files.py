"""Input and output of commands: standard input, and files whose folders are checked before the work begins."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from foretoken.core.errors import InvalidRequest, WriteError


def standard_input(read: Callable[[], str]) -> str:
    """Returns what ``read`` reads of standard input. Raises InvalidRequest for bytes that are not text."""
    try:
        text = read()
        text.encode()  # half of a surrogate pair stands for a byte that could not be decoded
    except UnicodeDecodeError as error:
        raise _no_text(error.object[error.start], error.start) from error
    except UnicodeEncodeError as error:
        raise _no_text(ord(error.object[error.start]) & 0xFF, error.start) from error
    return text


def _no_text(byte: int, position: int) -> InvalidRequest:
    encoding = getattr(sys.stdin, "encoding", None) or "utf-8"
    return InvalidRequest(
        f"standard input is not text in {encoding}: byte 0x{byte:02x} at position {position}; convert it first, "
        "with iconv for instance"
    )


def check_places(**files: Path | None) -> None:
    """Raises WriteError, before minutes of work, for a file that cannot be written. files: by the option's name."""
    for option, file in files.items():
        if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
            raise WriteError(f"--{option} {file}: expected the name of a file in a folder that exists")


def journal(output: Path | None) -> Path | None:
    """Returns the file that keeps the answers of a measurement that is under way, beside that of its result."""
    return None if output is None else output.with_name(output.name + ".partial")


def check_alone(options: Mapping[str, object]) -> None:
    """Raises InvalidRequest for an option of a server's audit or plan where there is no server."""
    if given := [name for name, value in options.items() if value]:
        raise InvalidRequest(f"{given[0]} goes with --endpoint URL; name the server, or leave it out")


def check_served(options: Mapping[str, bool]) -> None:
    """Raises InvalidRequest for an option that says nothing about a server. options: by name, whether it was given."""
    if given := [name for name, value in options.items() if value]:
        raise InvalidRequest(f"{given[0]} does not go with --endpoint; leave it or --endpoint out")


def json_object(option: str, text: str, expected: str = "a JSON object") -> dict[str, Any]:
    """Returns the JSON object that an option has. Raises InvalidRequest."""
    try:
        result = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"{option} is not JSON ({error}); expected {expected}") from error
    if not isinstance(result, dict):
        raise InvalidRequest(f"{option} must be a JSON object, got {text}")
    return result


def publish(record: Any, show: Callable[[], object], as_json: bool, output: Path | None) -> None:
    """Prints a result as one JSON document or, by ``show``, as text, and writes the document to ``output``.

    Raises:
        WriteError: The file cannot be written.
    """
    if as_json:
        print(json.dumps(record, indent=2, default=str))
    else:
        show()
    if output is not None:
        write_json(output, record)


def write_text(file: Path, text: str) -> None:
    """Writes text in UTF-8. Raises WriteError."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise WriteError(f"cannot write {file}: {error.strerror}; choose another file") from error


def write_json(file: Path, record: Any) -> None:
    """Writes indented JSON. Values that JSON has no form for are written as their text. Raises WriteError."""
    write_text(file, json.dumps(record, indent=2, default=str) + "\n")
