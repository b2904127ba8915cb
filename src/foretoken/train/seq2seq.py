"""``foretoken train seq2seq``: trains a small T5 v1.1 that repairs Python (see ``repair``)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from tokenizers.processors import TemplateProcessing
from torch import nn

from foretoken.core.artifacts import MODEL
from foretoken.core.errors import InvalidRequest
from foretoken.core.schema import read_object
from foretoken.train.data import Corpus
from foretoken.train.files import check_run, checkpoint_of, write_json
from foretoken.train.optimization import TrainConfig, compiled
from foretoken.train.progress import quiet_transformers
from foretoken.train.provenance import command_line, provenance, write_trained
from foretoken.train.repair import IGNORED, Batch, batches, bundled_tokenizer, held_out, held_out_batches, snippets
from foretoken.train.trainer import LossFn, Trainer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, T5ForConditionalGeneration


@dataclass(frozen=True)
class T5Shape:
    """Size of a T5. The defaults are the bundled target's, about 8.4 M parameters."""

    d_model: int = 256
    d_ff: int = 512
    num_layers: int = 4
    num_decoder_layers: int = 4
    num_heads: int = 8
    d_kv: int = 32

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise InvalidRequest(f"{name} is {value}; it must be at least 1")

    def arguments(self, usual: T5Shape) -> str:
        """Returns the command line options for fields that differ from ``usual``."""
        options = {
            "d_model": "--hidden",
            "d_ff": "--intermediate",
            "num_layers": "--layers",
            "num_decoder_layers": "--decoder-layers",
            "num_heads": "--heads",
            "d_kv": "--head-dim",
        }
        return " ".join(f"{o} {getattr(self, n)}" for n, o in options.items() if getattr(self, n) != getattr(usual, n))


SEQ2SEQ_SHAPE = T5Shape()
SEQ2SEQ_CONFIG = TrainConfig(minutes=34.0, batch=16, window=176, decay=0.5)
HELD_OUT_TASKS = 256
_LAYER_SCALE = 0.3  # initial factor of the layers' outputs
_DISTANCE_BIAS = 6.0  # initial bias, in nats, of each head's own distance


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
    given = F.pad(labels, (1, -1), value=model.config.decoder_start_token_id)
    given = given.masked_fill(given == IGNORED, model.config.pad_token_id)
    logits: torch.Tensor = model(input_ids=source, attention_mask=mask, decoder_input_ids=given, use_cache=False).logits
    return logits


def label_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross-entropy of logits [B, T, V] over the labels [B, T] that are not ``IGNORED``."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)


def compiled_by_length(loss_fn: LossFn, config: TrainConfig) -> LossFn:
    """Returns ``loss_fn`` compiled for each length of rows. The trainer would compile one function for any length."""
    fixed: LossFn = compiled(loss_fn, config.compile, dynamic=False)
    return fixed


@torch.no_grad()
def measure(model: T5ForConditionalGeneration, held_out: list[Batch]) -> dict[str, float]:
    """Returns the held-out loss (nats per token) and the accuracy of the argmax, teacher-forced."""
    loss = right = tokens = 0.0
    for batch in held_out:
        with torch.autocast("cpu", torch.bfloat16):
            logits = logits_of(model, batch)
        counted = batch[0] != IGNORED
        n = int(counted.sum())
        loss += n * label_loss(logits, batch[0]).item()
        right += int((logits.argmax(-1) == batch[0])[counted].sum())
        tokens += n
    return {"held_out_loss": loss / tokens, "token_accuracy": right / tokens}


def train_seq2seq(
    out: Path,
    corpus: Corpus,
    shape: T5Shape = SEQ2SEQ_SHAPE,
    config: TrainConfig = SEQ2SEQ_CONFIG,
    resume: bool = False,
    force: bool = False,
) -> dict[str, float]:
    """Trains a T5 on repair tasks with the bundled tokenizer. Ctrl-C leaves a checkpoint beside ``out``.

    Args:
        out: Folder of the model.
        corpus: Text.
        shape: Size of the model.
        config: Training configuration. A step has about ``batch * window`` target tokens, in rows of at most
            ``window``.
        resume: Continues an interrupted run.
        force: Replaces an earlier model at ``out``, and starts an interrupted run again.

    Returns:
        The last evaluation.

    Raises:
        InvalidRequest: The settings are not valid.
        TrainingError: Files cannot be written, or the loss diverges.
    """
    run = check_run(out, MODEL, corpus.paths, resume, force)
    tokenizer = bundled_tokenizer()
    tokens = config.batch * config.window
    data = snippets(corpus.train, tokenizer, config.window, config.seed)
    held = evaluation_batches(corpus, tokenizer, config)
    model = new_model(shape, tokenizer, config.seed, tied=False)
    trainer = Trainer(
        model, replace(config, compile=False), checkpoint_of(run.path), lambda row: -row["held_out_loss"], rate_scale
    )
    if resume:
        trainer.resume()

    def loss_fn(batch: Batch) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return label_loss(logits_of(model, batch), batch[0])

    each = batches(data, tokens, config.seed, trainer.step)
    trainer.run(each, compiled_by_length(loss_fn, config), lambda: measure(model, held))
    card = provenance(
        command_line(f"seq2seq {run.path.name} {shape.arguments(SEQ2SEQ_SHAPE)}", config, corpus.name),
        config,
        trainer,
        role="seq2seq-target",
        corpus=corpus.name,
        snippets=sum(map(len, data.by_length.values())),
        parameters=model.num_parameters(),
        **trainer.history[-1],
    )
    return write_trained(run, trainer, card, lambda folder: save(model, tokenizer, folder, tied=False))


def evaluation_batches(corpus: Corpus, tokenizer: PreTrainedTokenizerFast, config: TrainConfig) -> list[Batch]:
    """Returns up to ``HELD_OUT_TASKS`` held-out tasks as batches."""
    tasks = held_out(HELD_OUT_TASKS, config.seed, corpus, tokenizer, config.window)
    return held_out_batches(tokenizer, tasks, config.window, config.batch * config.window)


def save(model: T5ForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path, tied: bool) -> None:
    """Writes bf16 weights, config and a tokenizer that appends the end-of-text token, as T5's do."""
    end = tokenizer.eos_token
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
