"""Output of a benchmark: tables of figures, the setting of the run, and its record as JSON."""

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from foretoken.core.threads import read_or_empty, usable_threads

T = TypeVar("T")


def cores() -> int:
    """Returns the number of cores to compute on: ``OMP_NUM_THREADS``, or all that this process may use."""
    return usable_threads()


def setting() -> dict[str, Any]:
    """Returns the facts that make a result repeatable."""
    import torch
    import transformers

    import foretoken

    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": processor(),
        "cores": cores(),
        **gpu,
        "memory_gib": round(memory("MemTotal") / 2**30, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "foretoken": foretoken.__version__,
        "command": command(sys.argv),
    }


@contextmanager
def busy_programs(count: int) -> Iterator[None]:
    """Runs ``count`` programs that compute all the time, within the ``with`` block."""
    with ExitStack() as stack:
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


def command(argv: list[str]) -> str:
    """Returns the command line as a reader would type it."""
    program = Path(argv[0])
    installed = program.stem in ("foretoken", "__main__", "main")
    return shlex.join([*(["foretoken"] if installed else ["python", argv[0]]), *argv[1:]])


def processor() -> str:
    """Returns the processor's name, or its architecture where the name is hidden."""
    lines = read_or_empty(Path("/proc/cpuinfo")).splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def memory(what: str) -> int:
    """Returns bytes of ``MemTotal`` or ``MemAvailable`` (machine), or ``VmHWM`` (peak of this process); 0 if hidden."""
    file = Path("/proc/self/status" if what.startswith("Vm") else "/proc/meminfo")
    sizes = (line.split()[1] for line in read_or_empty(file).splitlines() if line.startswith(f"{what}:"))
    return int(next(sizes, "0")) * 1024


def resident_bytes(process: int) -> int:
    """Returns the resident memory of a process, with the files that it maps; 0 if it has ended."""
    pages = read_or_empty(Path(f"/proc/{process}/statm")).split()
    return int(pages[1]) * os.sysconf("SC_PAGESIZE") if pages else 0


_FIGURE = "0123456789+-."  # first characters of a figure


def wide_console() -> Console:
    """Returns a console that does not fold tables in a pipe or file."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=140)


def progress(items: Iterable[T], title: str) -> Iterable[T]:
    """Yields the items, with a progress bar on standard error."""
    return track(items, title, console=Console(stderr=True), transient=True)


def figures(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Returns a table in Markdown. Columns of figures are aligned to the right, other columns to the left.

    rows: Cells of each row, which are printed as ``str`` has them.
    """
    lines = [[str(cell) for cell in row] for row in rows]
    table = Table(box=box.MARKDOWN)
    for column, head in enumerate(heads):
        numeric = all(line[column][:1] in _FIGURE for line in lines)
        table.add_column(head, justify="right" if numeric else "left", overflow="fold")
    for line in lines:
        table.add_row(*line)
    return table


def listing(columns: Mapping[str, str], records: Iterable[Mapping[str, Any]]) -> Table:
    """Returns a table of records.

    Args:
        columns: The format of each column over a record's fields, such as "{seconds:.2f}", by the column's head.
        records: Fields by name. A cell is empty if a field of its format is missing or None.
    """
    return figures(list(columns), ([_cell(form, each) for form in columns.values()] for each in records))


def _cell(form: str, record: Mapping[str, Any]) -> str:
    try:
        return form.format_map({name: value for name, value in record.items() if value is not None})
    except KeyError:
        return ""


def report(parts: Iterable[Table | str], facts: Mapping[str, Any], file: Path | None, **record: Any) -> None:
    """Prints the result of a run with its setting, and writes both to ``file`` as JSON.

    facts: Facts of the run besides machine, versions, date and command. record: Results by name, beside "setting" in
    the file.
    """
    console, facts = wide_console(), setting() | dict(facts)
    for part in parts:
        console.print(part, markup=False, soft_wrap=isinstance(part, str))
    console.print(", ".join(f"{key} {value}" for key, value in facts.items()), style="dim", markup=False)
    if file is not None:
        text = json.dumps({"setting": facts, **record}, indent=2, default=str, ensure_ascii=False)
        file.write_text(text + "\n", encoding="utf-8")
