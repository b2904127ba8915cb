"""Trains the bundled encoder-decoder pair, which fixes bugs in Python: the commands ``foretoken train seq2seq...``."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from repair_tasks import IGNORED, Batch, RepairTask, batches, bundled_tokenizer, held_out, held_out_batches, snippets
from tokenizers.processors import TemplateProcessing
from torch import nn

from foretoken.core.artifacts import MODEL, PROVENANCE
from foretoken.core.checks import changed_options
from foretoken.core.errors import InvalidRequest, ModelLoadError, reason_of
from foretoken.core.files import write_json
from foretoken.core.progress import Reporter
from foretoken.core.schema import read_object
from foretoken.models.formats.checkpoint import quiet_transformers
from foretoken.quantize.run import checkpoint_folder
from foretoken.train.cards import (
    acceptance_note,
    acceptance_rows,
    corpus_lines,
    present_command,
    purpose,
    read_provenance,
    table,
    trained_by,
    write_card,
)
from foretoken.train.config import SEQ2SEQ_CONFIG, SEQ2SEQ_DRAFT_CONFIG, RunOptions, TrainConfig
from foretoken.train.data import Corpus
from foretoken.train.losses import acceptance_weight, agreement, distillation_loss, weighted_means
from foretoken.train.runs import TrainingRun
from foretoken.train.shapes import SEQ2SEQ_DRAFT_SHAPE, SEQ2SEQ_SHAPE, T5Shape

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, T5ForConditionalGeneration

HELD_OUT_TASKS = 256  # evaluated with teacher forcing
ACCEPTANCE_SHARE = 0.3  # last fraction of the run, which changes from KL to the acceptance loss
_LAYER_SCALE = 0.3  # initial factor of the layers' outputs
_DISTANCE_BIAS = 6.0  # initial bias, in nats, of each head's own distance
_GENERATED = 96  # tasks of a model card that are generated greedily
_ROWS = 32  # generated at once


def new_model(shape: T5Shape, tokenizer: PreTrainedTokenizerFast, seed: int, tied: bool) -> T5ForConditionalGeneration:
    """Returns an untrained T5 with gated GELU. ``tied`` embeddings scale the decoder's output, as in T5 v1.0."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(seed)
    end = tokenizer.eos_token_id
    config = T5Config(
        vocab_size=len(tokenizer),
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        tie_word_embeddings=tied,
        pad_token_id=end,
        eos_token_id=end,
        decoder_start_token_id=end,
        **vars(shape),
    )
    with quiet_transformers():
        model = T5ForConditionalGeneration(config)
    model.set_attn_implementation("eager")  # sdpa has no fast kernel with position biases, and compiles badly
    if not tied:
        model.lm_head.weight = nn.Parameter(model.shared.weight.detach() * shape.d_model**-0.5)
    _initialize_copying(model)
    return model


@torch.no_grad()
def _initialize_copying(model: T5ForConditionalGeneration) -> None:
    """Initializes near a model that copies, which small models otherwise need most of a short run to learn.

    Heads attend at fixed distances, the decoder's self-attention equals the encoder's, and queries and keys of the
    cross-attention are one projection, so that it attends to equal tokens in equal contexts. The outputs of layers are
    small beside the embeddings, with which the output matrix is aligned (see ``new_model``).
    """
    encoder, decoder = model.encoder, model.decoder
    for block, other in zip(decoder.block, encoder.block, strict=False):
        block.layer[0].load_state_dict(other.layer[0].state_dict())
        block.layer[2].load_state_dict(other.layer[1].state_dict())
    for block in (*encoder.block, *decoder.block):
        block.layer[0].SelfAttention.o.weight.mul_(_LAYER_SCALE)
        block.layer[-1].DenseReluDense.wo.weight.mul_(_LAYER_SCALE)
    for block in decoder.block:
        cross = block.layer[1].EncDecAttention
        cross.q.weight.copy_(cross.k.weight)
    for head in range(model.config.num_heads):
        distance, half = 1 + head // 2, model.config.relative_attention_num_buckets // 2
        # Every other head of the encoder looks ahead. That of the decoder attends to its own position.
        back, ahead = min(distance, half - 1), half + min(distance, half - 1)
        _biases(encoder)[ahead if head % 2 else back, head] += _DISTANCE_BIAS
        _biases(decoder)[0 if head % 2 else back, head] += _DISTANCE_BIAS


def _biases(stack: Any) -> torch.Tensor:
    """Returns the stack's table of position biases, [buckets, heads]."""
    table: torch.Tensor = stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    return table


def rate_scale(name: str) -> float:
    """Returns the factor of a parameter's learning rate. Position biases must move by several nats, so theirs is 10."""
    return 10.0 if "relative_attention_bias" in name else 1.0


def logits_of(model: T5ForConditionalGeneration, batch: Batch) -> torch.Tensor:
    """Returns teacher-forced logits [B, T, V]. Row i is the distribution of label i given those before it."""
    labels, source, mask = batch
    ids = F.pad(labels, (1, -1), value=model.config.decoder_start_token_id)
    ids = ids.masked_fill(ids == IGNORED, model.config.pad_token_id)
    logits: torch.Tensor = model(input_ids=source, attention_mask=mask, decoder_input_ids=ids, use_cache=False).logits
    return logits


def label_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross-entropy of logits [B, T, V] over the labels [B, T] that are not ``IGNORED``."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)


@torch.no_grad()
def measure(
    model: T5ForConditionalGeneration, held_out: list[Batch], target: T5ForConditionalGeneration | None = None
) -> dict[str, float]:
    """Returns the held-out loss (nats per token), and the accuracy of the argmax or the agreement with a target.

    Teacher-forced, over the whole vocabulary.
    """

    def figures(batch: Batch) -> tuple[int, dict[str, float]]:
        counted = batch[0] != IGNORED
        with torch.autocast("cpu", torch.bfloat16):
            logits = logits_of(model, batch)
            expected = None if target is None else logits_of(target, batch)
        loss = {"held_out_loss": label_loss(logits, batch[0]).item()}
        if expected is not None:
            return int(counted.sum()), loss | agreement(expected[counted], logits[counted])
        right = (logits.argmax(-1) == batch[0])[counted].float().mean().item()
        return int(counted.sum()), loss | {"token_accuracy": right}

    return weighted_means(map(figures, held_out))


def train_seq2seq(
    options: RunOptions, corpus: Corpus, shape: T5Shape = SEQ2SEQ_SHAPE, config: TrainConfig = SEQ2SEQ_CONFIG
) -> dict[str, float]:
    """Trains a T5 on repair tasks with the bundled tokenizer, see ``train.runs``.

    A step has about ``batch * window`` target tokens, in rows of at most ``window``.
    """
    run = TrainingRun(options, MODEL, corpus.paths)
    model = new_model(shape, bundled_tokenizer(), config.seed, tied=False)
    return _train(run, f"seq2seq {run.name} {changed_options(shape, SEQ2SEQ_SHAPE)}", model, corpus, config)


def _train(
    run: TrainingRun,
    arguments: str,
    model: T5ForConditionalGeneration,
    corpus: Corpus,
    config: TrainConfig,
    target: T5ForConditionalGeneration | None = None,
    acceptance_share: float = 0.0,
    target_name: str = "",
) -> dict[str, float]:
    """Trains a model on the answers, or on a target's distributions, and writes it. Returns the last evaluation."""
    tokenizer = bundled_tokenizer()
    data = snippets(corpus.train, tokenizer, config.window, config.seed)
    held_out = evaluation_batches(corpus, tokenizer, config)

    def score(row: dict[str, float]) -> float:
        return -row["held_out_loss"] if target is None else row["overlap"]

    def loss_fn(batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        labels, source, mask, acceptance = batch
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                expected = None if target is None else logits_of(target, (labels, source, mask))
            logits = logits_of(model, (labels, source, mask))
        if expected is None:
            return label_loss(logits, labels)
        return distillation_loss(logits, expected, acceptance, labels != IGNORED)

    # Compiled for each length of rows: one function for any length is slower.
    trainer = run.trainer(model, config, score, scale=rate_scale, dynamic=False)
    seed = config.seed if target is None else config.seed + 1
    training_batches = batches(data, config.batch * config.window, seed, trainer.step)
    weighted = ((*batch, acceptance_weight(trainer.progress(), acceptance_share)) for batch in training_batches)
    trainer.run(weighted, loss_fn, lambda: measure(model, held_out, target))
    facts: dict[str, Any] = {} if target is None else {"target": target_name, "acceptance_share": acceptance_share}
    return run.write(
        arguments,
        corpus.name,
        lambda folder: save(model, tokenizer, folder, tied=target is not None),
        role="seq2seq-target" if target is None else "seq2seq-draft",
        snippets=sum(map(len, data.by_length.values())),
        parameters=model.num_parameters(),
        **facts,
    )


def evaluation_batches(corpus: Corpus, tokenizer: PreTrainedTokenizerFast, config: TrainConfig) -> list[Batch]:
    """Returns up to ``HELD_OUT_TASKS`` held-out tasks as batches."""
    tasks = held_out(HELD_OUT_TASKS, config.seed, corpus, tokenizer, config.window)
    return held_out_batches(tokenizer, tasks, config.window, config.batch * config.window)


def save(model: T5ForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path, tied: bool) -> None:
    """Writes bf16 weights, config and a tokenizer that appends the end-of-text token, as T5's do."""
    tokenizer, end = copy.deepcopy(tokenizer), tokenizer.eos_token  # callers go on with theirs
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, tokenizer.eos_token_id)]
    )
    tokenizer.chat_template = None
    with quiet_transformers():
        model.bfloat16().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    config: dict[str, Any] = read_object(folder / "config.json")
    # transformers always writes true, but reads false as T5 v1.1, whose output is not scaled.
    write_json(folder / "config.json", config | {"tie_word_embeddings": tied})


def train_seq2seq_draft(
    options: RunOptions,
    target: Path,
    corpus: Corpus,
    shape: T5Shape = SEQ2SEQ_DRAFT_SHAPE,
    config: TrainConfig = SEQ2SEQ_DRAFT_CONFIG,
    acceptance_share: float = ACCEPTANCE_SHARE,
) -> dict[str, float]:
    """Distils a T5 with tied embeddings from a T5 target on repair tasks, see ``train.runs`` and ``train_seq2seq``.

    acceptance_share: last fraction of the run, which changes from KL to the acceptance loss.
    """
    run = TrainingRun(options, MODEL, (target, *corpus.paths))
    frozen, tokenizer = load_seq2seq(checkpoint_folder(target)).float(), bundled_tokenizer()
    frozen.set_attn_implementation("eager")  # as `new_model`
    if frozen.config.vocab_size != len(tokenizer):
        raise InvalidRequest(
            f"{target} has {frozen.config.vocab_size} tokens and the bundled tokenizer {len(tokenizer)}; "
            "pass a target written by 'foretoken train seq2seq'"
        )
    arguments = f"seq2seq-draft {run.name} --target {target.name} --acceptance-share {acceptance_share:g}"
    arguments += f" {changed_options(shape, SEQ2SEQ_DRAFT_SHAPE)}"
    model = new_model(shape, tokenizer, config.seed, tied=True)
    return _train(run, arguments, model, corpus, config, frozen, acceptance_share, target.name)


def load_seq2seq(path: Path) -> T5ForConditionalGeneration:
    """Loads the T5 at ``path`` in bfloat16, frozen. Raises ModelLoadError."""
    from transformers import T5ForConditionalGeneration

    try:
        with quiet_transformers():
            model = T5ForConditionalGeneration.from_pretrained(path, dtype=torch.bfloat16)
    except Exception as error:
        raise ModelLoadError(
            f"cannot load the target {path}: {reason_of(error)}; pass a folder written by 'foretoken train seq2seq'"
        ) from error
    return model.eval().requires_grad_(False)


def write_seq2seq_cards(target: Path, draft: Path | None, corpus: Corpus) -> list[Path]:
    """Writes README.md and zoo.json beside the weights of ``target``, and of ``draft`` with its measured acceptance.

    Raises:
        ModelLoadError: A model cannot be loaded.
        InvalidRequest: ``foretoken train`` did not write a folder.
    """
    draft_facts = None if draft is None else read_provenance(draft)
    facts, model = read_provenance(target), load_seq2seq(target)
    config = TrainConfig(**facts["config"])
    tasks = evaluation_batches(corpus, bundled_tokenizer(), config)
    written_tasks = held_out(_GENERATED, 0, corpus, window=config.window)
    figures = measure(model, tasks) | exactness(model, written_tasks, config.window)
    facts["command"] = present_command(f"seq2seq {target.name}", target, facts, SEQ2SEQ_SHAPE)
    written = [_write(target, facts, figures)]
    if draft is not None and draft_facts is not None:
        facts, small = draft_facts, load_seq2seq(draft)
        figures = measure(small, tasks) | measure(small, tasks, model)
        what = f"seq2seq-draft {draft.name} --target {target.name} --acceptance-share {facts['acceptance_share']:g}"
        facts["command"] = present_command(what, draft, facts, SEQ2SEQ_DRAFT_SHAPE)
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


def _write(folder: Path, facts: dict[str, Any], figures: dict[str, float]) -> Path:
    """Writes the measurement to the provenance, and the card."""
    write_json(folder / PROVENANCE, facts | {"measured": figures})
    config = read_object(folder / "config.json")
    target, window = facts.get("target"), facts["config"]["window"]
    rows = [
        ("role", facts["role"] + (f", distilled from {target}" if target else "")),
        ("parameters", f"{facts['parameters']:,}"),
        ("layers x width", f"{config['num_layers']} + {config['num_decoder_layers']} x {config['d_model']}"),
        ("vocabulary", f"{config['vocab_size']:,} (byte-level BPE, as the causal models')"),
        ("tasks", f"{facts['snippets']:,} snippets of at most {window} tokens, new bugs each time"),
        ("training", f"{facts['steps']:,} steps, {facts['minutes']} minutes on one core ({facts['processor']})"),
        ("held-out loss", f"{figures['held_out_loss']:.3f} nats per token"),
        ("accuracy of the next token", f"{figures['token_accuracy']:.1%}"),
    ]
    note: list[str] = []
    if target:
        rows += acceptance_rows(target, figures)
        note = acceptance_note("the tokens of the held-out answers")
    else:
        count = f"{figures['tasks_written']:.0f}"
        rows.append((f"repaired exactly, greedily, of {count} held-out tasks", f"{figures['exact_repairs']:.1%}"))
    about = [
        "A T5 (gated GELU, no dropout) that fixes a piece of Python with one to three",
        "bugs, such as a misspelt name or a missing bracket. Most of the output is copied from the input,",
        "as in any edit.",
    ]
    paragraphs = [about, corpus_lines(facts["corpus"]), table(rows), note, *trained_by([facts["command"]])]
    return write_card(folder, facts["role"], *paragraphs, purpose("fixes short pieces of Python"))
