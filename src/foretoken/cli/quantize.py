"""``foretoken quantize``: writes a checkpoint with fewer bits a weight."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.files import standard_input
from foretoken.cli.grouped import grouped, option
from foretoken.cli.options import Json
from foretoken.core.files import read_text

if TYPE_CHECKING:
    from foretoken.quantize import QuantizedCheckpoint


@grouped
def quantize(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Folder, GGUF file or hub name; or a folder of heads.")],
    out: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write, or a file that ends with .gguf.")],
    scheme: Annotated[
        str,
        typer.Option(
            help="A folder: int8, int4-g32, int4-g64, int4-g128, bfloat16, float16, float32. GGUF: Q8_0, Q6_K, Q5_K_M, "
            "Q5_K_S, Q5_1, Q5_0, Q4_K_M, Q4_K_S, Q4_1, Q4_0, Q3_K_L, Q3_K_M, Q3_K_S, BF16, F16, F32."
        ),
    ],
    calibration: str | None = option(
        None, "Text like the model's use: rounds by GPTQ, and tells the loss.", metavar="FILE|-"
    ),
    lm_head: bool = option(False, "Quantize the vocabulary head of a folder as well. GGUF always does.", "--lm-head"),
    gguf_file: str | None = option(None, "Name of a GGUF file in SRC."),
    force: bool = option(False, "Replace an earlier DST of the same kind.", "--force"),
    as_json: Json = False,
) -> None:
    """Write a checkpoint with fewer bits a weight: compressed-tensors (vLLM) or GGUF (llama.cpp)."""
    text = None if calibration is None else _text(calibration)
    from foretoken.core.progress import Reporter
    from foretoken.quantize import quantize_checkpoint

    with Reporter(f"quantizing to {scheme}") as reporter:
        result = quantize_checkpoint(
            source, out, scheme, text, lm_head=lm_head, force=force, gguf_file=gguf_file, progress=reporter.update
        )
    print(json.dumps(_record(result), indent=2) if as_json else _line(result))


def _text(name: str) -> str:
    """Returns the calibration text. Raises InvalidRequest."""
    if name == "-":
        return standard_input(sys.stdin.read)
    return read_text("the calibration text", Path(name).expanduser(), "a text file")


def _record(result: QuantizedCheckpoint) -> dict[str, Any]:
    sizes = {"bytes_before": result.bytes_before, "bytes_after": result.bytes_after}
    losses = {f"loss_{name}": getattr(result.losses, name, None) for name in ("before", "after", "tokens")}
    seconds = round(result.seconds, 3)
    return {"path": str(result.path), "scheme": result.scheme, **sizes, "seconds": seconds, **losses}


def _line(result: QuantizedCheckpoint) -> str:
    sizes = f"{result.bytes_before / 1e6:.1f} MB -> {result.bytes_after / 1e6:.1f} MB in {result.seconds:.1f} s"
    losses = result.losses
    if losses is None:
        return f"{result.path}: {result.scheme}, {sizes}"
    return f"{result.path}: {result.scheme}, {sizes}; held-out loss {losses.before:.4f} -> {losses.after:.4f}"
