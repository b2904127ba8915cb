"""Model cards of targets, drafts and heads, written from provenance.json and from measurements."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from foretoken.core.artifacts import PROVENANCE
from foretoken.core.checks import changed_options
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.core.files import write_json
from foretoken.core.schema import read_object
from foretoken.llm import LLM
from foretoken.models.base import Model
from foretoken.models.formats.checkpoint import load_tokenizer
from foretoken.models.loading import load_model
from foretoken.params import SamplingParams
from foretoken.plan.exports import export_lines
from foretoken.speculation import SpeculativeConfig
from foretoken.train.config import HEADS, DistillConfig, TrainConfig
from foretoken.train.data import Corpus, cut_prompts, encode, held_out_batches
from foretoken.train.draft import measure
from foretoken.train.frozen_target import FrozenTarget
from foretoken.train.hybrid import HYBRID
from foretoken.train.runs import command_line
from foretoken.train.shapes import DRAFT_SHAPE, HYBRID_TYPE, TARGET_SHAPE

_PROMPTS, _TOKENS = 24, 128  # of a measurement of a head
_WINDOW = 512  # tokens of a window of held-out text


def measure_pair(target: Path, draft: Path, corpus: Corpus) -> dict[str, float]:
    """Returns overlap, argmax agreement and loss of ``draft`` with ``target`` on held-out files, in bfloat16.

    Raises InvalidRequest if the two do not share a vocabulary.
    """
    cpu, tokenizer = torch.device("cpu"), load_tokenizer(target)
    if tokenizer.get_vocab() != load_tokenizer(draft).get_vocab():
        raise InvalidRequest(f"{target} and {draft} have different vocabularies; distil the draft from this target")
    held_out = held_out_batches(encode(corpus.held_out, tokenizer), 16, _WINDOW)
    return measure(FrozenTarget(target, cpu), FrozenTarget(draft, cpu).model, held_out) | {
        "held_out_tokens": float(sum(b.numel() for b in held_out))
    }


def measure_int8(target: Path, corpus: Corpus) -> dict[str, float]:
    """Returns the held-out loss (nats per token) of ``target`` on our runtime, in bfloat16 and quantized to int8."""
    plain = load_model(target, "bfloat16", "cpu", "native")
    int8 = load_model(target, "bfloat16", "cpu", "native", quantization="int8")
    stream = encode(corpus.held_out, load_tokenizer(target))
    batches = held_out_batches(stream, 1, min(_WINDOW, plain.max_length))
    windows = [row for batch in batches for row in batch.tolist()]
    return {"held_out_loss_bfloat16": _loss(plain, windows), "held_out_loss_int8": _loss(int8, windows)}


def _loss(model: Model, windows: Sequence[Sequence[int]]) -> float:
    """Returns the mean loss. Each window is a prompt of one token and a draft, so that one pass gives all logits."""
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
    written = [_card(target, facts, costs=costs)]
    if draft is not None:
        facts = _described(draft, target.name)
        figures = measure_pair(target, draft, corpus)
        write_json(draft / PROVENANCE, facts | {"measured": figures | {"target": target.name}})
        written.append(_card(draft, facts, target.name, figures))
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
    usual: Any = TARGET_SHAPE
    what = f"target {folder.name}"
    if config["model_type"] == HYBRID_TYPE:
        usual, what = HYBRID.usual, f"{HYBRID.command} {folder.name}"
    elif target is not None:
        usual = DRAFT_SHAPE
        device = "" if facts.get("device", "cpu") == "cpu" else " --device cuda"
        what = f"draft {folder.name} {target} {changed_options(DistillConfig(**facts.get('distill', {})))}{device}"
    facts["role"] = "draft" if target is not None else HYBRID.role if usual is HYBRID.usual else "target"
    facts["command"] = present_command(what, folder, facts, usual)
    write_json(folder / PROVENANCE, facts)
    return facts


def present_command(what: str, folder: Path, facts: dict[str, Any], usual: Any) -> str:
    """Returns the command that trained a model of its own shape.

    Args:
        what: Arguments but those of the shape and of the training configuration.
        folder: Folder of the model.
        facts: Its provenance.
        usual: The default shape.
    """
    shape = usual.of(read_object(folder / "config.json"))
    return command_line(f"{what} {changed_options(shape, usual)}", TrainConfig(**facts["config"]), facts["corpus"])


def write_card(folder: Path, role: str, *paragraphs: Sequence[str]) -> Path:
    """Writes README.md, and zoo.json, which lists a model among the bundled ones. Returns the former."""
    blocks = [[f"# {folder.name}"], *filter(None, paragraphs)]
    (folder / "README.md").write_text("\n\n".join("\n".join(block) for block in blocks) + "\n", encoding="utf-8")
    write_json(folder / "zoo.json", {"name": folder.name, "role": role})
    return folder / "README.md"


def _card(
    folder: Path,
    facts: dict[str, Any],
    target: str | None = None,
    figures: dict[str, float] | None = None,
    costs: dict[str, float] | None = None,
) -> Path:
    """Writes the card of a model, of a draft if it has a target and figures."""
    config = read_object(folder / "config.json")
    rows = [
        ("role", facts["role"] if target is None else f"draft, distilled from {target}"),
        ("parameters", f"{facts['parameters']:,}"),
        ("layers x width", f"{config['num_hidden_layers']} x {config['hidden_size']}"),
        *_layer_rows(config),
        ("vocabulary", f"{config['vocab_size']:,} (byte-level BPE)"),
        ("positions", f"{config['max_position_embeddings']:,}, trained on windows of {facts['config']['window']}"),
        ("tokens seen", f"{facts['tokens']:,} of a corpus of {facts['corpus_tokens']:,}"),
        ("training time", f"{facts['minutes']} minutes on {machine(facts)}"),
        ("held-out loss", f"{(figures or facts)['held_out_loss']:.3f} nats per token"),
    ]
    if costs is not None:
        rows.append(("held-out loss on foretoken's runtime, bfloat16 and int8", _compared(**costs)))
    if (mtp := facts.get("mtp")) is not None:
        rows.append(("MTP layer", f"trained with the model, then {mtp['minutes']} minutes on its own outputs"))
        rows += _position_rows("acceptance of its chain by position", mtp)
    note: list[str] = []
    if target is not None and figures is not None:
        rows += acceptance_rows(target, figures)
        note = acceptance_note(f"the {figures['held_out_tokens']:,.0f} held-out tokens")
    commands = [facts["command"], *([facts["mtp"]["command"]] if "mtp" in facts else [])]
    about = corpus_lines(facts["corpus"])
    return write_card(
        folder, facts["role"], about, table(rows), note, *trained_by(commands), purpose("completes Python")
    )


def table(rows: Sequence[tuple[str, str]]) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]


def acceptance_rows(target: str, figures: dict[str, float]) -> list[tuple[str, str]]:
    """Returns the rows about the acceptance of a draft of ``target``."""
    beside = f"acceptance rate beside {target}, temperature"
    return [(f"{beside} 1", f"{figures['overlap']:.3f}"), (f"{beside} 0", f"{figures['argmax_agreement']:.3f}")]


def acceptance_note(tokens: str) -> list[str]:
    """Returns the lines that explain ``acceptance_rows``. tokens: those of the mean."""
    return [
        f"Acceptance is a mean over {tokens}, one position at a time:",
        "at temperature 1 the sum of min(p, q), at temperature 0 the fraction of equal argmaxes.",
    ]


def trained_by(commands: Sequence[str]) -> list[list[str]]:
    licence = f"Weights: Apache-2.0. Settings, versions and the curve of the run: `{PROVENANCE}`."
    return [["Trained by"], [f"    {command}" for command in commands], [licence]]


def purpose(what: str) -> list[str]:
    """Returns the lines about the use of a bundled model, which does ``what``."""
    return ["It is a small model for tests, demonstrations and benchmarks;", f"it {what}, and knows nothing else."]


def _layer_rows(config: dict[str, Any]) -> list[tuple[str, str]]:
    if "num_experts" not in config:
        return []
    attention, experts = config["layer_types"].count("full_attention"), config["num_experts_per_tok"]
    return [
        ("layers", f"{len(config['layer_types']) - attention} of gated DeltaNet, {attention} of attention"),
        ("experts", f"{config['num_experts']} a layer, {experts} of them and a shared one a token"),
    ]


def _position_rows(what: str, figures: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the acceptance by position at both temperatures, from an evaluation of ``losses.evaluated``."""
    rows = []
    for name, temperature in (("greedy", 0), ("drawn", 1)):
        chances = [figures[f"{name}_{k + 1}"] for k in range(sum(key.startswith(f"{name}_") for key in figures))]
        rows.append((f"{what}, temperature {temperature}", ", ".join(f"{chance:.3f}" for chance in chances)))
    return rows


def corpus_lines(corpus: str) -> list[str]:
    origin = f"Trained on {corpus}."
    if "standard library" in corpus:
        origin = f"Trained on the source of the {corpus}, which is under the PSF licence; its tests were excluded."
    return [origin, "2 % of the files were held out, chosen by a hash of their names."]


def machine(facts: dict[str, Any]) -> str:
    """Returns the machine that a model was trained on, from its provenance."""
    device: str = facts.get("device", "cpu")
    return f"a CPU ({facts['processor']})" if device == "cpu" else f"a GPU ({device})"


def _compared(held_out_loss_bfloat16: float, held_out_loss_int8: float) -> str:
    change = held_out_loss_int8 / held_out_loss_bfloat16 - 1
    return f"{held_out_loss_bfloat16:.4f} and {held_out_loss_int8:.4f} nats per token ({change:+.2%})"


def measure_head(target: Path, head: Path, role: str, corpus: Corpus) -> dict[str, float]:
    """Returns mean acceptance lengths at temperatures 0 and 1 with the method's default number of draft tokens.

    They are measured over continuations of prefixes from held-out files.
    """
    method = HEADS[role].method
    llm = LLM(target, speculative_config={"method": method, "model": str(head), "control": "fixed"}, seed=0)
    stream = encode(corpus.held_out, load_tokenizer(target))
    prompts = cut_prompts(stream, np.random.default_rng(0), _PROMPTS, 100, 100)
    figures: dict[str, float] = {"nodes": SpeculativeConfig(method=method).tokens}
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=_TOKENS, temperature=temperature, ignore_eos=True)
        stats = [output.stats for output in llm.generate(prompts, params)]
        drafts = sum(s.drafts for s in stats)
        figures[f"mean_acceptance_length_{temperature:g}"] = 1 + sum(s.accepted for s in stats) / max(drafts, 1)
    llm.close()
    return figures


def write_head_card(target: Path, head: Path, corpus: Corpus) -> Path:
    """Writes README.md and zoo.json beside the weights of ``head``, with its acceptance on ``target``.

    Raises InvalidRequest if ``foretoken train`` did not write the folder.
    """
    facts = read_provenance(head)
    if facts.get("role") not in HEADS:
        raise InvalidRequest(f"{head} holds a {facts.get('role')!r}; expected one of {', '.join(HEADS)}")
    figures, title = measure_head(target, head, facts["role"], corpus), HEADS[facts["role"]].title
    write_json(head / PROVENANCE, facts | {"measured": figures | {"target": target.name}})
    runs = _runs(facts)
    settings = ", ".join(f"{name} {value}" for name, value in facts["settings"].items() if value is not None)
    rows = [
        ("role", f"{facts['role']}: {title} of {target.name}"),
        ("parameters", f"{facts['parameters']:,}"),
        ("settings", settings),
        ("tokens seen", f"{sum(run['tokens'] for run in runs):,}"),
        ("text", f"{facts['data']['generated_share']:.0%} sampled by the target, the rest {facts['corpus']}"),
        ("training time", f"{sum(run['minutes'] for run in runs):.0f} minutes on {machine(facts)}"),
        *_position_rows("acceptance by position", facts),
    ]
    for temperature in (0, 1):
        name = f"mean acceptance length at temperature {temperature}, with {figures['nodes']:.0f} draft tokens per step"
        rows.append((name, f"{figures[f'mean_acceptance_length_{temperature}']:.2f}"))
    note = [
        "Acceptance by position is conditional on the positions before, along text that the target sampled from",
        "prefixes of held-out files. Mean acceptance length: tokens per target pass over",
        f"{_PROMPTS} continuations of {_TOKENS} tokens of such prefixes, with the method's default settings.",
    ]
    about = [f"{title} for `{target.name}`, of no use with other models."]
    engines = other_engines(head.name, facts["role"], int(figures["nodes"]))
    trained = trained_by([run["command"] for run in runs])
    return write_card(head, facts["role"], about, table(rows), note, *engines, *trained)


def other_engines(name: str, role: str, tokens: int) -> list[list[str]]:
    """Returns the paragraphs about a head in other engines. tokens: those that it drafts per step here."""
    config = {"method": HEADS[role].method, "model": name, "num_speculative_tokens": tokens}
    lines = export_lines(config | ({"parallel_drafting": True} if role == "peagle" else {}))[1:]
    return [["In other engines, in the layout that `foretoken convert` writes for them"], [f"    {s}" for s in lines]]


def _runs(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the provenance of all runs that trained a head, in order."""
    earlier = facts.get("started_from")
    return [*(_runs(earlier) if earlier else []), facts]
