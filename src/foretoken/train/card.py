"""Model cards of targets and drafts, written from provenance.json and from measurements."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.core.schema import read_object
from foretoken.models.base import Model
from foretoken.models.formats.checkpoint import load_tokenizer
from foretoken.models.loading import load_model
from foretoken.train.data import Corpus, encode, held_out_batches
from foretoken.train.distillation import DistillConfig
from foretoken.train.draft import load_teacher, measure
from foretoken.train.files import PROVENANCE, write_json
from foretoken.train.hybrid.recipe import HYBRID
from foretoken.train.hybrid.shape import MODEL_TYPE
from foretoken.train.optimization import TrainConfig
from foretoken.train.provenance import command_line
from foretoken.train.target import DRAFT_SHAPE, TARGET_SHAPE, ModelShape

ZOO_ENTRY = "zoo.json"
_DATA = {
    True: "Trained on the source of the {corpus}, which is under the PSF licence; its tests were left out.",
    False: "Trained on {corpus}.",
}


def measure_pair(target: Path, draft: Path, corpus: Corpus, batch: int = 16, window: int = 512) -> dict[str, float]:
    """Returns overlap, argmax agreement and loss of ``draft`` with ``target`` on held-out files, in bfloat16.

    Raises:
        InvalidRequest: The two do not share a vocabulary.
    """
    teacher, tokenizer = load_teacher(target)
    model, other = load_teacher(draft)
    if tokenizer.get_vocab() != other.get_vocab():
        raise InvalidRequest(f"{target} and {draft} have different vocabularies; distil the draft from this target")
    held_out = held_out_batches(encode(corpus.held_out, tokenizer), batch, window)
    return measure(teacher, model, held_out) | {"held_out_tokens": float(sum(b.numel() for b in held_out))}


def measure_int8(target: Path, corpus: Corpus, window: int = 512) -> dict[str, float]:
    """Returns the held-out loss (nats per token) of ``target`` on our runtime, in bfloat16 and quantized to int8."""
    plain = load_model(target, "bfloat16", "cpu", "native")
    int8 = load_model(target, "bfloat16", "cpu", "native", quantization="int8")
    stream = encode(corpus.held_out, load_tokenizer(target))
    batches = held_out_batches(stream, 1, min(window, plain.max_length))
    windows = [row for batch in batches for row in batch.tolist()]
    return {"held_out_loss_bfloat16": _loss(plain, windows), "held_out_loss_int8": _loss(int8, windows)}


def _loss(model: Model, windows: Sequence[Sequence[int]]) -> float:
    """Mean loss. Each window is opened at its first token and drafted whole, so that one pass gives all logits."""
    total = 0.0
    for window in windows:
        handle = model.open(window[:1])
        logits = model.score([handle], [Draft.chain(window[1:])])[0].logits
        model.close(handle)
        total += F.cross_entropy(logits[:-1].float(), torch.tensor(window[1:]), reduction="sum").item()
    return total / sum(len(window) - 1 for window in windows)


def write_cards(target: Path, draft: Path | None, corpus: Corpus) -> list[Path]:
    """Writes README.md and zoo.json beside the weights of ``target``, and of ``draft`` with its measured acceptance."""
    facts = _described(target)
    costs = measure_int8(target, corpus)
    write_json(target / PROVENANCE, facts | {"measured": costs})
    written = [_write(target, facts["role"], _card(target, facts, costs=costs))]
    if draft is not None:
        facts = _described(draft, target.name)
        figures = measure_pair(target, draft, corpus)
        write_json(draft / PROVENANCE, facts | {"measured": figures | {"target": target.name}})
        written.append(_write(draft, "draft", _card(draft, facts, target.name, figures)))
    return written


def read_provenance(folder: Path) -> dict[str, Any]:
    """Returns the provenance.json of a training run. Raises InvalidRequest if it cannot be read."""
    try:
        facts: dict[str, Any] = read_object(folder / PROVENANCE)
    except (OSError, ValueError) as error:
        raise InvalidRequest(
            f"cannot read {folder / PROVENANCE}: {error}; pass a folder written by 'foretoken train'"
        ) from error
    if "config" not in facts:
        raise InvalidRequest(f"{folder} was not written by 'foretoken train', and only such models get a card")
    return facts


def _described(folder: Path, target: str | None = None) -> dict[str, Any]:
    """Returns the provenance, with the present names of the folders in its command."""
    facts, config = read_provenance(folder), read_object(folder / "config.json")
    usual: ModelShape = TARGET_SHAPE
    what = f"target {folder.name}"
    if config["model_type"] == MODEL_TYPE:
        usual, what = HYBRID.usual, f"{HYBRID.command} {folder.name}"
    elif target is not None:
        usual = DRAFT_SHAPE
        device = "" if facts.get("device", "cpu") == "cpu" else " --device cuda"
        what = f"draft {folder.name} {target} {DistillConfig(**facts.get('distill', {})).arguments()}{device}"
    shape: ModelShape = usual.of(config)
    facts["role"] = "draft" if target is not None else HYBRID.role if usual is HYBRID.usual else "target"
    facts["command"] = command_line(f"{what} {shape.arguments(usual)}", TrainConfig(**facts["config"]), facts["corpus"])
    write_json(folder / PROVENANCE, facts)
    return facts


def _write(folder: Path, role: str, text: str) -> Path:
    (folder / "README.md").write_text(text, encoding="utf-8")
    write_json(folder / ZOO_ENTRY, {"name": folder.name, "role": role})
    return folder / "README.md"


def _card(
    folder: Path,
    facts: dict[str, Any],
    target: str | None = None,
    figures: dict[str, float] | None = None,
    costs: dict[str, float] | None = None,
) -> str:
    config = read_object(folder / "config.json")
    role = facts["role"] if target is None else f"draft, distilled from {target}"
    rows = [
        ("role", role),
        ("parameters", f"{facts['parameters']:,}"),
        ("layers x width", f"{config['num_hidden_layers']} x {config['hidden_size']}"),
        *_mixers(config),
        ("vocabulary", f"{config['vocab_size']:,} (byte-level BPE)"),
        ("positions", f"{config['max_position_embeddings']:,}, trained on windows of {facts['config']['window']}"),
        ("tokens seen", f"{facts['tokens']:,} of a corpus of {facts['corpus_tokens']:,}"),
        ("training time", f"{facts['minutes']} minutes on {machine(facts)}"),
        ("held-out loss", f"{(figures or facts)['held_out_loss']:.3f} nats per token"),
    ]
    if costs is not None:
        rows.append(("held-out loss on foretoken's runtime, bfloat16 and int8", _beside(**costs)))
    if "mtp" in facts:
        rows += _further(facts["mtp"])
    if figures is not None:
        rows += [
            (f"acceptance rate beside {target}, temperature 1", f"{figures['overlap']:.3f}"),
            (f"acceptance rate beside {target}, temperature 0", f"{figures['argmax_agreement']:.3f}"),
        ]
    lines = [f"# {folder.name}", "", _DATA["standard library" in facts["corpus"]].format(corpus=facts["corpus"])]
    lines += ["2 % of the files were held out, chosen by a hash of their names.", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in rows]
    if figures is not None:
        count = f"{figures['held_out_tokens']:,.0f}"
        lines += ["", f"Acceptance is a mean over the {count} held-out tokens, one position at a time:"]
        lines += ["at temperature 1 the sum of min(p, q), at temperature 0 the share of equal argmaxes."]
    commands = [facts["command"], *([facts["mtp"]["command"]] if "mtp" in facts else [])]
    lines += [
        "",
        "Trained by",
        "",
        *(f"    {command}" for command in commands),
        "",
        "Weights: Apache-2.0. Settings, versions and the",
    ]
    lines += [f"curve of the run: `{PROVENANCE}`.", "", "It is a small model for tests, demonstrations and benchmarks;"]
    lines += ["it completes Python, and knows nothing else.", ""]
    return "\n".join(lines)


def _mixers(config: dict[str, Any]) -> list[tuple[str, str]]:
    if "num_experts" not in config:
        return []
    attention = config["layer_types"].count("full_attention")
    return [
        ("layers", f"{len(config['layer_types']) - attention} of gated DeltaNet, {attention} of attention"),
        (
            "experts",
            f"{config['num_experts']} a layer, {config['num_experts_per_tok']} of them and a shared one a token",
        ),
    ]


def _further(mtp: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns what is said about the MTP layer of a checkpoint."""
    depths = sum(name.startswith("greedy_") for name in mtp)
    rows = [("MTP layer", f"trained with the model, then {mtp['minutes']} minutes on its own outputs")]
    for name, temperature in (("greedy", 0), ("drawn", 1)):
        chances = ", ".join(f"{mtp[f'{name}_{depth + 1}']:.3f}" for depth in range(depths))
        rows.append((f"acceptance of its chain by position, temperature {temperature}", chances))
    return rows


def machine(facts: dict[str, Any]) -> str:
    """Returns where a model was trained, from its provenance."""
    device: str = facts.get("device", "cpu")
    return f"a CPU ({facts['processor']})" if device == "cpu" else f"a GPU ({device})"


def _beside(held_out_loss_bfloat16: float, held_out_loss_int8: float) -> str:
    change = held_out_loss_int8 / held_out_loss_bfloat16 - 1
    return f"{held_out_loss_bfloat16:.4f} and {held_out_loss_int8:.4f} nats per token ({change:+.2%})"
