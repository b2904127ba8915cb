"""Are a wheel's kernels as fast as those that this machine's compiler makes? Times passes with both in turns.

The wheel must be built from these sources (``make wheel``); its kernels are compiled by Zig. Logits are compared bit
for bit on the way.
"""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated
from unittest.mock import patch

import torch
import typer
from rich.table import Table

from foretoken.bench.costs import Loaded
from foretoken.bench.output import figures, report
from foretoken.bench.setting import cores
from foretoken.core.errors import InvalidRequest
from foretoken.core.native import build
from foretoken.models.runners.native.build import loaded_library, prebuilt
from kernels import pass_times
from options import AsJson, Output, Rows, Target, Turns, target_path

BF16 = "bf16"
SHIPPED, COMPILED = "wheel", "compiled here"


@dataclass(frozen=True)
class Comparison:
    """Medians of passes over some rows, in milliseconds."""

    scheme: str
    rows: int
    wheel: float
    compiled: float
    same_bits: bool

    @property
    def ratio(self) -> float:
        """The wheel's time over that of kernels compiled here."""
        return self.wheel / self.compiled


@contextmanager
def kernels_of(folder: Path) -> Iterator[None]:
    """Models that are loaded meanwhile take the libraries in ``folder``; those that it lacks are compiled."""
    loaded_library.cache_clear()
    with patch.object(build, "SHIPPED", folder):
        yield
    loaded_library.cache_clear()


def compare(
    folder: Path, target: Path, schemes: Sequence[str], rows: Sequence[int], context: int, turns: int
) -> Iterator[Comparison]:
    """Yields one comparison for each scheme and number of rows. folder: the wheel's libraries."""
    level = build.require()
    with kernels_of(folder):
        if not prebuilt(level):
            raise InvalidRequest(
                f"the wheel has no kernels of {level.name} from these sources; build it with make wheel"
            )
    for scheme in schemes:
        load = partial(Loaded.of, target, "" if scheme == BF16 else scheme, weight_format="auto")
        with kernels_of(folder):
            models = {SHIPPED: load().model}
        with kernels_of(folder / "none"):
            models[COMPILED] = load().model
        for row in pass_times(models, rows, context, turns):
            milliseconds = {name: 1000 * seconds for name, seconds in row["seconds"].items()}
            yield Comparison(scheme, row["rows"], milliseconds[SHIPPED], milliseconds[COMPILED], row["same_bits"])


def table(comparisons: Sequence[Comparison]) -> Table:
    """Returns a table with a line for each scheme and number of rows."""
    rows = [
        (c.scheme, c.rows, f"{c.wheel:.2f}", f"{c.compiled:.2f}", f"{c.ratio:.3f}", "yes" if c.same_bits else "no")
        for c in comparisons
    ]
    return figures(("scheme", "rows", "wheel, ms", "compiled here, ms", "ratio", "same bits"), rows)


def main(
    wheel: Annotated[Path, typer.Argument(exists=True, help="A wheel from make wheel.")],
    target: Target = None,
    scheme: Annotated[list[str], typer.Option(help='"bf16" or a quantization; may be repeated.')] = [
        BF16, "int8", "int4",
    ],
    rows: Rows = [1, 4, 8, 16],
    context: Annotated[int, typer.Option(min=1, help="Tokens before them.")] = 512,
    turns: Turns = 15,
    as_json: AsJson = False,
    output: Output = None,
) -> None:  # fmt: skip
    """Time passes with a wheel's kernels and with those compiled here, in turns. The exit code is 1 if bits differ."""
    torch.set_num_threads(cores())
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("foretoken/_kernels/")]
        archive.extractall(scratch, names)
        folder = Path(scratch) / "foretoken" / "_kernels"
        result = list(compare(folder, target_path(target), scheme, rows, context, turns))
    facts = {"kernels": build.require().name, "context": context}
    report([table(result)], facts, output, as_json, passes=[asdict(c) | {"ratio": c.ratio} for c in result])
    if not all(c.same_bits for c in result):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
