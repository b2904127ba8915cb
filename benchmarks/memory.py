"""Peak resident memory of a model and a text, beyond the imports and the model's file.

    make real && python benchmarks/memory.py
    python benchmarks/memory.py --model model-Q4_K_M.gguf --tokens 4000

Each model runs in a fresh process, without drafts. Resident memory includes pages of shared libraries that are touched
after the imports.
"""

from __future__ import annotations

from typing import Annotated

import typer

from foretoken.bench.output import figures, report
from foretoken.bench.startup import startup
from foretoken.models.formats.checkpoint import open_weights
from foretoken.zoo.real import REAL_MODELS
from options import MODEL_HELP, model_path


def main(
    model: Annotated[list[str] | None, typer.Option(help=f"{MODEL_HELP} May be repeated.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the text.")] = 1_500,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto or int8.")] = "auto",
) -> None:
    """Print megabytes of the imports, of the file, and of what one text takes beyond both."""
    rows = []
    for name in model or REAL_MODELS:
        path = model_path(name)
        options = {
            "model": str(path),
            "speculative_config": {"method": "none"},
            "kv_cache_dtype": kv_cache_dtype,
        }
        run = startup(name, options, times=1, tokens=tokens)
        size = sum(file.stat().st_size for file in open_weights(path).files)
        sizes = (run.imported_bytes, size, run.peak_bytes, run.peak_bytes - run.imported_bytes - size)
        rows.append((path.name, *(f"{each / 1e6:.0f}" for each in sizes)))
    heads = ("model", "imports, MB", "file, MB", "peak, MB", "beyond imports and file, MB")
    report([figures(heads, rows)], {"tokens": tokens}, None)


if __name__ == "__main__":
    typer.run(main)
