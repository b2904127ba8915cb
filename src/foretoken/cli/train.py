"""``foretoken train``: the bundled models, or one's own, from text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.grouped import grouped
from foretoken.cli.options import MODEL, Json, named_once

if TYPE_CHECKING:
    from foretoken.train.data import Corpus
    from foretoken.train.optimization import TrainConfig

app = typer.Typer(help="Train a target, distil a draft from it, write their cards.")

Out = Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.")]
Target = Annotated[Path, typer.Argument(metavar="TARGET", help="Folder of the target.")]
MaybeTarget = Annotated[str | None, typer.Argument(metavar="TARGET", help="Folder of the target, or --model.")]
Model = Annotated[
    str | None, typer.Option(*MODEL, help="The target: a folder, GGUF file or hub name; else the bundled one.")
]
Patience = Annotated[int | None, typer.Option(help="Evaluations without improvement before stopping.")]
Texts = Annotated[
    list[Path] | None,
    typer.Option(
        "--data", "--corpus", help="Text files, folders or .jsonl of prompts (repeatable); else Python's library."
    ),
]
Steps = Annotated[int | None, typer.Option(help="Length in steps.")]
Minutes = Annotated[float | None, typer.Option(help="Length in minutes, instead of --steps.")]
Batch = Annotated[int, typer.Option(help="Windows per step.")]
Window = Annotated[int, typer.Option(help="Tokens per window.")]
Rate = Annotated[float, typer.Option(help="The highest learning rate.")]
Seed = Annotated[int, typer.Option(help="Of the weights and of the order of the windows.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an earlier OUT of the same kind, and start again.")]
Compile = Annotated[
    bool | None, typer.Option("--compile/--no-compile", help="Use torch.compile; else if a C++ compiler is found.")
]
Size = Annotated[int | None, typer.Option(help="Instead of the bundled model's.")]


@dataclass(frozen=True, kw_only=True)
class LlamaSizes:
    """Sizes of a Llama, in the order of the fields of ``Shape``."""

    hidden: Size = None
    intermediate: Size = None
    layers: Size = None
    heads: Size = None
    kv_heads: Size = None
    head_dim: Size = None
    positions: Size = None


@app.command()
@grouped
def target(
    out: Out,
    corpus: Texts = None,
    steps: Steps = None,
    minutes: Minutes = None,
    batch: Batch = 14,
    window: Window = 768,
    learning_rate: Rate = 3e-3,
    seed: Seed = 0,
    *,
    sizes: LlamaSizes,
    patience: Patience = None,
    compile_model: Compile = None,
    resume: Resume = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Train a tokenizer and a small Llama from scratch (two hours on two cores for the bundled one)."""
    from foretoken.train.target import TARGET_CONFIG, TARGET_SHAPE, train_target

    config = config_of(TARGET_CONFIG, steps, minutes, batch, window, learning_rate, seed, compile_model, patience)
    shape = with_sizes(TARGET_SHAPE, sizes)
    show(out, train_target(out, corpus_of(corpus), shape, config, resume, force=force), as_json)


@app.command()
@grouped
def draft(
    out: Out,
    target: MaybeTarget = None,
    model: Model = None,
    corpus: Texts = None,
    steps: Steps = None,
    minutes: Minutes = None,
    batch: Batch = 8,
    window: Window = 512,
    learning_rate: Rate = 4e-3,
    seed: Seed = 0,
    *,
    sizes: LlamaSizes,
    top: Annotated[int, typer.Option(help="Most likely tokens kept of the target's law.")] = 64,
    acceptance_share: Annotated[float, typer.Option(help="Last share of the run, on the acceptance loss.")] = 0.3,
    generate: Annotated[bool, typer.Option("--generate", help="Let the target continue half of the windows.")] = False,
    generated_share: Annotated[float | None, typer.Option(help="Or this share of them.")] = None,
    disk_gigabytes: Annotated[float, typer.Option(help="For the target's distributions, during the run.")] = 2.0,
    patience: Patience = None,
    compile_model: Compile = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    resume: Resume = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Distil a draft from TARGET (20 minutes on two cores for the bundled one)."""
    from foretoken.train.distillation import DistillConfig
    from foretoken.train.draft import DRAFT_CONFIG, train_draft
    from foretoken.train.target import DRAFT_SHAPE

    path = model_of(named_once(target, model))
    config = config_of(DRAFT_CONFIG, steps, minutes, batch, window, learning_rate, seed, compile_model, patience)
    shape = with_sizes(DRAFT_SHAPE, sizes)
    share = generated_share if generated_share is not None else 0.5 if generate else 0.0
    distill = DistillConfig(
        top, acceptance_share=acceptance_share, generated_share=share, disk_gigabytes=disk_gigabytes
    )
    show(out, train_draft(out, path, corpus_of(corpus), shape, config, resume, distill, device, force), as_json)


@app.command()
def card(
    target: Target,
    draft: Annotated[Path | None, typer.Option(help="Folder of its draft, whose acceptance is measured.")] = None,
    head: Annotated[list[Path] | None, typer.Option(help="Folder of heads for it (repeatable), likewise.")] = None,
    corpus: Texts = None,
) -> None:
    """Write README.md and zoo.json beside the weights, from provenance.json and a measurement."""
    from foretoken.train.card import write_cards
    from foretoken.train.head_card import write_head_card

    texts = corpus_of(corpus)
    for file in write_cards(target.absolute(), draft.absolute() if draft else None, texts):
        print(file)
    for folder in head or ():
        print(write_head_card(target.absolute(), folder.absolute(), texts))


def model_of(name: str | None) -> Path:
    """Returns the folder or GGUF file of the target, by default the bundled one."""
    from foretoken import zoo
    from foretoken.models.formats.checkpoint import resolve

    return zoo.path("target") if name is None else resolve(name).absolute()


def corpus_of(paths: list[Path] | None, model: str | None = None) -> Corpus:
    """Returns the user's files, for a model of the user's the target's own text, or else the standard library."""
    from foretoken.train.data import OWN_TEXT, from_files, standard_library

    if paths:
        return from_files(paths)
    return standard_library() if model is None else OWN_TEXT


def config_of(
    usual: TrainConfig,
    steps: int | None,
    minutes: float | None,
    batch: int,
    window: int,
    rate: float,
    seed: int,
    compile_model: bool | None,
    patience: int | None = None,
) -> TrainConfig:
    """Returns ``usual`` with the given options. Raises InvalidRequest if both lengths are given."""
    from foretoken.core.errors import InvalidRequest

    if steps is not None and minutes is not None:
        raise InvalidRequest("both --steps and --minutes are given; choose one")
    length: dict[str, int | float | None] = {}
    if steps is not None:
        length = {"steps": steps, "minutes": None}
    elif minutes is not None:
        length = {"minutes": minutes}
    rest = {
        "batch": batch,
        "window": window,
        "learning_rate": rate,
        "seed": seed,
        "compile": compile_model,
        "patience": patience,
    }
    return replace(usual, **length, **rest)  # type: ignore[arg-type]


def with_sizes(usual: Any, sizes: Any) -> Any:
    """Returns the shape ``usual`` with the ``sizes`` that are given; their fields are in the order of its own."""
    given = zip(vars(usual), vars(sizes).values(), strict=True)
    return replace(usual, **{name: size for name, size in given if size is not None})


def show(out: Path, figures: dict[str, float], as_json: bool) -> None:
    """Prints the last evaluation."""
    import json

    out = out.expanduser().absolute()
    if as_json:
        print(json.dumps({"path": str(out)} | figures))
    else:
        print(f"{out}: " + "  ".join(f"{k} {v:.4g}" for k, v in figures.items()))
