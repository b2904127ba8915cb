"""Trains the bundled encoder-decoder pair, which fixes bugs in Python: the commands ``foretoken train seq2seq...``.

Tasks are snippets of Python with planted bugs, and the original snippets. A snippet is a function or consecutive
statements of one block. The rest of it shows how to fix it: the misspelt name occurs elsewhere, the open bracket is not
closed. Most of the output is copied from the input, as in any edit.
"""

from __future__ import annotations

import ast
import copy
import keyword
import re
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers.processors import TemplateProcessing
from torch import nn

from foretoken import zoo
from foretoken.core.artifacts import MODEL, PROVENANCE
from foretoken.core.errors import InvalidRequest, ModelLoadError, reason_of
from foretoken.core.files import write_json
from foretoken.core.progress import Reporter
from foretoken.core.schema import read_object
from foretoken.core.settings import changed_options
from foretoken.models.formats.checkpoint import quiet_transformers
from foretoken.quantize.cached import checkpoint_folder
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
from foretoken.train.data import Corpus, standard_library
from foretoken.train.losses import acceptance_weight, agreement, distillation_loss, weighted_means
from foretoken.train.runs import TrainingRun
from foretoken.train.shapes import SEQ2SEQ_DRAFT_SHAPE, SEQ2SEQ_SHAPE, T5Shape

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, T5ForConditionalGeneration

MIN_TOKENS = 40  # of a snippet
HELD_OUT_TASKS = 256  # evaluated with teacher forcing
ACCEPTANCE_SHARE = 0.3  # last fraction of the run, which changes from KL to the acceptance loss
IGNORED = -100  # label that losses ignore, as in transformers
_MARGIN = 12  # tokens that bugs may add, including the end-of-text token
_HELD_OUT_SEED = 1 << 20  # differs from the seeds of training batches
_LAYER_SCALE = 0.3  # initial factor of the layers' outputs
_DISTANCE_BIAS = 6.0  # initial bias, in nats, of each head's own distance
_GENERATED = 96  # tasks of a model card that are generated greedily
_ROWS = 32  # generated at once

_WORD = re.compile(r"[A-Za-z_]{4,}")
_MARK = re.compile(r":(?=\n)|,(?= )|[()\[\]{}\"']")
_SMALL = re.compile(r"\b(?:def|class|in|is|as|import|return|else|self) ")
_SPACED = re.compile(r"\b\w+ (?=\S)")
_EQUAL = re.compile(r"(?m)(?<=^)[ ]*(?:if|elif|while|assert|return)\b.*?(==)")
_SELF = re.compile(r"\bself\.(?=\w)")
_LINE = re.compile(r"(?m)(?<=\n)[ ]*(?=\S)")


def plant(text: str, rng: np.random.Generator, max_bugs: int = 3) -> str:
    """Returns ``text`` with one to ``max_bugs`` bugs, unchanged only if no bug fits."""
    broken = text
    for _ in range(1 + int(rng.integers(max_bugs))):
        for kind in rng.permutation(len(BUGS)):
            worse = BUGS[kind](broken, rng)
            if worse not in (broken, text):
                broken = worse
                break
    return broken


def _misspell(text: str, rng: np.random.Generator) -> str:
    """Drops, doubles or swaps a letter of a keyword, or of a name that occurs elsewhere."""
    words = list(_WORD.finditer(text))
    counts = Counter(word.group() for word in words)
    repeated = [w for w in words if counts[w.group()] > 1 or keyword.iskeyword(w.group())]
    if not repeated:
        return text
    word = repeated[int(rng.integers(len(repeated)))]
    at = int(rng.integers(word.start() + 1, word.end()))
    before, letter, after = text[: at - 1], text[at - 1 : at + 1], text[at + 1 :]
    return before + (letter[0], letter + letter[1], letter[::-1])[int(rng.integers(3))] + after


def _lose_mark(text: str, rng: np.random.Generator) -> str:
    return _cut(text, _span(_MARK, text, rng))


def _lose_word(text: str, rng: np.random.Generator) -> str:
    return _cut(text, _span(_SMALL, text, rng))


def _double_word(text: str, rng: np.random.Generator) -> str:
    span = _span(_SPACED, text, rng)
    return text if span is None else text[: span[1]] + text[span[0] :]


def _indent(text: str, rng: np.random.Generator) -> str:
    """Changes the indentation of one line, not the first."""
    span = _span(_LINE, text, rng)
    if span is None:
        return text
    indent = span[1] - span[0] + int(rng.choice([-4, -1, 1, 4]))
    return text[: span[0]] + " " * max(0, indent) + text[span[1] :]


def _assign(text: str, rng: np.random.Generator) -> str:
    span = _span(_EQUAL, text, rng, group=1)
    return text if span is None else text[: span[0]] + text[span[0] + 1 :]


def _lose_self(text: str, rng: np.random.Generator) -> str:
    return _cut(text, _span(_SELF, text, rng)) if text.count("self.") > 1 else text


def _span(pattern: re.Pattern[str], text: str, rng: np.random.Generator, group: int = 0) -> tuple[int, int] | None:
    """Returns the span of a random match, None if there is none."""
    spans = [match.span(group) for match in pattern.finditer(text)]
    return spans[int(rng.integers(len(spans)))] if spans else None


def _cut(text: str, span: tuple[int, int] | None) -> str:
    return text if span is None else text[: span[0]] + text[span[1] :]


Bug = Callable[[str, np.random.Generator], str]
BUGS: tuple[Bug, ...] = (_misspell, _lose_mark, _lose_word, _double_word, _indent, _assign, _lose_self)


class RepairTask(NamedTuple):
    """Input and expected output."""

    broken: str
    right: str


@dataclass(frozen=True)
class Snippets:
    """Snippets by the length in tokens of the rows to which they are padded, shortest first."""

    tokenizer: PreTrainedTokenizerFast
    by_length: dict[int, list[str]]

    @property
    def tokens(self) -> int:
        """Tokens of the padded rows."""
        return sum(length * len(texts) for length, texts in self.by_length.items())


Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Labels and source, int64 [B, T], and the mask of the source, bool [B, T]."""


def lengths(window: int) -> tuple[int, ...]:
    """Returns the row lengths for snippets of at most ``window`` tokens. There are few, as each is compiled once."""
    return tuple(sorted({max(16, round(window * share / 16) * 16) for share in (0.375, 0.625)} | {window}))


def snippets(texts: tuple[str, ...], tokenizer: PreTrainedTokenizerFast, window: int, seed: int) -> Snippets:
    """Returns all snippets of ``texts`` that fit ``window``, of random lengths. Files that do not parse are skipped.

    Raises InvalidRequest if there are none.
    """
    rng = np.random.default_rng(seed)
    distinct: dict[str, None] = {}
    for text in texts:
        for snippet in _statement_runs(text, tokenizer, window - _MARGIN, rng):
            distinct.setdefault(snippet)
    listed = list(distinct)
    by_length: dict[int, list[str]] = {length: [] for length in lengths(window)}
    for snippet, encoded in zip(listed, tokenizer.backend_tokenizer.encode_batch(listed), strict=True):
        fitting = [length for length in by_length if len(encoded.ids) + _MARGIN <= length]
        if fitting and len(encoded.ids) >= min(MIN_TOKENS, window // 4):
            by_length[fitting[0]].append(snippet)
    by_length = {length: kept for length, kept in by_length.items() if kept}
    if not by_length:
        raise InvalidRequest(f"the corpus has no Python that can be cut into snippets of at most {window} tokens")
    return Snippets(tokenizer, by_length)


def batches(data: Snippets, tokens: int, seed: int, start: int = 0) -> Iterator[Batch]:
    """Yields endless batches of about ``tokens`` target tokens, all rows of one length.

    Batch i depends on (seed, i) alone, so a run resumes exactly at batch ``start``. New bugs are planted each time a
    snippet is used.
    """
    weights = np.array([length * len(texts) for length, texts in data.by_length.items()], dtype=np.float64)
    step = start
    while True:
        rng = np.random.default_rng([seed, step])
        length = list(data.by_length)[int(rng.choice(len(weights), p=weights / weights.sum()))]
        texts = data.by_length[length]
        rows = [texts[int(i)] for i in rng.integers(len(texts), size=max(1, tokens // length))]
        yield task_batch(data.tokenizer, [RepairTask(plant(text, rng), text) for text in rows], length)
        step += 1


def task_batch(tokenizer: PreTrainedTokenizerFast, tasks: list[RepairTask], length: int) -> Batch:
    """Returns tasks as rows of ``length``. Source and labels end with the end-of-text token, then ``IGNORED``."""
    end = tokenizer.eos_token_id
    encode = tokenizer.backend_tokenizer.encode_batch
    broken = encode([task.broken for task in tasks], add_special_tokens=False)
    right = encode([task.right for task in tasks], add_special_tokens=False)
    labels = torch.full((len(tasks), length), IGNORED)
    source, mask = torch.full((len(tasks), length), end), torch.zeros(len(tasks), length, dtype=torch.bool)
    for i, (question, answer) in enumerate(zip(broken, right, strict=True)):
        # Bugs rarely lengthen a snippet beyond its row. Then the input is the original.
        ids = question.ids if len(question.ids) < length else answer.ids
        source[i, : len(ids)] = torch.tensor(ids)
        mask[i, : len(ids) + 1] = True
        labels[i, : len(answer.ids) + 1] = torch.tensor([*answer.ids, end])
    return labels, source, mask


def held_out(
    count: int,
    seed: int = 0,
    corpus: Corpus | None = None,
    tokenizer: PreTrainedTokenizerFast | None = None,
    window: int = 176,
) -> list[RepairTask]:
    """Returns tasks from held-out files. The same arguments give the same tasks.

    Args:
        count: Greatest number of tasks.
        seed: Seed of the order and the bugs.
        corpus: Text, by default the standard library.
        tokenizer: Tokenizer, by default the bundled one.
        window: Greatest number of tokens.

    Raises:
        InvalidRequest: There are none.
    """
    tokenizer = bundled_tokenizer() if tokenizer is None else tokenizer
    data = snippets((corpus or standard_library()).held_out, tokenizer, window, _HELD_OUT_SEED)
    texts = [text for listed in data.by_length.values() for text in listed]
    rng = np.random.default_rng([_HELD_OUT_SEED, seed])
    return [RepairTask(plant(texts[int(i)], rng), texts[int(i)]) for i in rng.permutation(len(texts))[:count]]


def held_out_batches(
    tokenizer: PreTrainedTokenizerFast, tasks: list[RepairTask], window: int, tokens: int
) -> list[Batch]:
    """Returns tasks as padded batches, each in the shortest rows that hold it."""
    by_length: dict[int, list[RepairTask]] = {length: [] for length in lengths(window)}
    for task in tasks:
        longest = max(len(ids) for ids in tokenizer(list(task), add_special_tokens=False)["input_ids"])
        fitting = [length for length in by_length if longest < length]
        by_length[fitting[0] if fitting else window].append(task)
    rows = {length: max(1, tokens // length) for length in by_length}
    return [
        task_batch(tokenizer, listed[at : at + rows[length]], length)
        for length, listed in by_length.items()
        for at in range(0, len(listed), rows[length])
    ]


def bundled_tokenizer() -> PreTrainedTokenizerFast:
    """Returns the tokenizer of the bundled causal target, which the encoder-decoder pair shares."""
    from transformers import PreTrainedTokenizerFast

    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(zoo.path("target"))
    return tokenizer


def _statement_runs(
    text: str, tokenizer: PreTrainedTokenizerFast, max_tokens: int, rng: np.random.Generator
) -> Iterator[str]:
    """Yields runs of whole statements of one block, of random lengths up to ``max_tokens``."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escape sequences in strings
            tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.split("\n")
    sizes = [len(e.ids) for e in tokenizer.backend_tokenizer.encode_batch([line.strip() + "\n" for line in lines])]
    ends = np.concatenate([[0], np.cumsum(sizes)])
    for block in _blocks(tree):
        at = 0
        while at < len(block):
            first, limit = _first_line(block[at]), int(rng.integers(MIN_TOKENS, max(MIN_TOKENS, max_tokens) + 1))
            stop = at
            while stop < len(block) and ends[block[stop].end_lineno or 0] - ends[first] <= limit:
                stop += 1
            if stop == at and ends[block[at].end_lineno or 0] - ends[first] <= max_tokens:
                stop = at + 1
            if stop > at and not lines[first].lstrip().startswith("elif"):
                yield textwrap.dedent("\n".join(lines[first : block[stop - 1].end_lineno])).rstrip()
            at = max(stop, at + 1)


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block:
                yield block


def _first_line(statement: ast.stmt) -> int:
    """Returns the first line of a statement, decorators included, counted from 0."""
    decorators = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(d.lineno for d in decorators)]) - 1


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
    options: RunOptions,
    corpus: Corpus,
    shape: T5Shape = SEQ2SEQ_SHAPE,
    config: TrainConfig = SEQ2SEQ_CONFIG,
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
