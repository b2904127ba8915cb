"""Peak resident memory of a model and a text, beyond the imports and the model's file.

    make real && python benchmarks/memory.py
    python benchmarks/memory.py --model model-Q4_K_M.gguf --tokens 4000

Each model runs in a fresh process, without drafts. Resident memory includes pages of shared libraries that are touched
after the imports.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from foretoken.bench.setting import setting, wide_console
from foretoken.bench.startup import startup
from foretoken.models.formats.checkpoint import open_weights, resolve
from foretoken.zoo.real import REAL_MODELS, real_model_path


def main(
    model: Annotated[
        list[str] | None, typer.Option(help=f"A folder, a GGUF file, or one of: {', '.join(REAL_MODELS)} (repeatable).")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the text.")] = 1_500,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto or int8.")] = "auto",
) -> None:
    """Print megabytes of the imports, of the file, and of what one text takes beyond both."""
    table = Table(box=box.MARKDOWN)
    for column in ("model", "imports, MB", "file, MB", "peak, MB", "beyond imports and file, MB"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name in model or REAL_MODELS:
        path = real_model_path(name) if name in REAL_MODELS else resolve(Path(name))
        options = {
            "model": str(path),
            "speculative_config": {"method": "none"},
            "kv_cache_dtype": kv_cache_dtype,
        }
        run = startup(name, options, times=1, tokens=tokens)
        size = sum(file.stat().st_size for file in open_weights(path).files)
        sizes = (run.imported_bytes, size, run.peak_bytes, run.peak_bytes - run.imported_bytes - size)
        table.add_row(path.name, *(f"{each / 1e6:.0f}" for each in sizes))
    wide_console().print(table)
    wide_console().print(", ".join(f"{key} {value}" for key, value in setting().items()), style="dim")


if __name__ == "__main__":
    typer.run(main)
