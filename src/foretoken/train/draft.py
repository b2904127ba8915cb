"""``foretoken train draft``: distils a small Llama from a target.

The loss is the forward KL divergence from the target's distribution at every position (2310.08461), and in the last
part of the run -log sum_x min(p(x), q(x)), the negative log of the probability that a sampled token is accepted.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from foretoken.core.checks import number
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.models.loading import resolve_device
from foretoken.train.data import Corpus, encode, held_out_batches
from foretoken.train.files import PROVENANCE, atomic_directory, checkpoint_of, write_json
from foretoken.train.live_teacher import full_distillation_loss, live_windows
from foretoken.train.optimization import TrainConfig
from foretoken.train.progress import Reporter, quiet_transformers
from foretoken.train.target import DRAFT_SHAPE, Shape, command_line, new_model, next_token_loss, save
from foretoken.train.teacher import TaughtWindows, fixed_windows, teach
from foretoken.train.trainer import LossFn, Trainer, provenance

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

DRAFT_CONFIG = TrainConfig(minutes=20.0, batch=8, window=512, learning_rate=4e-3, weight_decay=0.05)
_FLOOR = 1e-6
TopLogprobs = tuple[torch.Tensor, torch.Tensor]
"""Token ids and log-probabilities of the k likeliest tokens, [B, T, k] each."""


@dataclass(frozen=True)
class DistillConfig:
    """Settings of the target's distributions and of the loss.

    Args:
        top: Likeliest tokens kept per position. The probability of the others is one bucket.
        acceptance_share: Last share of the run, which changes from KL to the acceptance loss.
        teacher_share: Greatest share of ``minutes`` for the pass over the target.
        disk_gigabytes: Disk space for the target's distributions.
        generated_share: Share of the windows that the target samples (2310.08461, on-policy data).
    """

    top: int = 64
    acceptance_share: float = 0.3
    teacher_share: float = 0.3
    disk_gigabytes: float = 2.0
    generated_share: float = 0.0

    def __post_init__(self) -> None:
        number("generated_share", self.generated_share, 0, 1)
        number("acceptance_share", self.acceptance_share, 0, 1)

    def arguments(self) -> str:
        """Returns the command line options that give these settings."""
        share = f"--acceptance-share {self.acceptance_share:g} --generated-share {self.generated_share:g}"
        return f"--top {self.top} {share} --disk-gigabytes {self.disk_gigabytes:g}"


DISTILL = DistillConfig()


def distillation_loss(logits: torch.Tensor, law: TopLogprobs, acceptance: torch.Tensor) -> torch.Tensor:
    """Returns (1 - acceptance) KL(p||q) - acceptance log sum min(p, q), mean over positions.

    Tokens outside of the top k count as one bucket, which bounds the KL from below and the overlap from above.

    Args:
        logits: The draft's, [B, T, V].
        law: The target's distribution, as ``teacher.top_law`` returns it.
        acceptance: Weight of the acceptance loss, a scalar tensor from 0 to 1.
    """
    ids, log_p = law
    logits = logits.float()
    log_q = logits.gather(-1, ids) - logits.logsumexp(-1, keepdim=True)
    p, q = log_p.exp(), log_q.exp()
    p_rest = (1 - p.sum(-1)).clamp_min(_FLOOR)
    q_rest = (1 - q.sum(-1)).clamp_min(_FLOOR)
    divergence = (p * (log_p - log_q)).sum(-1) + p_rest * (p_rest.log() - q_rest.log())
    overlap = torch.minimum(p, q).sum(-1) + torch.minimum(p_rest, q_rest)
    return ((1 - acceptance) * divergence - acceptance * overlap.clamp_min(_FLOOR).log()).mean()


def agreement(target_logits: torch.Tensor, draft_logits: torch.Tensor) -> tuple[float, float]:
    """Returns overlap and argmax agreement of logits [B, T, V]: the acceptance rates at temperatures 1 and 0.

    The overlap is sum_x min(p(x), q(x)) = 1 - TV(p, q) over the whole vocabulary. Both are means over positions.
    """
    p, q = target_logits.float().softmax(-1), draft_logits.float().softmax(-1)
    overlap = torch.minimum(p, q).sum(-1).mean().item()
    equal = (target_logits.argmax(-1) == draft_logits.argmax(-1)).float().mean().item()
    return overlap, equal


def train_draft(
    out: Path,
    target: Path,
    corpus: Corpus,
    shape: Shape = DRAFT_SHAPE,
    config: TrainConfig = DRAFT_CONFIG,
    resume: bool = False,
    distill: DistillConfig = DISTILL,
    device: str = "cpu",
) -> dict[str, float]:
    """Distils a draft from a target and writes it to ``out``.

    On a GPU the target computes its distributions in every step (``live_teacher``); on a CPU once, before.

    Args:
        out: Folder of the draft.
        target: Folder of the target.
        corpus: Text. It must be split as it was for the target, or the held-out figures are meaningless.
        shape: Size of the draft.
        config: Training configuration. Its ``minutes`` include the pass over the target.
        resume: Continues an interrupted run.
        distill: Settings of the target's distributions and of the loss.
        device: "auto", "cpu" or "cuda".

    Returns:
        The last evaluation.

    Raises:
        ModelLoadError: The target cannot be loaded.
        InvalidRequest: The settings are not valid.
        TrainingError: Files cannot be written, or the loss diverges.
    """
    where = resolve_device(device)
    teacher, tokenizer = load_teacher(target)
    teacher.to(where)
    stream = encode(corpus.train, tokenizer)
    if len(stream) < config.window:
        raise InvalidRequest(
            f"the corpus has {len(stream)} tokens, less than one window of {config.window}: add text or lower --window"
        )
    held_out = held_out_batches(encode(corpus.held_out, tokenizer), config.batch, config.window)
    model = new_model(shape, tokenizer, config.seed).to(where)
    trainer = Trainer(model, config, checkpoint_of(out), lambda row: row["overlap"])
    if resume:
        trainer.resume()
    store = out.with_name(out.name + ".distributions")
    lessons = _live if where.type == "cuda" else partial(_on_disk, store)
    taught = lessons(teacher, model, trainer, stream, distill)
    if config.minutes is not None:
        trainer.config = replace(config, minutes=max(config.minutes - taught.seconds / 60, config.minutes / 10))

    def evaluate() -> dict[str, float]:
        return measure(teacher, model, [batch.to(where) for batch in held_out])

    trainer.run(taught.batches, taught.loss, evaluate)
    with atomic_directory(out) as folder:
        save(model, tokenizer, folder)
        what = f"draft {out.name} {target.name} {distill.arguments()}{' --device cuda' if where.type == 'cuda' else ''}"
        command = command_line(what, shape, DRAFT_SHAPE, config, corpus.name)
        card = provenance(
            command,
            config,
            trainer,
            role="draft",
            corpus=corpus.name,
            corpus_tokens=len(stream),
            target=target.name,
            parameters=model.num_parameters(),
            taught_tokens=taught.tokens,
            teaching_minutes=round(taught.seconds / 60, 1),
            distill=asdict(distill),
            **trainer.history[-1],
        )
        write_json(folder / PROVENANCE, card)
    trainer.checkpoint.unlink(missing_ok=True)
    shutil.rmtree(store, ignore_errors=True)
    return trainer.history[-1]


def load_teacher(path: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Loads the target in bfloat16, frozen, and its tokenizer. Raises ModelLoadError."""
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    try:
        with quiet_transformers():
            model = LlamaForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="sdpa")
            tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelLoadError(
            f"cannot load the target {path}: {reason}; pass a folder written by 'foretoken train target'"
        ) from error
    return model.eval().requires_grad_(False), tokenizer


@torch.no_grad()
def measure(teacher: LlamaForCausalLM, model: LlamaForCausalLM, held_out: list[torch.Tensor]) -> dict[str, float]:
    """Returns held-out loss (nats), overlap and argmax agreement with the target, over the whole vocabulary."""
    loss = overlap = equal = tokens = 0.0
    for batch in held_out:
        p, q = teacher(batch, use_cache=False).logits, model(batch, use_cache=False).logits
        both = agreement(p, q)
        n = batch.numel()
        loss += n * next_token_loss(q, batch).item()
        overlap, equal, tokens = overlap + n * both[0], equal + n * both[1], tokens + n
    return {"held_out_loss": loss / tokens, "overlap": overlap / tokens, "argmax_agreement": equal / tokens}


@dataclass(frozen=True)
class _Lessons:
    """What a run trains on.

    Attributes:
        batches: Endless batches for ``loss``.
        loss: Returns the loss of a batch.
        tokens: Number of different tokens.
        seconds: Time that was spent before the first batch.
    """

    batches: Iterator[Any]
    loss: LossFn
    tokens: int
    seconds: float


def _live(
    teacher: LlamaForCausalLM, model: LlamaForCausalLM, trainer: Trainer, stream: torch.Tensor, distill: DistillConfig
) -> _Lessons:
    """Returns lessons whose distributions the target computes in every step."""
    config = trainer.config
    limit = None if config.minutes is None else config.minutes * 60 * distill.teacher_share
    windows = live_windows(teacher, stream, config.window, config.seed, distill.generated_share, limit)

    def loss_fn(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        ids, acceptance = batch
        with torch.no_grad():
            target_logits = teacher(ids, use_cache=False).logits
        with torch.autocast(ids.device.type, torch.bfloat16):
            logits = model(ids, use_cache=False).logits
        return full_distillation_loss(logits, target_logits, acceptance)

    batches = windows.batches(config.batch, config.seed, trainer.step)
    weighted = ((ids, _acceptance(trainer, distill).to(ids.device)) for ids in batches)
    return _Lessons(weighted, loss_fn, windows.ids.numel(), windows.seconds)


def _on_disk(
    store: Path,
    teacher: LlamaForCausalLM,
    model: LlamaForCausalLM,
    trainer: Trainer,
    stream: torch.Tensor,
    distill: DistillConfig,
) -> _Lessons:
    """Returns lessons whose distributions the target computes once, into ``store``."""
    config = trainer.config
    taught = _taught(teacher, stream, store, config, distill)

    def loss_fn(batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        ids, top_ids, top_logp, acceptance = batch
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids, use_cache=False).logits
        return distillation_loss(logits, (top_ids, top_logp), acceptance)

    batches = taught.batches(config.batch, config.seed, trainer.step)
    weighted = ((*batch, _acceptance(trainer, distill)) for batch in batches)
    return _Lessons(weighted, loss_fn, taught.ids.numel(), taught.seconds)


def _taught(
    teacher: LlamaForCausalLM, stream: torch.Tensor, store: Path, config: TrainConfig, distill: DistillConfig
) -> TaughtWindows:
    windows = fixed_windows(stream, config.window, config.seed)
    bytes_per_window = config.window * distill.top * 4
    windows = windows[: max(1, int(distill.disk_gigabytes * 1e9 / bytes_per_window))]
    count = int(distill.generated_share * len(windows))
    if count:
        windows = torch.cat([windows[: len(windows) - count], _continued(teacher, windows[-count:], config.seed)])
        windows = fixed_windows(windows.flatten(), config.window, config.seed + 1)
    limit = None if config.minutes is None else config.minutes * 60 * distill.teacher_share
    return teach(teacher, windows, store, distill.top, limit, config.compile)


@torch.no_grad()
def _continued(teacher: LlamaForCausalLM, windows: torch.Tensor, seed: int) -> torch.Tensor:
    """Continues the first quarter of each window to its full length, sampled from the target at temperature 1."""
    torch.manual_seed(seed)
    generate: Any = teacher.generate
    length, rows = windows.shape[1], []
    with quiet_transformers(), Reporter("generating") as report:
        for i, part in enumerate(windows.split(64)):
            prompt = part[:, : max(1, length // 4)]
            text = generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_length=length,
                eos_token_id=None,  # windows of the corpus continue past the end of a file, too
                pad_token_id=0,
            )
            rows.append(text)
            report.update((i + 1) * 64 / len(windows))
    return torch.cat(rows)


def _acceptance(trainer: Trainer, distill: DistillConfig) -> torch.Tensor:
    """Returns the weight of the acceptance loss: 0, then rising over a third of the last share, then 1."""
    share = distill.acceptance_share
    into = 0.0 if share <= 0 else (trainer.progress() - (1 - share)) / (share / 3)
    return torch.tensor(min(1.0, max(0.0, into)))
