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
from rich import box
from rich.table import Table

from foretoken.bench.clock import interleaved
from foretoken.bench.costs import Loaded, scoring
from foretoken.bench.setting import cores, setting, wide_console
from foretoken.cli.files import publish
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.core.native import build
from foretoken.models.runners.native.build import loaded_library, prebuilt
from foretoken.train.widen.checkpoint import scaled

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


def logits(model: Loaded, rows: int) -> torch.Tensor:
    """Returns the logits of a pass behind a short prompt."""
    handle = model.open(20)
    draft = Draft.chain(list(range(1, rows))) if rows > 1 else Draft.empty()
    with torch.inference_mode():
        scores = model.model.score([handle], [draft])[0].logits.clone()
    model.model.close(handle)
    return scores


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
            models = {SHIPPED: load()}
        with kernels_of(folder / "none"):
            models[COMPILED] = load()
        handles = {name: model.open(context) for name, model in models.items()}
        for count in rows:
            one, other = (logits(model, count) for model in models.values())
            tasks = {name: scoring(model.model, [handles[name]], count) for name, model in models.items()}
            times = {name: 1000 * spread.median for name, spread in interleaved(tasks, turns).items()}
            yield Comparison(scheme, count, times[SHIPPED], times[COMPILED], torch.equal(one, other))


def table(comparisons: Sequence[Comparison]) -> Table:
    """One line for each scheme and number of rows."""
    result = Table(box=box.MARKDOWN)
    for head in ("scheme", "rows", "wheel, ms", "compiled here, ms", "ratio", "same bits"):
        result.add_column(head, justify="left" if head == "scheme" else "right")
    for c in comparisons:
        result.add_row(
            c.scheme,
            str(c.rows),
            f"{c.wheel:.2f}",
            f"{c.compiled:.2f}",
            f"{c.ratio:.3f}",
            "yes" if c.same_bits else "no",
        )
    return result


def main(
    wheel: Annotated[Path, typer.Argument(exists=True, help="A wheel from make wheel.")],
    target: Annotated[Path | None, typer.Option(help="Checkpoint. [the bundled target, widened to 0.7b]")] = None,
    scheme: Annotated[list[str], typer.Option(help='"bf16" or a quantization; may be repeated.')] = [
        BF16, "int8", "int4",
    ],
    rows: Annotated[list[int], typer.Option(min=1, help="May be repeated.")] = [1, 4, 8, 16],
    context: Annotated[int, typer.Option(min=1, help="Tokens before them.")] = 512,
    turns: Annotated[int, typer.Option(min=1)] = 15,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write the JSON document to a file.")] = None,
) -> None:  # fmt: skip
    """Time passes with a wheel's kernels and with those compiled here, in turns. The exit code is 1 if bits differ."""
    torch.set_num_threads(cores())
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("foretoken/_kernels/")]
        archive.extractall(scratch, names)
        folder = Path(scratch) / "foretoken" / "_kernels"
        found = list(compare(folder, target or scaled("0.7b"), scheme, rows, context, turns))
    facts = setting() | {"kernels": build.require().name, "context": context}

    def show() -> None:
        console = wide_console()
        console.print(table(found))
        console.print(", ".join(f"{key} {value}" for key, value in facts.items()), style="dim")

    publish({"setting": facts, "passes": [asdict(c) | {"ratio": c.ratio} for c in found]}, show, as_json, output)
    if not all(c.same_bits for c in found):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
