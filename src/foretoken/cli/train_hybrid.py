"""``foretoken train hybrid``: a hybrid of gated DeltaNet and attention with mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import typer

from foretoken.cli.grouped import grouped
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
    with_sizes,
)
from foretoken.cli.train_seq2seq import app

__all__ = ["app"]


@dataclass(frozen=True, kw_only=True)
class HybridSizes:
    """Sizes of a hybrid, in the order of the fields of ``HybridShape``."""

    hidden: Size = None
    layers: Size = None
    heads: Size = None
    kv_heads: Size = None
    head_dim: Size = None
    linear_key_heads: Size = None
    linear_value_heads: Size = None
    linear_head_dim: Size = None
    experts: Size = None
    experts_per_token: Size = None
    units: Size = None
    shared_units: Size = None
    positions: Size = None


@app.command()
@grouped
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
    *,
    sizes: HybridSizes,
    patience: Patience = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    compile_model: Compile = None,
    resume: Resume = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Train a small model of Qwen3.5's layout: DeltaNet, attention, experts, MTP (three minutes on an H200)."""
    from foretoken.train.hybrid.recipe import HYBRID, HYBRID_CONFIG
    from foretoken.train.target import train_target

    config = config_of(HYBRID_CONFIG, steps, minutes, batch, window, learning_rate, seed, compile_model, patience)
    config, shape = replace(config, dropout=dropout), with_sizes(HYBRID.usual, sizes)
    show(out, train_target(out, corpus_of(corpus), shape, config, resume, HYBRID, device, force), as_json)
