"""``foretoken train seq2seq|seq2seq-draft``: an encoder-decoder pair that mends Python."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from foretoken.cli.grouped import grouped
from foretoken.cli.options import MODEL, Json
from foretoken.cli.train import (
    Compile,
    Force,
    Minutes,
    Out,
    Patience,
    Rate,
    Resume,
    Seed,
    Size,
    Steps,
    Texts,
    config_of,
    corpus_of,
    show,
    with_sizes,
)
from foretoken.cli.train_heads import app

__all__ = ["app"]

Batch = Annotated[int, typer.Option(help="Rows of the longest length per step; more of shorter ones.")]
Window = Annotated[int, typer.Option(help="Tokens of the longest row, on each side.")]


@dataclass(frozen=True, kw_only=True)
class T5Sizes:
    """Sizes of a T5, in the order of the fields of ``T5Shape``."""

    hidden: Size = None
    intermediate: Size = None
    layers: Size = None
    decoder_layers: Size = None
    heads: Size = None
    head_dim: Size = None


@app.command()
@grouped
def seq2seq(
    out: Out,
    corpus: Texts = None,
    steps: Steps = None,
    minutes: Minutes = None,
    batch: Batch = 16,
    window: Window = 176,
    learning_rate: Rate = 3e-3,
    seed: Seed = 0,
    *,
    sizes: T5Sizes,
    patience: Patience = None,
    compile_model: Compile = None,
    resume: Resume = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Train a small T5 from scratch to mend broken Python (34 minutes on one core for the bundled one)."""
    from foretoken.train.seq2seq import SEQ2SEQ_CONFIG, SEQ2SEQ_SHAPE, train_seq2seq

    config = config_of(SEQ2SEQ_CONFIG, steps, minutes, batch, window, learning_rate, seed, compile_model, patience)
    shape = with_sizes(SEQ2SEQ_SHAPE, sizes)
    show(out, train_seq2seq(out, corpus_of(corpus), shape, config, resume, force), as_json)


@app.command("seq2seq-draft")
@grouped
def seq2seq_draft(
    out: Out,
    target: Annotated[
        Path | None, typer.Option("--target", *MODEL, help="Folder of the target; else the bundled one.")
    ] = None,
    corpus: Texts = None,
    steps: Steps = None,
    minutes: Minutes = None,
    batch: Batch = 16,
    window: Window = 176,
    learning_rate: Rate = 4e-3,
    seed: Seed = 0,
    *,
    sizes: T5Sizes,
    acceptance_share: Annotated[float, typer.Option(help="Last share of the run, on the acceptance loss.")] = 0.3,
    patience: Patience = None,
    compile_model: Compile = None,
    resume: Resume = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Distil a draft from a T5 trained by ``train seq2seq`` (20 minutes on one core for the bundled one)."""
    from foretoken import zoo
    from foretoken.train.seq2seq_draft import SEQ2SEQ_DRAFT_CONFIG, SEQ2SEQ_DRAFT_SHAPE, train_seq2seq_draft

    config = config_of(
        SEQ2SEQ_DRAFT_CONFIG, steps, minutes, batch, window, learning_rate, seed, compile_model, patience
    )
    shape = with_sizes(SEQ2SEQ_DRAFT_SHAPE, sizes)
    path = zoo.path("seq2seq-target") if target is None else target.expanduser().absolute()
    show(
        out, train_seq2seq_draft(out, path, corpus_of(corpus), shape, config, resume, acceptance_share, force), as_json
    )


@app.command("seq2seq-card")
def seq2seq_card(
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="Folder of the target.")],
    draft: Annotated[Path | None, typer.Option(help="Folder of its draft, whose acceptance is measured.")] = None,
    corpus: Texts = None,
) -> None:
    """Write README.md and zoo.json beside the weights of a T5 pair, from provenance.json and a measurement."""
    from foretoken.train.seq2seq_card import write_seq2seq_cards

    for file in write_seq2seq_cards(target.absolute(), draft.absolute() if draft else None, corpus_of(corpus)):
        print(file)
