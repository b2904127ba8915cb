"""Model cards of a T5 pair, written from provenance.json and from measurements."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from foretoken.core.schema import read_object
from foretoken.train.card import ZOO_ENTRY, read_provenance
from foretoken.train.data import Corpus
from foretoken.train.files import PROVENANCE, write_json
from foretoken.train.optimization import TrainConfig
from foretoken.train.progress import Reporter, quiet_transformers
from foretoken.train.provenance import command_line
from foretoken.train.repair import IGNORED, Batch, RepairTask, bundled_tokenizer, held_out, held_out_batches
from foretoken.train.seq2seq import SEQ2SEQ_SHAPE, T5Shape, measure
from foretoken.train.seq2seq_draft import SEQ2SEQ_DRAFT_SHAPE, load_seq2seq, measure_pair

if TYPE_CHECKING:
    from transformers import T5ForConditionalGeneration

_TASKS = 256  # evaluated with teacher forcing
_GENERATED = 96  # of them, generated greedily
_ROWS = 32  # generated at once
_DATA = {
    True: "Trained on the source of the {corpus}, which is under the PSF licence; its tests were left out.",
    False: "Trained on {corpus}.",
}


def write_seq2seq_cards(target: Path, draft: Path | None, corpus: Corpus) -> list[Path]:
    """Writes README.md and zoo.json beside the weights of ``target``, and of ``draft`` with its measured acceptance.

    Raises:
        ModelLoadError: A model cannot be loaded.
        InvalidRequest: ``foretoken train`` did not write a folder.
    """
    theirs = None if draft is None else read_provenance(draft)
    facts, model = read_provenance(target), load_seq2seq(target)
    held = _evaluation_batches(corpus, facts)
    figures = measure(model, held) | exactness(model, _tasks(corpus, facts, _GENERATED), facts["config"]["window"])
    facts["command"] = _command(f"seq2seq {target.name}", facts, target, SEQ2SEQ_SHAPE)
    written = [_write(target, facts, figures)]
    if draft is not None and theirs is not None:
        facts, small = theirs, load_seq2seq(draft)
        figures = measure(small, held) | measure_pair(model, small, held)
        what = f"seq2seq-draft {draft.name} --target {target.name} --acceptance-share {facts['acceptance_share']:g}"
        facts["command"] = _command(what, facts, draft, SEQ2SEQ_DRAFT_SHAPE)
        written.append(_write(draft, facts | {"target": target.name}, figures))
    return written


@torch.no_grad()
def exactness(model: T5ForConditionalGeneration, tasks: list[RepairTask], window: int) -> dict[str, float]:
    """Returns the share of ``tasks`` whose greedy output equals the expected one."""
    exact = rows = 0
    generate: Any = model.generate
    batches = held_out_batches(bundled_tokenizer(), tasks, window, _ROWS * window)
    with quiet_transformers(), Reporter("generating") as report:
        for labels, source, mask in batches:
            text = generate(source, attention_mask=mask, do_sample=False, num_beams=1, max_new_tokens=labels.shape[1])
            for answer, right in zip(text[:, 1:].tolist(), labels.tolist(), strict=True):
                ids = [token for token in right if token != IGNORED]
                exact += answer[: len(ids)] == ids
            rows += len(labels)
            report.update(rows / len(tasks))
    return {"exact_repairs": exact / len(tasks), "tasks_written": float(len(tasks))}


def _evaluation_batches(corpus: Corpus, facts: dict[str, Any]) -> list[Batch]:
    window = facts["config"]["window"]
    return held_out_batches(bundled_tokenizer(), _tasks(corpus, facts, _TASKS), window, 16 * window)


def _tasks(corpus: Corpus, facts: dict[str, Any], count: int) -> list[RepairTask]:
    return held_out(count, 0, corpus, window=facts["config"]["window"])


def _command(what: str, facts: dict[str, Any], folder: Path, usual: T5Shape) -> str:
    config = read_object(folder / "config.json")
    shape = T5Shape(**{name: config[name] for name in vars(usual)})
    return command_line(f"{what} {shape.arguments(usual)}", TrainConfig(**facts["config"]), facts["corpus"])


def _write(folder: Path, facts: dict[str, Any], figures: dict[str, float]) -> Path:
    write_json(folder / PROVENANCE, facts | {"measured": figures})
    (folder / "README.md").write_text(_card(folder, facts, figures), encoding="utf-8")
    write_json(folder / ZOO_ENTRY, {"name": folder.name, "role": facts["role"]})
    return folder / "README.md"


def _card(folder: Path, facts: dict[str, Any], figures: dict[str, float]) -> str:
    config = read_object(folder / "config.json")
    target, window = facts.get("target"), facts["config"]["window"]
    rows = [
        ("role", facts["role"] + (f", distilled from {target}" if target else "")),
        ("parameters", f"{facts['parameters']:,}"),
        ("layers x width", f"{config['num_layers']} + {config['num_decoder_layers']} x {config['d_model']}"),
        ("vocabulary", f"{config['vocab_size']:,} (byte-level BPE, as the causal models')"),
        ("tasks", f"{facts['snippets']:,} snippets of at most {window} tokens, new faults each time"),
        ("training", f"{facts['steps']:,} steps, {facts['minutes']} minutes on one core ({facts['processor']})"),
        ("held-out loss", f"{figures['held_out_loss']:.3f} nats per token"),
        ("accuracy of the next token", f"{figures['token_accuracy']:.1%}"),
    ]
    if target:
        rows += [
            (f"acceptance rate beside {target}, temperature 1", f"{figures['overlap']:.3f}"),
            (f"acceptance rate beside {target}, temperature 0", f"{figures['argmax_agreement']:.3f}"),
        ]
    else:
        count = f"{figures['tasks_written']:.0f}"
        rows.append((f"repaired exactly, greedily, of {count} held-out tasks", f"{figures['exact_repairs']:.1%}"))
    lines = [f"# {folder.name}", "", "A T5 (gated GELU, no dropout) that repairs a piece of Python with one to three"]
    lines += ["faults, such as a misspelt name or a missing bracket. Most of the output is copied from the input,"]
    lines += ["as in any edit.", ""]
    lines += [_DATA["standard library" in facts["corpus"]].format(corpus=facts["corpus"])]
    lines += ["2 % of the files were held out, chosen by a hash of their names.", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in rows]
    if target:
        lines += ["", "Acceptance is a mean over the tokens of the held-out answers, one position at a time:"]
        lines += ["at temperature 1 the sum of min(p, q), at temperature 0 the share of equal argmaxes."]
    lines += ["", "Trained by", "", f"    {facts['command']}", "", "Weights: Apache-2.0. Settings, versions and the"]
    lines += [f"curve of the run: `{PROVENANCE}`.", "", "It is a small model for tests, demonstrations and benchmarks;"]
    return "\n".join([*lines, "it repairs short pieces of Python, and knows nothing else.", ""])
