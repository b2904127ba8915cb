"""``foretoken train``: the bundled models, or one's own, from text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from foretoken.train.data import Corpus
    from foretoken.train.target import Shape
    from foretoken.train.trainer import TrainConfig

app = typer.Typer(help="Train a target, distil a draft from it, write their cards.", no_args_is_help=True)

Out = Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.")]
Target = Annotated[Path, typer.Argument(metavar="TARGET", help="Folder of the target.")]
Texts = Annotated[
    list[Path] | None,
    typer.Option("--corpus", help="Text files or folders (repeatable); else Python's standard library."),
]
Steps = Annotated[int | None, typer.Option(help="Length in steps.")]
Minutes = Annotated[float | None, typer.Option(help="Length in minutes, instead of --steps.")]
Batch = Annotated[int, typer.Option(help="Windows per step.")]
Window = Annotated[int, typer.Option(help="Tokens per window.")]
Rate = Annotated[float, typer.Option(help="The highest learning rate.")]
Seed = Annotated[int, typer.Option(help="Of the weights and of the order of the windows.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")]
Force = Annotated[bool, typer.Option("--force", help="Replace OUT whatever it holds, and start afresh.")]
Compile = Annotated[
    bool | None, typer.Option("--compile/--no-compile", help="Use torch.compile; else if a C++ compiler is found.")
]
Size = Annotated[int | None, typer.Option(help="Instead of the bundled model's.")]
Json = Annotated[bool, typer.Option("--json", help="Print the last evaluation as JSON.")]


@app.command()
def target(
    out: Out, corpus: Texts = None, steps: Steps = None, minutes: Minutes = None, batch: Batch = 14,
    window: Window = 768, learning_rate: Rate = 3e-3, seed: Seed = 0, hidden: Size = None, intermediate: Size = None,
    layers: Size = None, heads: Size = None, kv_heads: Size = None, head_dim: Size = None, positions: Size = None,
    compile_model: Compile = None, resume: Resume = False, force: Force = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Train a tokenizer and a small Llama from scratch (two hours on two cores for the bundled one)."""
    from foretoken.train.files import check_run
    from foretoken.train.target import TARGET_CONFIG, TARGET_SHAPE, train_target

    config = _config(TARGET_CONFIG, steps, minutes, batch, window, learning_rate, seed, compile_model)
    shape = _shape(TARGET_SHAPE, hidden, intermediate, layers, heads, kv_heads, head_dim, positions)
    out = check_run(out, resume, force)
    _show(out, train_target(out, _corpus(corpus), shape, config, resume), as_json)


@app.command()
def draft(
    out: Out, target: Target, corpus: Texts = None, steps: Steps = None, minutes: Minutes = None, batch: Batch = 8,
    window: Window = 512, learning_rate: Rate = 4e-3, seed: Seed = 0, hidden: Size = None, intermediate: Size = None,
    layers: Size = None, heads: Size = None, kv_heads: Size = None, head_dim: Size = None, positions: Size = None,
    top: Annotated[int, typer.Option(help="Most likely tokens kept of the target's law.")] = 64,
    acceptance_share: Annotated[float, typer.Option(help="Last share of the run, on the acceptance loss.")] = 0.3,
    generated_share: Annotated[float, typer.Option(help="Share of the windows that the target continues.")] = 0.0,
    disk_gigabytes: Annotated[float, typer.Option(help="For the target's laws, during the run.")] = 2.0,
    compile_model: Compile = None, resume: Resume = False, force: Force = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Distil a draft from TARGET (20 minutes on two cores for the bundled one)."""
    from foretoken.train.draft import DRAFT_CONFIG, DistillConfig, train_draft
    from foretoken.train.files import check_run
    from foretoken.train.target import DRAFT_SHAPE

    config = _config(DRAFT_CONFIG, steps, minutes, batch, window, learning_rate, seed, compile_model)
    shape = _shape(DRAFT_SHAPE, hidden, intermediate, layers, heads, kv_heads, head_dim, positions)
    distill = DistillConfig(
        top, acceptance_share=acceptance_share, generated_share=generated_share, disk_gigabytes=disk_gigabytes
    )
    out = check_run(out, resume, force)
    _show(out, train_draft(out, target, _corpus(corpus), shape, config, resume, distill), as_json)


@app.command()
def card(
    target: Target,
    draft: Annotated[Path | None, typer.Option(help="Folder of its draft, whose acceptance is measured.")] = None,
    corpus: Texts = None,
) -> None:
    """Write README.md and zoo.json beside the weights, from provenance.json and a measurement."""
    from foretoken.train.card import write_cards

    for file in write_cards(target.absolute(), draft.absolute() if draft else None, _corpus(corpus)):
        print(file)


def _corpus(paths: list[Path] | None) -> Corpus:
    from foretoken.train.data import from_files, standard_library

    return from_files(paths) if paths else standard_library()


def _config(
    usual: TrainConfig, steps: int | None, minutes: float | None, batch: int, window: int, rate: float, seed: int,
    compile_model: bool | None,
) -> TrainConfig:  # fmt: skip
    from dataclasses import replace

    from foretoken.core.errors import InvalidRequest

    if steps is not None and minutes is not None:
        raise InvalidRequest("both --steps and --minutes are given; choose one")
    length: dict[str, int | float | None] = {}
    if steps is not None:
        length = {"steps": steps, "minutes": None}
    elif minutes is not None:
        length = {"minutes": minutes}
    rest = {"batch": batch, "window": window, "learning_rate": rate, "seed": seed, "compile": compile_model}
    return replace(usual, **length, **rest)  # type: ignore[arg-type]


def _shape(usual: Shape, *sizes: int | None) -> Shape:
    """``sizes`` in the order of Shape's fields; None keeps the usual one."""
    from dataclasses import replace

    given = {name: size for name, size in zip(vars(usual), sizes, strict=True) if size is not None}
    return replace(usual, **given)


def _show(out: Path, figures: dict[str, float], as_json: bool) -> None:
    import json

    if as_json:
        print(json.dumps({"path": str(out)} | figures))
    else:
        print(f"{out}: " + "  ".join(f"{k} {v:.4g}" for k, v in figures.items()))
