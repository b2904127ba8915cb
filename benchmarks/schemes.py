"""Time of a pass by rows for weight schemes in turns, beside what memory and the multipliers allow at best.

A scheme is "bf16", a quantization ("int8", "int4", "int4-g64"), or a GGUF file. Every round times each scheme at each
number of rows, then reads as many bytes as its weights take, and runs as many vpdpbusd instructions as its products
need. A pass cannot take less than the larger of the two.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.table import Table

from foretoken import zoo
from foretoken.bench.clock import TimedTask, interleaved
from foretoken.bench.costs import Loaded, scoring
from foretoken.bench.floor import matrices
from foretoken.bench.setting import cores, setting, wide_console
from foretoken.core.errors import InvalidRequest
from foretoken.core.native.build import compiled
from foretoken.models.runners.native.runner import NativeRunner
from foretoken.train.widen.checkpoint import scaled

PRODUCTS = 64  # of one vpdpbusd
BF16 = "bf16"


@dataclass(frozen=True)
class KernelTimes:
    """Medians of one scheme and number of rows, in milliseconds.

    Attributes:
        read: of reading the weights once.
        multiply: of the products' vpdpbusd instructions alone; None for bfloat16.
    """

    scheme: str
    rows: int
    megabytes: float
    pass_: float
    over_one: float
    read: float
    multiply: float | None


def load(target: Path, scheme: str) -> Loaded:
    """Loads the target in a scheme. Raises InvalidRequest if it does not run on the compiled kernels."""
    if scheme.endswith(".gguf"):
        loaded = Loaded.of(Path(scheme))
    else:
        loaded = Loaded.of(target, "" if scheme == BF16 else scheme)
    if not isinstance(getattr(loaded.model, "runner", None), NativeRunner):
        raise InvalidRequest(f"{scheme} does not run on the compiled kernels here")
    return loaded


def measure(target: Path, schemes: Sequence[str], rows: Sequence[int], context: int, turns: int) -> list[KernelTimes]:
    """Times all schemes and numbers of rows in rotating order."""
    floors = ctypes.CDLL(str(compiled(Path(__file__).parent / "floors.cpp", ("-mavx512vnni",))))
    floors.read_memory.restype = floors.multiply.restype = None
    models = {scheme: load(target, scheme) for scheme in schemes}
    sizes = {
        scheme: Path(scheme).stat().st_size if scheme.endswith(".gguf") else loaded.weights_bytes
        for scheme, loaded in models.items()
    }
    memory = torch.ones(max(sizes.values()) // 8 + 1024, dtype=torch.int64)
    tasks: dict[tuple[str, str, int], TimedTask] = {}
    for scheme, loaded in models.items():
        handle = loaded.open(context)
        read = partial(floors.read_memory, ctypes.c_void_p(memory.data_ptr()), ctypes.c_int64(sizes[scheme]), cores())
        tasks["read", scheme, 0] = TimedTask(read)
        products = sum(outputs * inputs for outputs, inputs in matrices(loaded.config))
        for count in rows:
            tasks["pass", scheme, count] = scoring(loaded.model, [handle], count)
            if scheme != BF16:
                instructions = ctypes.c_int64(products * count // PRODUCTS)
                tasks["multiply", scheme, count] = TimedTask(partial(floors.multiply, instructions, cores()))
    times = {key: 1000 * spread.median for key, spread in interleaved(tasks, turns).items()}
    return [
        KernelTimes(
            scheme,
            count,
            sizes[scheme] / 1e6,
            times["pass", scheme, count],
            times["pass", scheme, count] / times["pass", scheme, rows[0]],
            times["read", scheme, 0],
            times.get(("multiply", scheme, count)),
        )
        for scheme in schemes
        for count in rows
    ]


def table(times: Sequence[KernelTimes]) -> Table:
    """One line for each scheme and number of rows."""
    result = Table(box=box.MARKDOWN)
    for head in ("scheme", "MB", "rows", "ms", "over the first", "reading, ms", "vpdpbusd alone, ms"):
        result.add_column(head, justify="left" if head == "scheme" else "right")
    for t in times:
        alone = "" if t.multiply is None else f"{t.multiply:.1f}"
        name = Path(t.scheme).name
        result.add_row(
            name, f"{t.megabytes:.0f}", str(t.rows), f"{t.pass_:.1f}", f"{t.over_one:.2f}", f"{t.read:.1f}", alone
        )
    return result


def main(
    target: Annotated[Path | None, typer.Option(help="Checkpoint. [the bundled target, widened to 0.7b]")] = None,
    scheme: Annotated[list[str], typer.Option(help='"bf16", a quantization, a GGUF file; may be repeated.')] = [
        BF16, "int8", "int4", "int4-g64",
    ],
    rows: Annotated[list[int], typer.Option(min=1, help="May be repeated.")] = [1, 4, 8, 16],
    context: Annotated[int, typer.Option(min=1, help="Tokens before them.")] = 512,
    turns: Annotated[int, typer.Option(min=1)] = 15,
    small: Annotated[bool, typer.Option("--small", help="The bundled target as it is.")] = False,
    json_file: Annotated[Path | None, typer.Option("--output", help="Write setting and times here.")] = None,
) -> None:  # fmt: skip
    """Time passes of each scheme in turns, beside reading the weights and their vpdpbusd instructions alone."""
    torch.set_num_threads(cores())
    times = measure(target or (zoo.path("target") if small else scaled("0.7b")), scheme, rows, context, turns)
    console = wide_console()
    console.print(table(times))
    facts = setting() | {"context": context}
    console.print(", ".join(f"{key} {value}" for key, value in facts.items()), style="dim")
    if json_file is not None:
        record = {"setting": facts, "times": [asdict(each) for each in times]}
        json_file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
