"""What a scheme costs in accuracy: held-out loss and total variation from bfloat16, on the runtime itself.

    python benchmarks/quantization.py --output quantization.json

Schemes are rounded on loading, by ``foretoken quantize`` and by ``foretoken quantize --calibration`` on training text.
Folders include the vocabulary head (``--lm-head``), as rounding on loading does.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from foretoken import zoo
from foretoken.bench.setting import wide_console
from foretoken.core.draft import Draft
from foretoken.models.base import Model
from foretoken.models.formats.checkpoint import load_tokenizer
from foretoken.models.loading import load_model
from foretoken.models.options import QUANTIZATIONS
from foretoken.quantize import quantize_checkpoint
from foretoken.train.data import Corpus, encode, held_out_batches, standard_library

FOLDERS = ("int8", "int4", "int4-g64", "int4-g128")
FILES = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0", "Q3_K_M")


@dataclass(frozen=True)
class Accuracy:
    """One way to store the model; bytes are None where nothing was written."""

    scheme: str
    rounding: str
    loss: float
    total_variation: float
    bytes: int | None


def logits(model: Model, windows: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the log-probabilities [T - 1, V] of each window."""
    for window in windows.tolist():
        handle = model.open(window[:1])
        scores = model.score([handle], [Draft.chain(window[1:])])[0].logits[:-1]
        model.close(handle)
        yield scores.float().log_softmax(-1)


def distance(model: Model, windows: torch.Tensor, exact: list[torch.Tensor]) -> tuple[float, float]:
    """Returns the loss in nats per token, and the mean total variation from ``exact``."""
    loss = variation = 0.0
    for window, own, other in zip(windows, logits(model, windows), exact, strict=True):
        loss += float(F.nll_loss(own, window[1:])) / len(windows)
        variation += float((own.exp() - other.exp()).abs().sum(-1).mean()) / 2 / len(windows)
    return loss, variation


def calibration_text(corpus: Corpus, characters: int) -> str:
    """Returns the beginnings of training files, all together of so many characters."""
    return "\n".join(text[:4000] for text in corpus.train)[:characters]


def ways(model: str, schemes: list[str], text: str, folder: Path) -> Iterator[tuple[str, str, str | Path, str | None]]:
    """Yields scheme, rounding, what to load and the quantization to load it with."""
    yield "bfloat16", "", model, None
    for scheme in schemes:
        if scheme in QUANTIZATIONS:
            yield scheme, "on loading", model, scheme
        for rounding, calibration in (("nearest", None), ("GPTQ", text)):
            if scheme in ("int8", "Q8_0") and calibration:
                continue  # nothing to gain
            out = folder / (f"{scheme}.gguf" if scheme in FILES else scheme)
            quantize_checkpoint(model, out, scheme, calibration, lm_head=True, force=True)
            yield scheme, rounding, out, None


def main(
    model: Annotated[str, typer.Option(help="A checkpoint's folder. [the bundled target]")] = "",
    scheme: Annotated[list[str], typer.Option(help="A scheme; may be repeated.")] = [*FOLDERS, *FILES],
    windows: Annotated[int, typer.Option(min=1, help="Held-out windows of 512 tokens.")] = 40,
    characters: Annotated[int, typer.Option(min=1, help="Of the calibration text.")] = 250_000,
    output: Annotated[Path | None, typer.Option(help="Write the rows here.")] = None,
) -> None:
    """Loss and total variation from bfloat16 of each scheme."""
    checkpoint = model or str(zoo.path("target"))
    corpus, console = standard_library(), Console(stderr=True)
    stream = encode(corpus.held_out, load_tokenizer(checkpoint))
    held_out = torch.cat(held_out_batches(stream, 1, 512))[:windows].long()
    text = calibration_text(corpus, characters)
    rows: list[Accuracy] = []
    exact: list[torch.Tensor] = []
    with tempfile.TemporaryDirectory() as folder:
        every = ways(checkpoint, scheme, text, Path(folder))
        for name, rounding, path, quantization in track(every, "quantization", console=console):
            loaded = load_model(path, "bfloat16", "cpu", quantization=quantization)
            if not exact:
                exact = list(logits(loaded, held_out))
            files = [Path(path)] if Path(path).is_file() else list(Path(path).glob("*.safetensors"))
            size = sum(file.stat().st_size for file in files) if quantization is None else None
            rows.append(Accuracy(name, rounding, *distance(loaded, held_out, exact), size))
            if output is not None:
                record = json.dumps([asdict(row) for row in rows], indent=2)
                output.write_text(record + "\n", encoding="utf-8")
    table = Table("scheme", "rounding", "loss", "total variation", "MB", box=box.MARKDOWN)
    for r in rows:
        megabytes = "" if r.bytes is None else f"{r.bytes / 1e6:.1f}"
        table.add_row(r.scheme, r.rounding, f"{r.loss:.4f}", f"{r.total_variation:.4f}", megabytes)
    wide_console().print(table)


if __name__ == "__main__":
    typer.run(main)
