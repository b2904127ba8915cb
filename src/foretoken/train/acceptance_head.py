"""``foretoken train acceptance``: trains a head that predicts acceptance from a draft's hidden state.

It is trained on text that the target sampled. The labels are probabilities of acceptance, sum min(p, q) of a sampled
token and 0 or 1 of an argmax, instead of single outcomes (SpecDec++, 2405.19715).
"""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from foretoken.core.artifacts import ACCEPTANCE_HEAD
from foretoken.core.checks import changed_options
from foretoken.core.files import write_json
from foretoken.core.progress import Reporter
from foretoken.models.formats.checkpoint import load_tokenizer, vocabulary_size
from foretoken.models.loading import resolve_device
from foretoken.propose.draft_model import check_vocabulary
from foretoken.propose.scores import EXTRA, MODEL_TYPE, features
from foretoken.quantize.run import checkpoint_folder
from foretoken.train.config import ACCEPTANCE_CONFIG, AcceptanceConfig, RunOptions, TrainConfig
from foretoken.train.data import MAX_PROMPT, Corpus, prepare_windows
from foretoken.train.frozen_target import FrozenTarget
from foretoken.train.runs import TrainingRun
from foretoken.train.sampling import mixed_temperatures
from foretoken.train.trainer import Trainer


@dataclass(frozen=True)
class AcceptanceExamples:
    """Probability of acceptance [N] and features [N, H + 3] at positions in text, see ``propose.scores.features``."""

    chance: Tensor
    x: Tensor


class Classifier(nn.Module):
    """``propose.scores.AcceptanceHead`` in training, on features with mean 0 and standard deviation 1."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, width: int, units: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, units), nn.Linear(units, 1)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("deviation", torch.ones(width))

    def standardise(self, x: Tensor) -> None:
        """Takes mean and standard deviation from features, [N, H + 3]."""
        self.mean.copy_(x.mean(0))
        self.deviation.copy_(x.std(0, correction=0).clamp_min(1e-3))

    def forward(self, x: Tensor) -> Tensor:
        odds: Tensor = self.down(F.silu(self.up((x - self.mean) / self.deviation)))
        return odds[:, 0]

    def tensors(self) -> dict[str, Tensor]:
        """Returns the checkpoint, with the standardisation folded into the weights."""
        up = self.up.weight / self.deviation
        bias = self.up.bias - up @ self.mean
        weights = {"up.weight": up, "up.bias": bias, "down.weight": self.down.weight, "down.bias": self.down.bias}
        return {name: value.detach().float().cpu().contiguous() for name, value in weights.items()}


def train_acceptance(
    options: RunOptions,
    target: Path,
    draft: Path,
    corpus: Corpus,
    config: TrainConfig = ACCEPTANCE_CONFIG,
    settings: AcceptanceConfig | None = None,
) -> dict[str, float]:
    """Trains the head of a pair, two folders or GGUF files, and writes it, see ``runs``.

    The minutes include sampling text.
    """
    settings, started = settings or AcceptanceConfig(), time.monotonic()
    run = TrainingRun(options, ACCEPTANCE_HEAD, (target, draft, *corpus.paths))
    target, draft = checkpoint_folder(target), checkpoint_folder(draft)
    tokenizer = load_tokenizer(target)
    check_vocabulary(tokenizer, vocabulary_size(target) or len(tokenizer), draft)
    where = resolve_device(options.device)
    with run.text_folder() as folder:
        text = prepare_windows(target, where, corpus, folder, config, settings)
        examples = _examples(FrozenTarget(target, where), FrozenTarget(draft, where), text, config)
        torch.manual_seed(config.seed)
        head = Classifier(examples["train"].x.shape[1], settings.intermediate)
        head.standardise(examples["train"].x)
        head.to(where)
        trainer = run.trainer(head, config, lambda row: -row["loss_greedy"] - row["loss_drawn"])
        trainer.shorten(time.monotonic() - started)

        def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
            chance, x = batch
            return F.binary_cross_entropy_with_logits(head(x), chance)

        trainer.run(_batches(examples["train"], trainer, where), loss, lambda: _evaluated(head, examples, where))
        return run.write(
            f"acceptance {run.name} --model {target.name} --draft-model {draft.name} {changed_options(settings)}",
            corpus.name,
            partial(_save, head),
            "--data",
            role="acceptance",
            target=target.name,
            draft=draft.name,
            settings=asdict(settings),
            tokens=len(examples["train"].chance),
            parameters=sum(t.numel() for t in head.tensors().values()),
        )


def _examples(
    target: FrozenTarget, draft: FrozenTarget, text: dict[str, Tensor], config: TrainConfig
) -> dict[str, AcceptanceExamples]:
    """Returns training examples at mixed temperatures, and held-out ones at 0 and 1 without the prompts."""
    rng = np.random.default_rng([config.seed, 5])
    skip, train = min(MAX_PROMPT, config.window // 2), text["train"]
    return {
        "train": replay(target, draft, train, mixed_temperatures(rng, len(train)).tolist(), 0),
        "greedy": replay(target, draft, text["greedy"], [0.0] * len(text["greedy"]), skip),
        "drawn": replay(target, draft, text["drawn"], [1.0] * len(text["drawn"]), skip),
    }


@torch.no_grad()
def replay(
    target: FrozenTarget, draft: FrozenTarget, windows: Tensor, temperatures: list[float], skip: int
) -> AcceptanceExamples:
    """Returns features and acceptance at every token of ``windows`` [N, T] from position ``skip`` on."""
    chances, rows_of_features = [], []
    with Reporter("computing features") as report:
        for i, (ids, temperature) in enumerate(zip(windows, temperatures, strict=True)):
            p, _ = _logits(target, ids, skip)
            q, hidden = _logits(draft, ids, skip)
            q = F.pad(q, (0, p.shape[-1] - q.shape[-1]), value=-torch.inf)  # as ``DraftModel`` does
            rows = (q / temperature if temperature > 0 else q).softmax(-1)
            if temperature > 0:
                chance = torch.minimum((p / temperature).softmax(-1), rows).sum(-1)
            else:
                chance = (p.argmax(-1) == q.argmax(-1)).float()
            chances.append(chance.cpu())
            rows_of_features.append(features(hidden, rows, temperature == 0).cpu())
            report.update((i + 1) / len(windows))
    return AcceptanceExamples(torch.cat(chances), torch.cat(rows_of_features))


def _logits(model: FrozenTarget, ids: Tensor, skip: int) -> tuple[Tensor, Tensor]:
    """Returns logits [T - skip, V] and hidden states [T - skip, H] of ids [T]."""
    states = model.states(ids[None], [model.layers])[:, skip:]
    batch = model.batch(ids[None, skip:], states, (model.layers,))
    return batch.target_logits()[0].float(), batch.last()[0]


def auc(scores: Tensor, chance: Tensor) -> float:
    """Returns the probability that an accepted token has a higher score than a rejected one (area under the ROC curve).

    Each token counts as accepted with weight ``chance`` [N], and as rejected with the rest.
    """
    values, group = torch.unique(scores, return_inverse=True)
    yes = torch.zeros(len(values), dtype=torch.float64).index_add_(0, group, chance.double())
    no = torch.zeros(len(values), dtype=torch.float64).index_add_(0, group, 1 - chance.double())
    above = yes.sum() - yes.cumsum(0)
    pairs = float(yes.sum() * no.sum())
    return float((no * (above + yes / 2)).sum()) / pairs if pairs > 0 else 0.5


def _evaluated(head: Classifier, examples: dict[str, AcceptanceExamples], where: torch.device) -> dict[str, float]:
    """Returns AUC and log-loss (nats) on held-out text, and those of entropy and of a constant for comparison."""
    result: dict[str, float] = {}
    for name in ("greedy", "drawn"):
        chance, x = examples[name].chance, examples[name].x
        odds = head(x.to(where)).cpu()
        mean = chance.mean().clamp(1e-6, 1 - 1e-6)
        result |= {
            f"auc_{name}": auc(odds, chance),
            f"auc_{name}_entropy": auc(-x[:, -EXTRA], chance),
            f"loss_{name}": float(F.binary_cross_entropy_with_logits(odds, chance)),
            f"loss_{name}_constant": float(-(mean * mean.log() + (1 - mean) * (1 - mean).log())),
        }
    return result


def _batches(examples: AcceptanceExamples, trainer: Trainer, where: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields endless batches. Each depends on the seed and its step alone."""
    step = trainer.step
    while True:
        rng = np.random.default_rng([trainer.config.seed, 6, step])
        rows = rng.integers(0, len(examples.chance), trainer.config.batch)
        yield examples.chance[rows].to(where), examples.x[rows].to(where)
        step += 1


def _save(head: Classifier, folder: Path) -> None:
    tensors = head.tensors()
    units, width = tensors["up.weight"].shape
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    shape = {"hidden_size": width - EXTRA, "intermediate_size": units}
    write_json(folder / "config.json", {"model_type": MODEL_TYPE} | shape)
