"""Accuracy of each scheme: held-out loss and total variation from bfloat16, on the runtime itself.

    python benchmarks/quantization.py --output quantization.json

Schemes are rounded on loading, by ``foretoken quantize`` and by ``foretoken quantize --calibration`` on training text.
Folders include the vocabulary head (``--lm-head``), as rounding on loading does. "AWQ" is the scale search of AWQ
(2306.00978) on the same text, for comparison: each matrix has its own scales for its inputs, more freedom than a
checkpoint has where matrices share an input, and its rounded weights are multiplied in floats.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import track
from torch import Tensor

from foretoken import zoo
from foretoken.bench.output import listing, wide_console
from foretoken.core.draft import Draft
from foretoken.models.base import Model
from foretoken.models.formats.checkpoint import load_tokenizer, resolve
from foretoken.models.loading import load_model
from foretoken.models.options import QUANTIZATIONS
from foretoken.quantize import quantize_checkpoint
from foretoken.quantize.folder import FolderWriter, copy_files
from foretoken.quantize.rounding import Grid, Rounding, symmetric_scales
from foretoken.quantize.run import stream
from foretoken.quantize.schemes import Scheme
from foretoken.quantize.source import HEAD, SourceCheckpoint
from foretoken.train.data import Corpus, encode, held_out_batches, standard_library
from options import Output

COLUMNS = {
    "scheme": "{scheme}",
    "rounding": "{rounding}",
    "loss": "{loss:.4f}",
    "total variation": "{total_variation:.4f}",
    "MB": "{megabytes:.1f}",
}
FOLDERS = ("int8", "int4", "int4-g64", "int4-g128")
FILES = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0", "Q3_K_M")


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
    """Returns the beginnings of training files, ``characters`` in total."""
    return "\n".join(text[:4000] for text in corpus.train)[:characters]


class ScaledWriter(FolderWriter):
    """Writes floats: matrices of a calibrated layer rounded to four bits after their inputs were scaled as AWQ does."""

    def __init__(self, out: Path, config: dict[str, Any], group: int, lm_head: bool) -> None:
        super().__init__(out, config | {"tie_word_embeddings": not lm_head}, Scheme.of("float32"), lm_head)
        self._group, self._lm_head = group, lm_head

    def put(self, name: str, tensor: Tensor, rounding: Rounding) -> Tensor:
        if tensor.ndim == 2 and rounding.importance is not None:
            tensor = scaled_rounding(tensor.float(), self._group, rounding.importance)
        elif name == HEAD and self._lm_head:
            tensor = rounded(tensor.float(), self._group)
        return super().put(name, tensor, Rounding())


def rounded(weights: Tensor, group: int) -> Tensor:
    """Returns weights [out, in] rounded to the nearest of four bits, with scales of least squared error."""
    x = weights.unflatten(1, (-1, group))
    grid = Grid(symmetric_scales(x, -8, torch.ones_like(x)).half().float(), -8, 7, group)
    return grid.values(grid.codes(weights))


def scaled_rounding(weights: Tensor, group: int, importance: Tensor) -> Tensor:
    """Returns weights [out, in] rounded after input i was divided by importance[i] ** (share / 2), at the best share.

    importance: mean square of each input [in]; an error of a weight costs in its proportion.
    """
    best, lowest = weights, float("inf")
    for share in (step / 10 for step in range(11)):
        scales = importance.clamp_min(1e-12).pow(share / 2)
        scales = scales / (scales.max() * scales.min()).sqrt()
        values = rounded(weights * scales, group) / scales
        error = float(((values - weights).square() * importance).sum())
        if error < lowest:
            best, lowest = values, error
    return best


def write_scaled(model: str, out: Path, scheme: str, text: str) -> None:
    """Writes the model with weights rounded after AWQ's scaling, as a folder of floats."""
    source = SourceCheckpoint.open(resolve(model), Scheme.of(scheme))
    out.mkdir()
    copy_files(source.path, out)
    quantizer = Scheme.of(scheme).quantizer
    assert quantizer is not None and quantizer.group is not None
    writer = ScaledWriter(out, source.config, quantizer.group, lm_head=True)
    stream(source, writer, source.calibration(text, Scheme.of(scheme)), lm_head=True)
    writer.finish()


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
        if scheme in QUANTIZATIONS and scheme != "int8":
            write_scaled(model, folder / f"{scheme}-scaled", scheme, text)
            yield scheme, "AWQ", folder / f"{scheme}-scaled", None


def main(
    model: Annotated[str, typer.Option(help="A checkpoint's folder. [the bundled target]")] = "",
    scheme: Annotated[list[str], typer.Option(help="A scheme; may be repeated.")] = [*FOLDERS, *FILES],
    windows: Annotated[int, typer.Option(min=1, help="Held-out windows of 512 tokens.")] = 40,
    characters: Annotated[int, typer.Option(min=1, help="Of the calibration text.")] = 250_000,
    output: Output = None,
) -> None:
    """Loss and total variation from bfloat16 of each scheme."""
    checkpoint = model or str(zoo.path("target"))
    corpus, console = standard_library(), Console(stderr=True)
    stream = encode(corpus.held_out, load_tokenizer(checkpoint))
    held_out = torch.cat(held_out_batches(stream, 1, 512))[:windows].long()
    text = calibration_text(corpus, characters)
    rows: list[dict[str, Any]] = []
    exact: list[torch.Tensor] = []
    with tempfile.TemporaryDirectory() as folder:
        every = ways(checkpoint, scheme, text, Path(folder))
        for name, rounding, path, quantization in track(every, "quantization", console=console):
            loaded = load_model(path, "bfloat16", "cpu", quantization=quantization)
            if not exact:
                exact = list(logits(loaded, held_out))
            files = [Path(path)] if Path(path).is_file() else list(Path(path).glob("*.safetensors"))
            written = quantization is None and rounding != "AWQ"
            size = sum(file.stat().st_size for file in files) if written else None
            loss, variation = distance(loaded, held_out, exact)
            rows.append(
                {"scheme": name, "rounding": rounding, "loss": loss, "total_variation": variation, "bytes": size}
            )
            rows[-1]["megabytes"] = size and size / 1e6
            if output is not None:
                output.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    wide_console().print(listing(COLUMNS, rows))


if __name__ == "__main__":
    typer.run(main)
