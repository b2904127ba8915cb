"""``foretoken train seq2seq``: a small T5 from scratch that mends Python (`repair`), in the form of T5 v1.1."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from foretoken.core.errors import InvalidRequest
from foretoken.core.schema import read_object
from foretoken.train.data import Corpus
from foretoken.train.files import PROVENANCE, atomic_directory, checkpoint_of, write_json
from foretoken.train.progress import quiet_transformers
from foretoken.train.repair import IGNORED, Batch, batches, bundled_tokenizer, held_out, held_out_batches, snippets
from foretoken.train.trainer import LossFn, TrainConfig, Trainer, compiled, provenance


@dataclass(frozen=True)
class T5Shape:
    """The size of a T5. The defaults are the bundled target's, about 8.4 M parameters."""

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
        """The command line options for what differs from ``usual``."""
        options = {
            "d_model": "--hidden", "d_ff": "--intermediate", "num_layers": "--layers",
            "num_decoder_layers": "--decoder-layers", "num_heads": "--heads", "d_kv": "--head-dim",
        }  # fmt: skip
        return " ".join(f"{o} {getattr(self, n)}" for n, o in options.items() if getattr(self, n) != getattr(usual, n))


SEQ2SEQ_SHAPE = T5Shape()
SEQ2SEQ_CONFIG = TrainConfig(minutes=34.0, batch=16, window=176, decay=0.5)
HELD_OUT_TASKS = 256
_SMALL, _FIXED = 0.3, 6.0  # of what layers add at first, against 1; of the bias for a head's own distance, in nats


def new_model(shape: T5Shape, tokenizer: PreTrainedTokenizerFast, seed: int, tied: bool) -> T5ForConditionalGeneration:
    """A freshly initialised T5 with gated GELU; ``tied`` embeddings scale the decoder's output, as in the first T5."""
    torch.manual_seed(seed)
    end = tokenizer.eos_token_id
    config = T5Config(
        vocab_size=len(tokenizer), feed_forward_proj="gated-gelu", dropout_rate=0.0, tie_word_embeddings=tied,
        pad_token_id=end, eos_token_id=end, decoder_start_token_id=end, **vars(shape),
    )  # fmt: skip
    with quiet_transformers():
        model = T5ForConditionalGeneration(config)
    model.set_attn_implementation("eager")  # position biases keep sdpa from its fast kernels, and compile badly there
    if not tied:
        model.lm_head.weight = nn.Parameter(model.shared.weight.detach() * shape.d_model**-0.5)
    _incline_to_copy(model)
    return model


@torch.no_grad()
def _incline_to_copy(model: T5ForConditionalGeneration) -> None:
    """Begin near a model that copies, which small models otherwise take most of a short run to find.

    Heads look at fixed distances, the decoder reads as the encoder does, and the cross-attention's queries and keys are
    one projection: it looks where the same stands after the same. What layers add is small beside the embeddings, along
    which the output matrix points (see `new_model`).
    """
    encoder, decoder = model.encoder, model.decoder
    for block, other in zip(decoder.block, encoder.block, strict=False):
        block.layer[0].load_state_dict(other.layer[0].state_dict())
        block.layer[2].load_state_dict(other.layer[1].state_dict())
    for block in (*encoder.block, *decoder.block):
        block.layer[0].SelfAttention.o.weight.mul_(_SMALL)
        block.layer[-1].DenseReluDense.wo.weight.mul_(_SMALL)
    for block in decoder.block:
        cross = block.layer[1].EncDecAttention
        cross.q.weight.copy_(cross.k.weight)
    for head in range(model.config.num_heads):
        distance, half = 1 + head // 2, model.config.relative_attention_num_buckets // 2
        # Every other head of the encoder looks ahead, where the decoder's stays where it is.
        back, ahead = min(distance, half - 1), half + min(distance, half - 1)
        _biases(encoder)[ahead if head % 2 else back, head] += _FIXED
        _biases(decoder)[0 if head % 2 else back, head] += _FIXED


def _biases(stack: Any) -> torch.Tensor:
    """The stack's table of position biases [buckets, heads]."""
    table: torch.Tensor = stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    return table


def rate_scale(name: str) -> float:
    """The position biases begin near zero and decide in steps of several; the usual rate would take half the run."""
    return 10.0 if "relative_attention_bias" in name else 1.0


def logits_of(model: T5ForConditionalGeneration, batch: Batch) -> torch.Tensor:
    """Teacher-forced logits [B, T, V]: row i is the law of label i given those before it."""
    labels, source, mask = batch
    given = F.pad(labels, (1, -1), value=model.config.decoder_start_token_id)
    given = given.masked_fill(given == IGNORED, model.config.pad_token_id)
    logits: torch.Tensor = model(input_ids=source, attention_mask=mask, decoder_input_ids=given, use_cache=False).logits
    return logits


def label_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over the labels that count. logits [B, T, V], labels [B, T]"""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)


def compiled_by_length(loss_fn: LossFn, config: TrainConfig) -> LossFn:
    """``loss_fn`` compiled once for each length of rows, where the trainer would compile one for any length."""
    fixed: LossFn = compiled(loss_fn, config.compile, dynamic=False)
    return fixed


@torch.no_grad()
def measure(model: T5ForConditionalGeneration, held_out: list[Batch]) -> dict[str, float]:
    """Held-out loss (nats per token) and share of tokens whose argmax is right, given the right ones before them."""
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
) -> dict[str, float]:
    """Train a T5 on repair tasks with the bundled tokenizer; returns the last evaluation.

    A step sees about ``config.batch * config.window`` target tokens, in rows of at most ``config.window``. Raises
    InvalidRequest, TrainingError; Ctrl-C leaves a checkpoint beside ``out``.
    """
    tokenizer = bundled_tokenizer()
    tokens = config.batch * config.window
    data = snippets(corpus.train, tokenizer, config.window, config.seed)
    judged = judged_batches(corpus, tokenizer, config)
    model = new_model(shape, tokenizer, config.seed, tied=False)
    trainer = Trainer(
        model, replace(config, compile=False), checkpoint_of(out), lambda row: -row["held_out_loss"], rate_scale
    )
    if resume:
        trainer.resume()

    def loss_fn(batch: Batch) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return label_loss(logits_of(model, batch), batch[0])

    each = batches(data, tokens, config.seed, trainer.step)
    trainer.run(each, compiled_by_length(loss_fn, config), lambda: measure(model, judged))
    with atomic_directory(out) as folder:
        save(model, tokenizer, folder, tied=False)
        card = provenance(
            command_line(f"seq2seq {out.name}", shape, SEQ2SEQ_SHAPE, config, corpus.name), config, trainer,
            role="seq2seq-target", corpus=corpus.name, snippets=sum(map(len, data.by_length.values())),
            parameters=model.num_parameters(), **trainer.history[-1],
        )  # fmt: skip
        write_json(folder / PROVENANCE, card)
    trainer.checkpoint.unlink(missing_ok=True)
    return trainer.history[-1]


def judged_batches(corpus: Corpus, tokenizer: PreTrainedTokenizerFast, config: TrainConfig) -> list[Batch]:
    """The held-out tasks that a run is judged by, as many as there are up to `HELD_OUT_TASKS`."""
    tasks = held_out(HELD_OUT_TASKS, config.seed, corpus, tokenizer, config.window)
    return held_out_batches(tokenizer, tasks, config.window, config.batch * config.window)


def command_line(what: str, shape: T5Shape, usual: T5Shape, config: TrainConfig, corpus: str) -> str:
    """The command that trains the same again; the user's own files are left for the user to name."""
    texts = "" if "standard library" in corpus else "--corpus FILES"
    return " ".join(f"foretoken train {what} {shape.arguments(usual)} {config.arguments()} {texts}".split())


def save(model: T5ForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path, tied: bool) -> None:
    """bf16 safetensors, config and a tokenizer that ends each text with the end token, as T5's do."""
    end = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, tokenizer.eos_token_id)]
    )
    tokenizer.chat_template = None  # it mends, and does not converse
    with quiet_transformers():
        model.bfloat16().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    config: dict[str, Any] = read_object(folder / "config.json")
    # transformers writes true whatever was asked, but reads false: as T5 v1.1, whose output is not scaled.
    write_json(folder / "config.json", config | {"tie_word_embeddings": tied})
