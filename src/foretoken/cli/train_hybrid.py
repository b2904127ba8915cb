"""``foretoken train hybrid``: a hybrid of gated DeltaNet and attention with mixtures of experts."""

from __future__ import annotations

from typing import Annotated

import typer

from foretoken.cli.options import Json
from foretoken.cli.train import (
    Batch,
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
    Window,
    config_of,
    corpus_of,
    show,
)
from foretoken.cli.train_seq2seq import app

__all__ = ["app"]


@app.command()
def hybrid(
    out: Out,
    corpus: Texts = None,
    steps: Steps = None,
    minutes: Minutes = None,
    batch: Batch = 20,
    window: Window = 768,
    learning_rate: Rate = 3e-3,
    dropout: Annotated[float, typer.Option(help="Share of the layers' outputs that is dropped.")] = 0.1,
    seed: Seed = 0,
    hidden: Size = None,
    layers: Size = None,
    heads: Size = None,
    kv_heads: Size = None,
    head_dim: Size = None,
    linear_key_heads: Size = None,
    linear_value_heads: Size = None,
    linear_head_dim: Size = None,
    experts: Size = None,
    experts_per_token: Size = None,
    units: Size = None,
    shared_units: Size = None,
    positions: Size = None,
    patience: Patience = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    compile_model: Compile = None,
    resume: Resume = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Train a small model of Qwen3.5's layout: DeltaNet, attention, experts, MTP (three minutes on an H200)."""
    from dataclasses import replace

    from foretoken.train.files import check_run
    from foretoken.train.hybrid.recipe import HYBRID, HYBRID_CONFIG
    from foretoken.train.target import train_target

    usual = HYBRID.usual
    sizes = [hidden, layers, heads, kv_heads, head_dim, linear_key_heads, linear_value_heads, linear_head_dim]
    sizes += [experts, experts_per_token, units, shared_units, positions]
    given = {name: size for name, size in zip(vars(usual), sizes, strict=True) if size is not None}
    config = config_of(HYBRID_CONFIG, steps, minutes, batch, window, learning_rate, seed, compile_model, patience)
    out = check_run(out, resume, force)
    config, shape = replace(config, dropout=dropout), replace(usual, **given)
    show(out, train_target(out, corpus_of(corpus), shape, config, resume, HYBRID, device), as_json)
