"""``foretoken train eagle3|peagle|mtp|dflash|...``: trains heads for a target, on text that it generates."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.cli.options import Json
from foretoken.cli.train import (
    Compile,
    Force,
    Minutes,
    Model,
    Out,
    Resume,
    Seed,
    Steps,
    config_of,
    corpus_of,
    model_of,
    show,
)
from foretoken.cli.train_acceptance import app

__all__ = ["app"]

MaskToken = Annotated[int | None, typer.Option(help="Token id of masked rows; else the rarest.")]
Own = Annotated[int | None, typer.Option(help="Instead of the target's.")]


def _shared(
    out: Out,
    model: Model = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            "--data", "--corpus", help="Text files, folders or .jsonl of prompts (repeatable); else the target writes."
        ),
    ] = None,
    steps: Steps = None,
    minutes: Minutes = None,
    batch: Annotated[int, typer.Option(help="Windows per step and process.")] = 4,
    window: Annotated[int, typer.Option(help="Tokens per window.")] = 512,
    learning_rate: Annotated[float | None, typer.Option(help="The highest; else what suits the head.")] = None,
    seed: Seed = 0,
    generate: Annotated[
        bool, typer.Option("--generate/--no-generate", help="Let the target write; else the files' text alone.")
    ] = True,
    generated_share: Annotated[float, typer.Option(help="Of the windows, when the target writes.")] = 0.2,
    windows: Annotated[int, typer.Option(help="Maximum number of windows.")] = 6400,
    writing_share: Annotated[float, typer.Option(help="Of --minutes: the longest that the target may write.")] = 0.2,
    disk_gigabytes: Annotated[
        float | None, typer.Option(help="For hidden states; what does not fit is recomputed. Else 12, on a GPU 0.")
    ] = None,
    held_out: Annotated[int, typer.Option(help="Held-out windows at each of two temperatures.")] = 32,
    acceptance_share: Annotated[float, typer.Option(help="Last share of the run, on the acceptance loss.")] = 0.3,
    discount: Annotated[float, typer.Option(help="Of the loss, per predicted token.")] = 0.8,
    patience: Annotated[int | None, typer.Option(help="Evaluations without improvement before stopping.")] = None,
    unfreeze: Annotated[bool, typer.Option("--unfreeze", help="Train the target too; written to OUT/target.")] = False,
    hold: Annotated[float, typer.Option(help="With --unfreeze: how firmly the target's law is held.")] = 10.0,
    lessons: Annotated[
        Path | None, typer.Option(help="Keep text and hidden states here, and use what is here for other heads.")
    ] = None,
    start: Annotated[Path | None, typer.Option(help="Go on from this earlier head of the same shape.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    compile_model: Compile = None,
    resume: Resume = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Options that all heads share."""


def _eagle3(
    taps: Annotated[str | None, typer.Option(help="Three layers whose inputs are fused, like 2,4,5.")] = None,
    intermediate: Annotated[int, typer.Option(help="Width of the MLP.")] = 448,
    heads: Own = None,
    kv_heads: Own = None,
    vocabulary: Annotated[int, typer.Option(help="Of the target's commonest tokens.")] = 3072,
    depths: Annotated[int, typer.Option(help="Unrolled steps.")] = 4,
    single_share: Annotated[float, typer.Option(help="First share of the run, with one step alone.")] = 0.6,
) -> None:
    """Train an EAGLE-3 head (20 minutes on two cores for the bundled target)."""


def _peagle(
    taps: Annotated[str | None, typer.Option(help="Three layers whose inputs are fused, like 2,4,5.")] = None,
    layers: Annotated[int, typer.Option(help="Decoder layers.")] = 3,
    intermediate: Annotated[int, typer.Option(help="Width of the MLPs.")] = 448,
    heads: Own = None,
    kv_heads: Own = None,
    vocabulary: Annotated[int, typer.Option(help="Of the target's commonest tokens.")] = 3072,
    depths: Annotated[int, typer.Option(help="Predicted positions.")] = 8,
    retention: Annotated[float, typer.Option(help="Share of a depth's places that the next one is trained at.")] = 0.7,
    mask_token: MaskToken = None,
) -> None:
    """Train a P-EAGLE head: an EAGLE-3 head that predicts all positions in one pass."""


def _mtp(
    intermediate: Annotated[int, typer.Option(help="Width of the MLP.")] = 768,
    heads: Own = None,
    kv_heads: Own = None,
    depths: Annotated[int, typer.Option(help="Unrolled steps.")] = 4,
    single_share: Annotated[float, typer.Option(help="First share of the run, with one step alone.")] = 0.5,
) -> None:
    """Train a multi-token-prediction layer (30 minutes on two cores for the bundled target)."""


def _medusa(
    heads: Annotated[int, typer.Option(help="Tokens predicted ahead.")] = 4,
    layers: Annotated[int, typer.Option(help="Residual layers of each.")] = 1,
) -> None:
    """Train Medusa heads."""


def _blockwise(
    heads: Annotated[int, typer.Option(help="Tokens predicted ahead.")] = 4,
    intermediate: Annotated[int, typer.Option(help="Hidden units of each.")] = 192,
) -> None:
    """Train blockwise parallel heads."""


def _early_exit(
    exit_layer: Annotated[int | None, typer.Option(help="Leave before this layer; else after a quarter.")] = None,
) -> None:
    """Train the adapter that lets the target's first layers draft."""


def _dflash(
    block: Annotated[int, typer.Option(help="Rows of a block; it predicts one token less.")] = 8,
    layers: Annotated[int, typer.Option(help="Decoder layers.")] = 3,
    taps: Annotated[str | None, typer.Option(help="Layers whose inputs are read, like 1,3,5,7; else five.")] = None,
    intermediate: Own = None,
    heads: Own = None,
    kv_heads: Own = None,
    mask_token: MaskToken = None,
    anchors: Annotated[int, typer.Option(help="Blocks per window and step.")] = 96,
) -> None:
    """Train a DFlash head: one pass drafts a block of tokens."""


def _dspark(
    block: Annotated[int, typer.Option(help="Rows of a block; each predicts a token.")] = 8,
    layers: Annotated[int, typer.Option(help="Decoder layers.")] = 3,
    taps: Annotated[str | None, typer.Option(help="Layers whose inputs are read, like 1,3,5,7; else five.")] = None,
    intermediate: Own = None,
    heads: Own = None,
    kv_heads: Own = None,
    mask_token: MaskToken = None,
    anchors: Annotated[int, typer.Option(help="Blocks per window and step.")] = 96,
    markov_rank: Annotated[int, typer.Option(help="Rank of the Markov head.")] = 128,
    gated: Annotated[bool, typer.Option("--gated", help="Gate the Markov head by each row's state.")] = False,
) -> None:
    """Train a DSpark head: a DFlash head whose tokens depend on those drafted before, with confidences."""


def _run(role: str, own: dict[str, Any], given: dict[str, Any]) -> None:
    from foretoken.train.head_config import HeadConfig
    from foretoken.train.heads import ROLES, head_config, train_head

    if own.get("taps") is not None:
        own["taps"] = tuple(_numbers(own["taps"]))
    settings = ROLES[role].settings(**own)
    names = ("steps", "minutes", "batch", "window", "learning_rate", "seed", "compile_model", "patience")
    usual = head_config(role)
    if given["learning_rate"] is None:
        given["learning_rate"] = usual.learning_rate
    config = config_of(usual, *(given[name] for name in names))
    share = given["generated_share"] if given["generate"] else 0.0
    same = ("windows", "writing_share", "disk_gigabytes", "held_out", "acceptance_share", "discount")
    data = HeadConfig(generated_share=share, **{name: given[name] for name in same})
    hold = given["hold"] if given["unfreeze"] else None
    figures = train_head(
        role,
        given["out"],
        model_of(given["model"]),
        corpus_of(given["data"], given["model"]),
        settings,
        config,
        data,
        given["resume"],
        given["device"],
        given["lessons"],
        hold,
        given["start"],
        given["force"],
    )
    show(given["out"], figures, given["as_json"])


def _numbers(text: str) -> list[int]:
    from foretoken.core.errors import InvalidRequest

    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidRequest(f"--taps {text!r}; expected layer numbers like 2,4,5") from None


def _register(role: str, own: Callable[..., None]) -> None:
    """Registers a command with the role's own options and the shared ones."""
    own_options, shared = (inspect.signature(f, eval_str=True).parameters for f in (own, _shared))

    def command(**given: Any) -> None:
        _run(role, {name: given[name] for name in own_options}, {name: given[name] for name in shared})

    positional = [p for p in shared.values() if p.default is p.empty]
    optional = [p for p in shared.values() if p.default is not p.empty]
    listed = [p.replace(kind=p.KEYWORD_ONLY) for p in (*positional, *own_options.values(), *optional)]
    command.__signature__ = inspect.Signature(listed)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in listed}
    command.__doc__ = own.__doc__
    app.command(role)(command)


for _role, _own in (
    ("eagle3", _eagle3),
    ("peagle", _peagle),
    ("mtp", _mtp),
    ("medusa", _medusa),
    ("blockwise", _blockwise),
    ("early-exit", _early_exit),
    ("dflash", _dflash),
    ("dspark", _dspark),
):
    _register(_role, _own)
