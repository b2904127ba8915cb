"""Time of a pass by rows for weight schemes in turns, beside what memory and the multipliers allow at best.

A scheme is "bf16", a quantization ("int8", "int4", "int4-g64"), or a GGUF file. Every round times each scheme at each
number of rows, then reads as many bytes as its weights take, and runs as many vpdpbusd instructions as its products
need. A pass cannot take less than the larger of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

from foretoken.bench.clock import TimedTask, interleaved
from foretoken.bench.costs import Loaded, matrices, scoring
from foretoken.bench.output import figures, report
from foretoken.bench.setting import cores
from foretoken.core.errors import InvalidRequest
from foretoken.models.runners.native.runner import NativeRunner
from kernels import Floors
from options import Output, Rows, Small, Target, Turns, target_path

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
    models = {scheme: load(target, scheme) for scheme in schemes}
    sizes = {
        scheme: Path(scheme).stat().st_size if scheme.endswith(".gguf") else loaded.weights_bytes
        for scheme, loaded in models.items()
    }
    floors = Floors(max(sizes.values()), "-mavx512vnni")
    tasks: dict[tuple[str, str, int], TimedTask] = {}
    for scheme, loaded in models.items():
        handle = loaded.open(context)
        tasks["read", scheme, 0] = floors.reading(sizes[scheme])
        products = sum(outputs * inputs for outputs, inputs in matrices(loaded.config))
        for count in rows:
            tasks["pass", scheme, count] = scoring(loaded.model, [handle], count)
            if scheme != BF16:
                tasks["multiply", scheme, count] = floors.multiplying(products * count)
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
    """Returns a table with a line for each scheme and number of rows."""
    rows = [
        (
            *(Path(t.scheme).name, f"{t.megabytes:.0f}", t.rows, f"{t.pass_:.1f}", f"{t.over_one:.2f}"),
            *(f"{t.read:.1f}", "" if t.multiply is None else f"{t.multiply:.1f}"),
        )
        for t in times
    ]
    return figures(("scheme", "MB", "rows", "ms", "over the first", "reading, ms", "vpdpbusd alone, ms"), rows)


def main(
    target: Target = None,
    scheme: Annotated[list[str], typer.Option(help='"bf16", a quantization, a GGUF file; may be repeated.')] = [
        BF16, "int8", "int4", "int4-g64",
    ],
    rows: Rows = [1, 4, 8, 16],
    context: Annotated[int, typer.Option(min=1, help="Tokens before them.")] = 512,
    turns: Turns = 15,
    small: Small = False,
    output: Output = None,
) -> None:  # fmt: skip
    """Time passes of each scheme in turns, beside reading the weights and their vpdpbusd instructions alone."""
    torch.set_num_threads(cores())
    times = measure(target_path(target, small), scheme, rows, context, turns)
    report([table(times)], {"context": context}, output, times=[asdict(each) for each in times])


if __name__ == "__main__":
    typer.run(main)
