"""Input and output of commands: standard input, and files whose folders are checked before the work begins."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from foretoken.core.artifacts import HTML, JSON, JSON_LINES, Destination
from foretoken.core.errors import InvalidRequest, WriteError
from foretoken.core.files import atomic_file


def standard_input(read: Callable[[], str]) -> str:
    """Returns the text that ``read`` gets from standard input. Raises InvalidRequest for bytes that are not text."""
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


OUTPUT_FILES = {"output": JSON, "html_file": HTML, "record": JSON_LINES}
"""The kind of file that is written, by the parameter of a command that names it."""


def check_output_files(values: Mapping[str, object]) -> None:
    """Refuses, before minutes of work, output files that are inputs of the command or hold something else.

    Args:
        values: Arguments and options of a command by the names of their parameters.

    Raises:
        InvalidRequest: An output is an input, another output, or a file of another kind, or its extra is missing.
        WriteError: It is not the name of a file in a folder that exists.
    """
    inputs = [file for name, value in values.items() if name not in OUTPUT_FILES for file in _files_in(value)]
    outputs = {name: Path(str(values[name])) for name in OUTPUT_FILES if values.get(name) is not None}
    for name, file in outputs.items():
        others = [other for other_name, other in outputs.items() if other_name != name]
        check_output_file(file, OUTPUT_FILES[name], [*inputs, *others], f"--{name.removesuffix('_file')} ")
    if "html_file" in outputs and find_spec("matplotlib") is None:
        raise InvalidRequest("--html needs matplotlib for its charts; pip install 'foretoken[report]'")


def check_output_file(file: Path, kind: str, inputs: Sequence[Path] = (), option: str = "") -> Path:
    """Returns ``file`` after checking that it may be written.

    Raises:
        InvalidRequest: It is an input, or exists and is of another kind.
        WriteError: It is not the name of a file in a folder that exists.
    """
    made_with_its_folder = kind == JSON_LINES
    if file.is_dir() or not (made_with_its_folder or file.absolute().parent.is_dir()):
        raise WriteError(f"{option}{file}: expected the name of a file in a folder that exists")
    return Destination.checked(file, kind, inputs, force=True).path


def _files_in(value: object) -> Iterator[Path]:
    """Yields the existing files and folders that the value of a parameter names.

    A text may be a path, NAME=PATH, or JSON with paths in it.
    """
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _files_in(each)
    elif isinstance(value, str | Path):
        text = str(value)
        for name in {text, text.partition("=")[2]} - {""}:
            with suppress(OSError, ValueError, RuntimeError):  # too long, or has no home folder
                if (path := Path(name).expanduser()).exists():
                    yield path
        with suppress(ValueError, RecursionError):
            if text.startswith(("{", "[")):
                yield from _files_in(json.loads(text))


def journal(output: Path | None) -> Path | None:
    """Returns the file that keeps the answers of a measurement that is under way, beside that of its result."""
    return None if output is None else check_output_file(output.with_name(output.name + ".partial"), JSON_LINES)


def json_object(option: str, text: str, expected: str = "a JSON object") -> dict[str, Any]:
    """Returns the JSON object that an option has. Raises InvalidRequest."""
    try:
        result = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"{option} is not JSON ({error}); expected {expected}") from error
    if not isinstance(result, dict):
        raise InvalidRequest(f"{option} must be a JSON object, got {text}")
    return result


def write_text(file: Path, text: str) -> None:
    """Writes text in UTF-8, whole or not at all. Raises WriteError."""
    try:
        if file.exists() and not file.is_file():  # a device or pipe
            file.write_text(text, encoding="utf-8")
        else:
            with atomic_file(file.resolve()) as partial:
                partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise WriteError(f"cannot write {file}: {error.strerror}; choose another file") from error


def write_json(file: Path, record: Any) -> None:
    """Writes indented JSON. Values that JSON has no form for are written as their text. Raises WriteError."""
    write_text(file, json.dumps(record, indent=2, default=str) + "\n")
