"""Accuracy of each scheme: held-out loss and total variation from bfloat16, on the runtime itself.

    python benchmarks/quantization.py --output quantization.json

Schemes are rounded on loading, by ``foretoken quantize`` and by ``foretoken quantize --calibration`` on training text.
Folders include the vocabulary head (``--lm-head``), as rounding on loading does.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer

from foretoken import zoo
from foretoken.bench.output import listing, progress, report
from foretoken.models.base import Model
from foretoken.models.formats.checkpoint import load_tokenizer
from foretoken.models.loading import load_model
from foretoken.models.options import QUANTIZATIONS
from foretoken.plan.texts import SampledText, text_logits
from foretoken.quantize import quantize_checkpoint
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


def held_out_windows(model: str | Path, count: int) -> torch.Tensor:
    """Returns windows of 512 held-out tokens [count, 512] in the model's vocabulary."""
    stream = encode(standard_library().held_out, load_tokenizer(model))
    return torch.cat(held_out_batches(stream, 1, 512))[:count].long()


def logits(model: Model, windows: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the log-probabilities [T - 1, V] of each window."""
    for window in windows.tolist():
        text = SampledText(tuple(window[:1]), tuple(window[1:]), len(window))
        yield text_logits(model, text).float().log_softmax(-1)


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
    output: Output = None,
) -> None:
    """Loss and total variation from bfloat16 of each scheme."""
    checkpoint = model or str(zoo.path("target"))
    corpus = standard_library()
    held_out = held_out_windows(checkpoint, windows)
    text = calibration_text(corpus, characters)
    rows: list[dict[str, Any]] = []
    exact: list[torch.Tensor] = []
    with tempfile.TemporaryDirectory() as folder:
        every = ways(checkpoint, scheme, text, Path(folder))
        for name, rounding, path, quantization in progress(every, "quantization"):
            loaded = load_model(path, "bfloat16", "cpu", quantization=quantization)
            if not exact:
                exact = list(logits(loaded, held_out))
            files = [Path(path)] if Path(path).is_file() else list(Path(path).glob("*.safetensors"))
            size = sum(file.stat().st_size for file in files) if quantization is None else None
            loss, variation = distance(loaded, held_out, exact)
            rows.append({"scheme": name, "rounding": rounding, "loss": loss, "total_variation": variation})
            rows[-1] |= {"bytes": size, "megabytes": size and size / 1e6}
    report([listing(COLUMNS, rows)], {"windows": windows, "characters": characters}, output, rows=rows)


if __name__ == "__main__":
    typer.run(main)
