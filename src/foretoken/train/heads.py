"""``foretoken train eagle3|peagle|mtp|dflash|...``: trains a head on text that the target sampled."""

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from foretoken.core.artifacts import PROVENANCE, TRAINING_TEXT, Destination, heads_of
from foretoken.core.checks import changed_options
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.core.files import write_json
from foretoken.core.schema import read_object
from foretoken.models.formats.checkpoint import load_tokenizer, quiet_transformers
from foretoken.models.heads.files import TAPS_KEY, find_head, open_head, target_ids
from foretoken.models.loading import resolve_device
from foretoken.quantize.run import checkpoint_folder
from foretoken.train import processes
from foretoken.train.block_heads import BlockwiseHead, DFlashHead, DSparkHead, EarlyExitHead, JetSpecHead, MedusaHead
from foretoken.train.config import HEADS, HeadConfig, RunOptions, TrainConfig
from foretoken.train.data import MAX_PROMPT, Corpus, prepare_windows
from foretoken.train.eagle import Eagle3Head, PEagleHead
from foretoken.train.frozen_target import FrozenTarget, HiddenStateDataset, TrainBatch
from foretoken.train.head import Head
from foretoken.train.losses import acceptance_weight, evaluated, head_loss
from foretoken.train.mtp import MtpHead
from foretoken.train.runs import TrainingRun
from foretoken.train.target import next_token_loss
from foretoken.train.trainer import Trainer

TARGET_RATE = 0.05  # factor of the target's learning rate, with --unfreeze
_SIZES = {
    "taps": TAPS_KEY,
    "intermediate": "intermediate_size",
    "vocabulary": "draft_vocab_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "block": "block_size",
    "normed": "norm_output",
}  # of settings, and their keys in a head's config.json
Batch = tuple[Tensor, Tensor, Tensor]
"""Token ids, hidden states, and the weight of the acceptance loss."""

MODULES: dict[str, Callable[[Any, FrozenTarget, Tensor], Head]] = {
    "eagle3": Eagle3Head,
    "peagle": PEagleHead,
    "mtp": MtpHead,
    "medusa": MedusaHead,
    "blockwise": BlockwiseHead,
    "early-exit": EarlyExitHead,
    "dflash": DFlashHead,
    "jetspec": JetSpecHead,
    "dspark": DSparkHead,
}
"""Makes a head from its settings, the target, and the counts [V] of tokens in its text."""


def train_head(
    role: str,
    options: RunOptions,
    target: Path,
    corpus: Corpus,
    settings: Any = None,
    config: TrainConfig | None = None,
    data: HeadConfig | None = None,
    dataset: Path | None = None,
    hold: float | None = None,
    start: Path | None = None,
) -> dict[str, float]:
    """Trains a head and writes it, see ``runs``. The minutes include sampling text and computing hidden states.

    Args:
        role: A key of ``config.HEADS``.
        target: Folder or GGUF file of the target.
        settings: Settings of the head, by default those of its role. With ``start``, fields that have their default
            are that head's sizes.
        dataset: Folder of text and hidden states, which are reused or created there and kept. None removes them after
            the run.
        hold: Trains the target too, with this weight of the penalty on changes of its distribution, and writes it to
            ``out/target``. None leaves the target as it is.
        start: Folder of an earlier head of the same shape, to continue from, or the name of a bundled one.
    """
    kind, started = HEADS[role], time.monotonic()
    data, config = data or kind.data, config or kind.config
    start = None if start is None else find_head(kind.method, start, None)
    earlier = None if start is None else EarlierHead(start)
    settings = settings or kind.settings
    settings = settings if earlier is None else earlier.sized(settings, kind.settings)
    inputs = (target, start, *corpus.paths)
    run = TrainingRun(options, heads_of(kind.method), (*inputs, dataset))
    if dataset is not None:
        Destination.checked(dataset, TRAINING_TEXT, inputs, force=True)
    folder_of_target = checkpoint_folder(target)
    with processes.joined(resolve_device(options.device)) as where, run.text_folder(dataset) as folder:
        frozen = FrozenTarget(folder_of_target, where, config.compile)
        _check_window(MODULES[role](settings, frozen, torch.ones(frozen.vocab)), config)  # before any work
        text = prepare_windows(frozen.path, where, corpus, folder, config, data, target)
        torch.manual_seed(config.seed)
        head = _new_head(role, settings, frozen, text["train"], earlier).to(where)
        training = HeadTraining(head, _datasets(frozen, head, text, folder, data), text["text"], data, hold)
        trainer = run.trainer(training.model, config, _length, scale=_rate, headline=_headline)
        trainer.shorten(time.monotonic() - started)
        trainer.run(training.batches(trainer), training.loss, training.evaluate)
        facts = {
            "role": role,
            "target": frozen.path.name,
            "settings": asdict(settings),
            "data": asdict(data),
            **({} if earlier is None else {"started_from": earlier.provenance}),
            "preparing_minutes": round((time.monotonic() - started - trainer.elapsed) / 60, 1),
            "parameters": sum(t.numel() for t in head.tensors(frozen).values() if t.is_floating_point()),
        }
        arguments = f"{role} {run.name} --model {frozen.path.name} {_arguments(settings, data, earlier, hold)}"
        return run.write(arguments, corpus.name, training.save, "--data", **facts)


def _new_head(role: str, settings: Any, target: FrozenTarget, text: Tensor, earlier: "EarlierHead | None") -> Head:
    """Returns a head for the tokens of ``text``, with the weights of an earlier one if there is one."""
    counts = torch.bincount(text.flatten(), minlength=target.vocab)
    if earlier is None:
        return MODULES[role](settings, target, counts)
    head = MODULES[role](settings, target, earlier.ranked(counts))
    earlier.load_into(head)
    return head


def _arguments(settings: Any, data: HeadConfig, earlier: "EarlierHead | None", hold: float | None) -> str:
    """Returns the options of ``foretoken train`` for a head that differ from their defaults."""
    arguments = f"{changed_options(settings)} {changed_options(data)}"
    arguments += f" --start {earlier.folder.name}" if earlier is not None else ""
    return arguments + (f" --unfreeze --hold {hold:g}" if hold is not None else "")


def _check_window(head: Head, config: TrainConfig) -> None:
    if head.depths + 2 > config.window:
        raise InvalidRequest(
            f"windows of {config.window} tokens are too short for a head that predicts {head.depths}; expected at "
            f"least {head.depths + 2}"
        )


def _datasets(
    target: FrozenTarget, head: Head, text: dict[str, Tensor], folder: Path, data: HeadConfig
) -> dict[str, HiddenStateDataset]:
    """Returns the windows with their hidden states, by name; most of the disk space goes to those for training."""
    gigabytes = data.disk_gigabytes
    if gigabytes is None:
        gigabytes = 12.0 if target.device.type == "cpu" else 0.0
    shares = {"greedy": 0.05, "drawn": 0.05, "train": 0.9}
    return {
        name: HiddenStateDataset(target, text[name], head.taps, folder, share * gigabytes * 1e9, name)
        for name, share in shares.items()
    }


class EarlierHead:
    """A head that training continues from; floats if it was quantized. Raises InvalidRequest for an unreadable one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._config, tensors = open_head(folder)
            self._tensors = dict(tensors)
        except (OSError, ModelLoadError) as error:
            raise self._refusal(error) from error

    @property
    def provenance(self) -> dict[str, Any]:
        """Its provenance, its name if it has none."""
        file = self.folder / PROVENANCE
        return read_object(file) if file.is_file() else {"name": self.folder.name}

    def sized(self, settings: Any, usual: Any) -> Any:
        """Returns settings of this head's sizes, except for those that differ from ``usual``."""
        config = self._config
        sizes = {name: config[key] for name, key in _SIZES.items() if key in config and hasattr(settings, name)}
        taken = {name: size for name, size in sizes.items() if getattr(settings, name) == getattr(usual, name)}
        return replace(settings, **{n: tuple(size) if isinstance(size, list) else size for n, size in taken.items()})

    def ranked(self, counts: Tensor) -> Tensor:
        """Returns the counts [V] of tokens; among equally frequent ones, those that this head drafts come first."""
        if "d2t" not in self._tensors:
            return counts
        counts = counts.double()
        counts[target_ids(self._tensors, len(self._tensors["d2t"]))] += 0.5
        return counts

    def load_into(self, head: Head) -> None:
        """Copies its weights and attention window to ``head``. Raises InvalidRequest if their shapes differ."""
        try:
            head.start(self._tensors)
        except (KeyError, RuntimeError) as error:
            raise self._refusal(error) from error
        sliding = "sliding_attention" in self._config.get("layer_types", ())
        head.window = self._config.get("sliding_window") if sliding else None

    def _refusal(self, error: Exception) -> InvalidRequest:
        reason = str(error).strip().splitlines()[-1].strip()
        return InvalidRequest(f"cannot start from {self.folder}: {reason}; pass a folder with a head of the same shape")


def _rate(name: str) -> float:
    """Returns the factor of a parameter's learning rate, which is small for a target that is trained too."""
    return TARGET_RATE if name.startswith("target.") else 1.0


def _length(row: dict[str, float]) -> float:
    return row["length_greedy"] + row["length_drawn"]


def _headline(row: dict[str, float]) -> str:
    return f"held out {row['length_greedy']:.2f} tokens/pass greedily, {row['length_drawn']:.2f} at temperature 1"


class HeadTraining:
    """The batches, loss, evaluation and files of a head.

    Args:
        datasets: Windows with hidden states: "train", and those that the target sampled at temperatures 0 and 1.
        text: Held-out windows of the corpus, [N, T], for the loss of a target that is trained too.
        data: Settings of the loss.

    Attributes:
        model: The module that is trained.
    """

    def __init__(
        self, head: Head, datasets: dict[str, HiddenStateDataset], text: Tensor, data: HeadConfig, hold: float | None
    ) -> None:
        self.head, self.data, self.dataset, self.text = head, data, datasets["train"], text
        self.target, self.together = self.dataset.target, None
        self.held_out: tuple[HiddenStateDataset, ...] = datasets["greedy"], datasets["drawn"]
        self.model: nn.Module = head
        if hold is not None:
            self.model = self.together = CoTrained(head, self.target, hold).to(self.target.device)
            self._loss_before = text_loss(self.target, text)
            self.held_out = tuple(each.with_target(self.together.live(self.target)) for each in self.held_out)

    def batches(self, trainer: Trainer) -> Iterator[Batch]:
        """Yields training batches with the weight of the acceptance loss."""
        config = trainer.config
        for batch in self.dataset.batches(config.batch, config.seed, trainer.step):
            progress = trainer.progress()
            self.head.begin(progress, trainer.step, self.dataset.windows.shape[1])
            acceptance = acceptance_weight(progress, self.data.acceptance_share)
            yield batch.ids, batch.states, acceptance.to(batch.ids.device)

    def loss(self, batch: Batch) -> Tensor:
        ids, states, acceptance = batch
        train_batch = self.target.batch(ids, states, self.dataset.layers)
        with torch.autocast(ids.device.type, torch.bfloat16):
            if self.together is not None:
                return self.together.loss(train_batch, self.data.discount, acceptance)
            return head_loss(self.head, train_batch, self.data.discount, acceptance)

    def evaluate(self) -> dict[str, float]:
        """Returns the acceptance on text that the target sampled, without the prompts."""
        greedy, sampled = self.held_out
        result = evaluated(self.head, greedy, sampled, min(MAX_PROMPT, greedy.windows.shape[1] // 2))
        if self.together is not None:
            result |= {"target_loss_before": self._loss_before, "target_loss": text_loss(sampled.target, self.text)}
        return result

    def save(self, folder: Path) -> None:
        """Writes the head, and a target that was trained with it."""
        save_file(self.head.tensors(self.target), folder / "model.safetensors", metadata={"format": "pt"})
        config = self.head.describe(self.target)
        if self.head.window:
            kinds = ["sliding_attention"] * config["num_hidden_layers"]
            config |= {"layer_types": kinds, "sliding_window": self.head.window}
        write_json(folder / "config.json", config)
        if self.together is not None:
            self.together.save(self.target.path, folder / "target")


class CoTrained(nn.Module):
    """A head, and a copy of the target that is trained with it.

    The target is trained with a penalty (Medusa-2, 2401.10774): ``hold`` times KL(p || p'), where p is its distribution
    before and p' the present one.
    """

    def __init__(self, head: Head, target: FrozenTarget, hold: float) -> None:
        super().__init__()
        self.head, self.hold = head, hold
        self.target = copy.deepcopy(target.model).float().requires_grad_(True)
        self.softcap = target.softcap

    def live(self, target: FrozenTarget) -> FrozenTarget:
        now = copy.copy(target)
        now.adopt(self.target)
        return now

    def loss(self, frozen: TrainBatch, discount: float, acceptance: Tensor) -> Tensor:
        """Returns the head's loss on the present target plus the penalty. frozen: batch of the original target."""
        output: Any = self.target.base_model(frozen.ids, use_cache=False, output_hidden_states=True)
        states = torch.stack([output.hidden_states[layer] for layer in frozen.layers], dim=2)
        vectors = self.target.get_input_embeddings().weight, self.target.get_output_embeddings().weight
        now = TrainBatch(frozen.ids, states, frozen.layers, *vectors, self.softcap)
        loss = head_loss(self.head, now, discount, acceptance)
        before, after = (batch.target_logits().float().log_softmax(-1) for batch in (frozen, now))
        return loss + self.hold * (before.exp() * (before - after)).sum(-1).mean()

    def save(self, source: Path, folder: Path) -> None:
        """Writes the changed target in bfloat16, with the tokenizer of ``source``."""
        with quiet_transformers():
            copy.deepcopy(self.target).bfloat16().save_pretrained(folder)
            load_tokenizer(source).save_pretrained(folder)


@torch.no_grad()
def text_loss(target: FrozenTarget, windows: Tensor) -> float:
    """Returns the target's loss on ``windows`` [N, T] of the corpus, in nats per token."""
    losses = [next_token_loss(target.logits(rows), rows.to(target.device)).item() for rows in windows.split(4)]
    return sum(losses) / len(losses)
