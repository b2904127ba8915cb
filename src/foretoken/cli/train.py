"""``foretoken train``: models, drafts and heads. Options are generated from ``train.config`` and ``train.shapes``."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken import zoo
from foretoken.cli.grouped import grouped, option
from foretoken.cli.options import DRAFT_MODEL, MODEL, Json, named_once
from foretoken.core.errors import InvalidRequest
from foretoken.train import config as configs
from foretoken.train import shapes
from foretoken.train.config import AcceptanceConfig, DistillConfig, HeadConfig, HeadKind, RunOptions, TrainConfig

if TYPE_CHECKING:
    from foretoken.train.data import Corpus

app = typer.Typer(rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})

Model = Annotated[
    str | None, typer.Option(*MODEL, help="The target: a folder, GGUF file or hub name; else the bundled one.")
]
TEXTS = "Text files, folders or .jsonl of prompts (repeatable)"
Texts = Annotated[list[Path] | None, typer.Option("--data", "--corpus", help=f"{TEXTS}; else Python's library.")]
OwnTexts = Annotated[list[Path] | None, typer.Option("--data", "--corpus", help=f"{TEXTS}; else the target writes.")]
Target = Annotated[Path, typer.Argument(metavar="TARGET", help="Folder of the target.")]
Draft = Annotated[Path | None, typer.Option("--draft", help="Folder of its draft, whose acceptance is measured.")]

RUN, CPU_RUN = RunOptions(Path("OUT")), RunOptions(Path("OUT"), "cpu")


@app.command()
@grouped(run=CPU_RUN, config=configs.TARGET_CONFIG, shape=shapes.TARGET_SHAPE, without=("dropout", "device"))
def target(run: RunOptions, corpus: Texts = None, *, config: TrainConfig, shape: Any, as_json: Json = False) -> None:
    """Train a tokenizer and a small Llama from scratch (two hours on two cores for the bundled one)."""
    from foretoken.train.target import train_target

    _show(run, train_target(run, _corpus(corpus), shape, config), as_json, _usage(run.path))


@app.command()
@grouped(run=RUN, config=configs.HYBRID_CONFIG, shape=shapes.HybridShape())
def hybrid(run: RunOptions, corpus: Texts = None, *, config: TrainConfig, shape: Any, as_json: Json = False) -> None:
    """Train a small model of Qwen3.5's layout: DeltaNet, attention, experts, MTP (three minutes on an H200)."""
    from foretoken.train.hybrid import HYBRID
    from foretoken.train.target import train_target

    _show(run, train_target(run, _corpus(corpus), shape, config, HYBRID), as_json, _usage(run.path))


@app.command()
@grouped(run=RUN, config=configs.DRAFT_CONFIG, shape=shapes.DRAFT_SHAPE, distill=DistillConfig(), without=("dropout",))
def draft(
    run: RunOptions,
    target: Annotated[str | None, typer.Argument(metavar="TARGET", help="Folder of the target, or --model.")] = None,
    model: Model = None,
    corpus: Texts = None,
    *,
    config: TrainConfig,
    shape: Any,
    distill: DistillConfig,
    generate: bool = option(False, "As --generated-share 0.5.", "--generate"),
    as_json: Json = False,
) -> None:
    """Distil a draft from TARGET (20 minutes on two cores for the bundled one)."""
    from foretoken.train.draft import train_draft

    name = named_once(target, model)
    if generate and not distill.generated_share:
        distill = replace(distill, generated_share=0.5)
    figures = train_draft(run, _model(name), _corpus(corpus), shape, config, distill)
    _show(run, figures, as_json, _usage(name, run.path))


@app.command()
@grouped(run=RUN, config=configs.ACCEPTANCE_CONFIG, settings=AcceptanceConfig(), without=("dropout", "compile"))
def acceptance(
    run: RunOptions,
    model: Model = None,
    draft_model: str | None = option(None, "Its draft: a folder, GGUF file or hub name; else bundled.", *DRAFT_MODEL),
    data: Texts = None,
    *,
    config: TrainConfig,
    settings: AcceptanceConfig,
    as_json: Json = False,
) -> None:
    """Train a head that decides from the draft's hidden state where to stop (two minutes for the bundled pair).

    --batch counts positions, and --window tokens of a window of text.
    """
    from foretoken.train.acceptance_head import train_acceptance

    if draft_model is None and model is not None:
        raise InvalidRequest("--model is given without --draft-model; name the draft that the head is for")
    draft = _model(draft_model, "draft")
    figures = train_acceptance(run, _model(model), draft, _corpus(data), config, settings)
    stop = {"rule": "learned", "model": str(run.path)}
    _show(run, figures, as_json, _usage(model, method="draft_model", model=str(draft), draft_stop=stop))


def _register_head(role: str, kind: HeadKind) -> None:

    @app.command(role, help=kind.help)
    @grouped(run=RUN, settings=kind.settings, config=kind.config, data_config=kind.data, without=("dropout",))
    def head(
        run: RunOptions,
        model: Model = None,
        data: OwnTexts = None,
        *,
        settings: Any,
        config: TrainConfig,
        data_config: HeadConfig,
        generate: bool = option(True, "Let the target write; else the files' text alone.", "--generate/--no-generate"),
        unfreeze: bool = option(False, "Train the target too; written to OUT/target.", "--unfreeze"),
        hold: float = option(10.0, "With --unfreeze: KL weight towards the frozen target."),
        lessons: Path | None = option(None, "Keep text and hidden states here, and reuse them for other heads."),
        start: Path | None = option(None, "Continue from this earlier head, whose sizes are the defaults."),
        as_json: Json = False,
    ) -> None:
        from foretoken.train.heads import train_head

        data_config = data_config if generate else replace(data_config, generated_share=0.0)
        held, path = hold if unfreeze else None, _model(model)
        corpus = _corpus(data, model)
        figures = train_head(role, run, path, corpus, settings, config, data_config, lessons, held, start)
        used = run.path / "target" if unfreeze else model
        _show(run, figures, as_json, _usage(used, method=kind.method, model=str(run.path)))


for _role, _kind in configs.HEADS.items():
    _register_head(_role, _kind)


@app.command()
@grouped(run=CPU_RUN, config=configs.SEQ2SEQ_CONFIG, shape=shapes.SEQ2SEQ_SHAPE, without=("dropout", "device"))
def seq2seq(run: RunOptions, corpus: Texts = None, *, config: TrainConfig, shape: Any, as_json: Json = False) -> None:
    """Train a small T5 from scratch to fix broken Python (34 minutes on one core for the bundled one)."""
    figures = repair_script().train_seq2seq(run, _corpus(corpus), shape, config)
    _show(run, figures, as_json, _usage(run.path))


@app.command("seq2seq-draft")
@grouped(
    run=CPU_RUN, config=configs.SEQ2SEQ_DRAFT_CONFIG, shape=shapes.SEQ2SEQ_DRAFT_SHAPE, without=("dropout", "device")
)
def seq2seq_draft(
    run: RunOptions,
    target: Path | None = option(None, "Folder of the target; else the bundled one.", "--target", *MODEL),
    corpus: Texts = None,
    *,
    config: TrainConfig,
    shape: Any,
    acceptance_share: float = option(0.3, "Last fraction of the run, on the acceptance loss."),
    as_json: Json = False,
) -> None:
    """Distil a draft from a T5 trained by ``train seq2seq`` (20 minutes on one core for the bundled one)."""
    path = zoo.path("seq2seq-target") if target is None else target.expanduser().absolute()
    train = repair_script().train_seq2seq_draft
    figures = train(run, path, _corpus(corpus), shape, config, acceptance_share)
    _show(run, figures, as_json, _usage(path, run.path))


@app.command("seq2seq-card")
def seq2seq_card(target: Target, draft: Draft = None, corpus: Texts = None) -> None:
    """Write README.md and zoo.json beside the weights of a T5 pair, from provenance.json and a measurement."""
    write = repair_script().write_seq2seq_cards
    for file in write(target.absolute(), draft.absolute() if draft else None, _corpus(corpus)):
        print(file)


@app.command()
def card(
    target: Target,
    draft: Draft = None,
    head: Annotated[list[Path] | None, typer.Option(help="Folder of heads for it (repeatable), likewise.")] = None,
    corpus: Texts = None,
) -> None:
    """Write README.md and zoo.json beside the weights, from provenance.json and a measurement."""
    from foretoken.train.cards import write_cards, write_head_card

    texts = _corpus(corpus)
    for file in write_cards(target.absolute(), draft.absolute() if draft else None, texts):
        print(file)
    for folder in head or ():
        print(write_head_card(target.absolute(), folder.absolute(), texts))


def _model(name: str | None, role: str = "target") -> Path:
    """Returns the folder or GGUF file of a model, by default the bundled one of this role."""
    from foretoken.models.formats.checkpoint import resolve

    return zoo.path(role) if name is None else resolve(name).absolute()


def _corpus(paths: list[Path] | None, model: str | None = None) -> Corpus:
    """Returns the user's files; without any, the target's own text for the user's model, else the standard library."""
    from foretoken.train.data import OWN_TEXT, from_files, standard_library

    if paths:
        return from_files(paths)
    return standard_library() if model is None else OWN_TEXT


def repair_script() -> Any:
    """Returns the script that trained the bundled encoder-decoder pair, as a module."""
    import sys

    for name in ("repair_tasks", "train_repair"):  # the second imports the first
        spec = spec_from_file_location(name, zoo.path("seq2seq-target") / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = module_from_spec(spec)  # dataclasses look their module up
        spec.loader.exec_module(module)
    return module


def _usage(target: str | Path | None, draft: Path | None = None, **speculative_config: Any) -> str:
    """Returns the command that uses what was trained. target: None for the bundled one."""
    words = ["foretoken", "generate", "def main():"]
    words += [] if target is None else ["--model", str(target)]
    words += [] if draft is None else ["--draft-model", str(draft)]
    words += ["--speculative-config", json.dumps(speculative_config)] if speculative_config else []
    return shlex.join(words)


def _show(run: RunOptions, figures: dict[str, float], as_json: bool, usage: str) -> None:
    """Prints the last evaluation, and the command that uses what was trained."""
    if as_json:
        print(json.dumps({"path": str(run.path)} | figures))
    else:
        print(f"{run.path}: " + "  ".join(f"{k} {v:.4g}" for k, v in figures.items()))
        print(usage)
