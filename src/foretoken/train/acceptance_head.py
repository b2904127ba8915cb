"""``foretoken train acceptance``: a head that tells from a draft's hidden state whether its next token will stand.

It is taught by what the target says about text that it wrote itself: the chance of acceptance there, sum min(p, q) of a
drawn token and 0 or 1 of an argmax, instead of single outcomes (SpecDec++, 2405.19715).
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from foretoken.core.checks import integer, number
from foretoken.models.formats.checkpoint import load_tokenizer
from foretoken.models.loading import resolve_device
from foretoken.propose.draft_model import check_vocabulary
from foretoken.propose.stopping.learned import EXTRA, MODEL_TYPE, features
from foretoken.train.data import Corpus
from foretoken.train.files import PROVENANCE, atomic_directory, checkpoint_of, write_json
from foretoken.train.generated import PROMPTS, Prompts, prepared
from foretoken.train.heads import HeadConfig
from foretoken.train.lessons import Teacher, capped
from foretoken.train.progress import Reporter
from foretoken.train.trainer import TrainConfig, Trainer, provenance

ACCEPTANCE_CONFIG = TrainConfig(steps=1500, batch=512, window=256, learning_rate=3e-3, weight_decay=0.05, compile=False)


@dataclass(frozen=True)
class AcceptanceConfig:
    """The head's size and its lessons. ``batch`` of the ``TrainConfig`` is in places, its ``window`` in tokens."""

    intermediate: int = 64  # units
    windows: int = 256  # at most
    generated_share: float = 0.75  # of the windows: written by the target, the others cut from the corpus
    held_out: int = 16  # windows that the target writes on from held-out files, at each of two temperatures

    def __post_init__(self) -> None:
        for name in ("intermediate", "windows", "held_out"):
            integer(name, getattr(self, name), 1)
        number("generated_share", self.generated_share, 0, 1)

    def arguments(self) -> str:
        """The command line options that give these settings."""
        usual = asdict(AcceptanceConfig())
        changed = {name: value for name, value in asdict(self).items() if value != usual[name]}
        return " ".join(f"--{name.replace('_', '-')} {value:g}" for name, value in changed.items())


@dataclass(frozen=True)
class Places:
    """Places in text. x: float32 [N, H + 3], see ``stopping.learned.features``. chance: [N], to be accepted there."""

    chance: Tensor
    x: Tensor


class Classifier(nn.Module):
    """``propose.stopping.learned.AcceptanceHead`` in training, on features brought to mean 0 and deviation 1."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, width: int, units: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, units), nn.Linear(units, 1)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("deviation", torch.ones(width))

    def standardise(self, x: Tensor) -> None:
        """Take mean and deviation from these features [N, H + 3]."""
        self.mean.copy_(x.mean(0))
        self.deviation.copy_(x.std(0, correction=0).clamp_min(1e-3))

    def forward(self, x: Tensor) -> Tensor:
        """-> log-odds, [N]"""
        odds: Tensor = self.down(F.silu(self.up((x - self.mean) / self.deviation)))
        return odds[:, 0]

    def tensors(self) -> dict[str, Tensor]:
        """The checkpoint, which reads features as they are."""
        up = self.up.weight / self.deviation
        bias = self.up.bias - up @ self.mean
        found = {"up.weight": up, "up.bias": bias, "down.weight": self.down.weight, "down.bias": self.down.bias}
        return {name: value.detach().float().cpu().contiguous() for name, value in found.items()}


def train_acceptance(
    out: Path,
    target: Path,
    draft: Path,
    corpus: Corpus,
    config: TrainConfig = ACCEPTANCE_CONFIG,
    settings: AcceptanceConfig | None = None,
    resume: bool = False,
    device: str = "auto",
) -> dict[str, float]:
    """Train the head for ``draft`` before ``target`` and write it to ``out``; returns the last evaluation.

    ``config.minutes`` covers the target's writing too. Raises ModelLoadError, InvalidRequest, TrainingError.
    """
    settings, started = settings or AcceptanceConfig(), time.monotonic()
    check_vocabulary(load_tokenizer(target), draft)
    folder = out.with_name(out.name + ".lessons")
    if not resume:
        shutil.rmtree(folder, ignore_errors=True)
    where = resolve_device(device)
    data = HeadConfig(windows=settings.windows, generated_share=settings.generated_share, held_out=settings.held_out)
    try:
        text = prepared(target, where, corpus, folder, config, data)
        places = _places(Teacher(target, where), Teacher(draft, where), text, config)
        torch.manual_seed(config.seed)
        head = Classifier(places["train"].x.shape[1], settings.intermediate)
        head.standardise(places["train"].x)
        head.to(where)
        trainer = Trainer(head, config, checkpoint_of(out), lambda row: -row["loss_greedy"] - row["loss_drawn"])
        if resume:
            trainer.resume()
        trainer.elapsed += time.monotonic() - started if config.minutes is not None and not trainer.step else 0.0
        trainer.run(_batches(places["train"], trainer, where), _loss(head), lambda: _evaluated(head, places, where))
    finally:
        if not checkpoint_of(out).exists():
            shutil.rmtree(folder, ignore_errors=True)
    what = f"acceptance {out.name} --model {target.name} --draft-model {draft.name} {settings.arguments()}"
    texts = "" if "standard library" in corpus.name else "--data FILES"
    card = provenance(
        " ".join(f"foretoken train {what} {config.arguments()} {texts}".split()), config, trainer, role="acceptance",
        corpus=corpus.name, target=target.name, draft=draft.name, settings=asdict(settings), **trainer.history[-1],
        tokens=len(places["train"].chance),
    )  # fmt: skip
    _save(out, head, card)
    trainer.checkpoint.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    return trainer.history[-1]


def _places(target: Teacher, draft: Teacher, text: dict[str, Tensor], config: TrainConfig) -> dict[str, Places]:
    """Training windows at mixed temperatures; held-out ones at their own, without the prompts that began them."""
    rng = np.random.default_rng([config.seed, 5])
    skip = min(Prompts().longest, config.window // 2)
    train = text["train"]
    return {
        "train": replay(target, draft, train, PROMPTS.temperatures(rng, len(train)), 0),
        "greedy": replay(target, draft, text["greedy"], [0.0] * len(text["greedy"]), skip),
        "drawn": replay(target, draft, text["drawn"], [1.0] * len(text["drawn"]), skip),
    }


@torch.no_grad()
def replay(target: Teacher, draft: Teacher, windows: Tensor, temperatures: list[float], skip: int) -> Places:
    """What the draft knew at every token of ``windows`` [N, T] from ``skip`` on, and what its guess was worth there."""
    chances, seen = [], []
    with Reporter("replaying the target's text") as report:
        for i, (ids, heat) in enumerate(zip(windows, temperatures, strict=True)):
            p = _logits(target, target.states(ids[None], [target.layers])[0, skip:, 0])
            hidden = draft.states(ids[None], [draft.layers])[0, skip:, 0]
            q = _fit(_logits(draft, hidden), p.shape[-1])
            rows = (q / heat if heat > 0 else q).softmax(-1)
            if heat > 0:
                chance = torch.minimum((p / heat).softmax(-1), rows).sum(-1)
            else:
                chance = (p.argmax(-1) == q.argmax(-1)).float()
            chances.append(chance.cpu())
            seen.append(features(hidden, rows, heat == 0).cpu())
            report.update((i + 1) / len(windows))
    return Places(torch.cat(chances), torch.cat(seen))


def _logits(teacher: Teacher, normed: Tensor) -> Tensor:
    return capped(F.linear(normed, teacher.head), teacher.softcap).float()


def _fit(logits: Tensor, width: int) -> Tensor:
    """The draft's rows as wide as the target's: see ``DraftModel``."""
    return F.pad(logits, (0, width - logits.shape[-1]), value=-torch.inf)


def auc(scores: Tensor, chance: Tensor) -> float:
    """The chance that an accepted place has a higher score than a rejected one, ties counting half.

    scores: [N]; chance: [N], of each to be accepted: every place counts as both, with the weights of each.
    """
    values, group = torch.unique(scores, return_inverse=True)
    yes = torch.zeros(len(values), dtype=torch.float64).index_add_(0, group, chance.double())
    no = torch.zeros(len(values), dtype=torch.float64).index_add_(0, group, 1 - chance.double())
    above = yes.sum() - yes.cumsum(0)
    pairs = float(yes.sum() * no.sum())
    return float((no * (above + yes / 2)).sum()) / pairs if pairs > 0 else 0.5


def _evaluated(head: Classifier, places: dict[str, Places], where: torch.device) -> dict[str, float]:
    """AUC and log-loss (nats) on held-out text at temperatures 0 and 1; beside them what entropy alone and no
    knowledge at all give.
    """
    found: dict[str, float] = {}
    for name in ("greedy", "drawn"):
        chance, x = places[name].chance, places[name].x
        odds = head(x.to(where)).cpu()
        mean = chance.mean().clamp(1e-6, 1 - 1e-6)
        found |= {
            f"auc_{name}": auc(odds, chance),
            f"auc_{name}_entropy": auc(-x[:, -EXTRA], chance),
            f"loss_{name}": float(F.binary_cross_entropy_with_logits(odds, chance)),
            f"loss_{name}_constant": float(-(mean * mean.log() + (1 - mean) * (1 - mean).log())),
        }
    return found


def _batches(places: Places, trainer: Trainer, where: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches; each depends on the seed and its step alone."""
    step = trainer.step
    while True:
        rows = np.random.default_rng([trainer.config.seed, 6, step]).integers(
            0, len(places.chance), trainer.config.batch
        )
        yield places.chance[rows].to(where), places.x[rows].to(where)
        step += 1


def _loss(head: Classifier) -> Callable[[Any], Tensor]:
    def loss_fn(batch: tuple[Tensor, Tensor]) -> Tensor:
        chance, x = batch
        return F.binary_cross_entropy_with_logits(head(x), chance)

    return loss_fn


def _save(out: Path, head: Classifier, card: dict[str, object]) -> None:
    tensors = head.tensors()
    units, width = tensors["up.weight"].shape
    card |= {"parameters": sum(t.numel() for t in tensors.values())}
    with atomic_directory(out) as folder:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        shape = {"hidden_size": width - EXTRA, "intermediate_size": units}
        write_json(folder / "config.json", {"model_type": MODEL_TYPE} | shape)
        write_json(folder / PROVENANCE, card)
