"""Options that several scripts have, and the models that they name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foretoken import zoo
from foretoken.models.formats.checkpoint import resolve
from foretoken.train.widen.checkpoint import scaled
from foretoken.zoo.real import REAL_MODELS, real_model_path

Target = Annotated[Path | None, typer.Option(help="A checkpoint. [the bundled target, widened to 0.7 B]")]
Small = Annotated[bool, typer.Option("--small", help="The bundled target as it is, not widened.")]
Draft = Annotated[Path | None, typer.Option(help="The draft model. [the bundled one]")]
Prompts = Annotated[Path | None, typer.Option(help='JSON lines with a "prompt" each. [our own functions]')]
Temperatures = Annotated[list[float], typer.Option(min=0.0, help="May be repeated.")]
Rows = Annotated[list[int], typer.Option(min=1, help="Rows of a pass; may be repeated.")]
Turns = Annotated[int, typer.Option(min=1, help="Turns of everything that is timed.")]
Repeats = Annotated[int, typer.Option(min=1, help="Turns of everything that is compared.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]
Output = Annotated[Path | None, typer.Option("--output", help="Write setting and results to this file as JSON.")]
MODEL_HELP = f"A folder, a GGUF file, or one of: {', '.join(REAL_MODELS)}."


def target_path(target: Path | None, small: bool = False) -> Path:
    """Returns the target's folder: the named one, or the bundled one, widened unless ``small``."""
    return target or (zoo.path("target") if small else scaled())


def model_path(name: str) -> Path:
    """Returns the folder or file of a model, which may be a real one by its short name."""
    return real_model_path(name) if name in REAL_MODELS else resolve(Path(name))
