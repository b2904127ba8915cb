"""``foretoken train acceptance``: trains the head that decides where a draft stops."""

from __future__ import annotations

from typing import Annotated

import typer

from foretoken.cli.options import DRAFT_MODEL, Json
from foretoken.cli.train import (
    Force,
    Minutes,
    Model,
    Out,
    Resume,
    Seed,
    Steps,
    Texts,
    app,
    config_of,
    corpus_of,
    model_of,
    show,
)

__all__ = ["app"]


@app.command()
def acceptance(
    out: Out,
    model: Model = None,
    draft_model: Annotated[
        str | None,
        typer.Option(*DRAFT_MODEL, help="Its draft: a folder, GGUF file or hub name; else bundled."),
    ] = None,
    data: Texts = None,
    steps: Steps = None,
    minutes: Minutes = None,
    batch: Annotated[int, typer.Option(help="Places per step.")] = 512,
    window: Annotated[int, typer.Option(help="Tokens per window of text.")] = 256,
    learning_rate: Annotated[float, typer.Option(help="The highest learning rate.")] = 3e-3,
    seed: Seed = 0,
    intermediate: Annotated[int, typer.Option(help="Units of the head.")] = 64,
    windows: Annotated[int, typer.Option(help="Maximum number of text windows.")] = 256,
    generated_share: Annotated[float, typer.Option(help="Of the windows: written by the target.")] = 0.75,
    held_out: Annotated[int, typer.Option(help="Held-out windows at each of two temperatures.")] = 16,
    patience: Annotated[int | None, typer.Option(help="Evaluations without improvement before stopping.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    resume: Resume = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Train a head that decides from the draft's hidden state where to stop (two minutes for the bundled pair)."""
    from foretoken import zoo
    from foretoken.core.errors import InvalidRequest
    from foretoken.models.formats.checkpoint import resolve
    from foretoken.train.acceptance_head import ACCEPTANCE_CONFIG, AcceptanceConfig, train_acceptance

    if draft_model is None and model is not None:
        raise InvalidRequest("--model is given without --draft-model; name the draft that the head is for")
    draft = zoo.path("draft") if draft_model is None else resolve(draft_model).absolute()
    config = config_of(ACCEPTANCE_CONFIG, steps, minutes, batch, window, learning_rate, seed, False, patience)
    settings = AcceptanceConfig(intermediate, windows, generated_share, held_out)
    figures = train_acceptance(out, model_of(model), draft, corpus_of(data), config, settings, resume, device, force)
    show(out, figures, as_json)
