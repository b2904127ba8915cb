"""Training runs: the artifact, the files beside it until a run is finished, and its provenance.

The functions ``train_...`` take ``options``, the output and device, ``corpus``, the text, and ``config``, the training
configuration. Text must be split as it was for the target, or the held-out figures are too good. They return the last
evaluation. They raise ModelLoadError if a model cannot be loaded, InvalidRequest if the settings are not valid or the
output must not be written, and TrainingError if files cannot be written or the loss diverges. Ctrl-C leaves a
checkpoint beside the output.
"""

import platform
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foretoken.core.artifacts import CHECKPOINT, DISTRIBUTIONS, PROVENANCE, TRAINING_TEXT, Destination
from foretoken.core.errors import InvalidRequest
from foretoken.core.files import write_json
from foretoken.train import processes
from foretoken.train.config import RunOptions, TrainConfig
from foretoken.train.trainer import Score, Trainer


class TrainingRun:
    """A run that trains one artifact. An earlier checkpoint of a run that is not resumed is deleted.

    Args:
        options: Output of the run.
        kind: Kind of the artifact.
        inputs: Files and folders that the run reads.

    Attributes:
        name: Name of the artifact.
        checkpoint: Checkpoint file beside the artifact.
        text: Folder of text and hidden states beside it.
        distributions: Folder of the target's distributions beside it.

    Raises:
        InvalidRequest: The output or a file beside it must not be written, or a checkpoint would be lost.
    """

    def __init__(self, options: RunOptions, kind: str, inputs: Iterable[Path | None] = ()) -> None:
        sources, resume, force = [source for source in inputs if source is not None], options.resume, options.force
        self._out, self._resume = Destination.checked(options.out, kind, sources, force), resume
        self.name = self._out.path.name
        kinds = {"checkpoint": CHECKPOINT, "lessons": TRAINING_TEXT, "distributions": DISTRIBUTIONS}
        besides = [self._out.path.with_name(f"{self.name}.{ending}") for ending in kinds]
        for beside, its_kind in zip(besides, kinds.values(), strict=True):
            Destination.checked(beside, its_kind, sources, force=True)
        self.checkpoint, self.text, self.distributions = besides
        if self.checkpoint.exists() and not (resume or force):
            raise InvalidRequest(
                f"{self.checkpoint} is left from an interrupted run; pass --resume to continue it, or --force to start "
                "again"
            )
        if force and not resume:
            self.checkpoint.unlink(missing_ok=True)

    def trainer(self, model: nn.Module, config: TrainConfig, score: Score, **options: Any) -> Trainer:
        """Returns the run's trainer, at its checkpoint if the run is resumed. options: further ones of ``Trainer``."""
        self.config, self._trainer = config, Trainer(model, config, self.checkpoint, score, **options)
        if self._resume:
            self._trainer.resume()
        return self._trainer

    @contextmanager
    def text_folder(self, named: Path | None = None) -> Iterator[Path]:
        """Yields the folder of text and hidden states, ``named`` by the user or beside the artifact.

        The latter is emptied before a new run, and removed afterwards unless the run was interrupted.
        """
        folder, interrupted = named or self.text, False
        removable = named is None and processes.rank() == 0
        if removable and not self._resume:
            shutil.rmtree(folder, ignore_errors=True)
        processes.wait()
        try:
            yield folder
        except KeyboardInterrupt:
            interrupted = True
            raise
        finally:
            if removable and not interrupted and not self.checkpoint.exists():
                shutil.rmtree(folder, ignore_errors=True)

    def write(
        self, arguments: str, corpus: str, save: Callable[[Path], None], option: str = "--corpus", **facts: object
    ) -> dict[str, float]:
        """Writes the artifact, whole or not at all, and removes the checkpoint. Returns the last evaluation.

        Under torchrun the first process writes.

        Args:
            arguments: Arguments of ``foretoken train`` that reproduce the run, but those of the training configuration.
            corpus: Name of the corpus.
            save: Writes the weights to a folder.
            facts: Further entries of the provenance.
        """
        trainer, config = self._trainer, self.config
        if processes.rank() > 0:
            return trainer.history[-1]
        device = next(trainer.model.parameters()).device
        card: dict[str, object] = {
            "command": command_line(arguments, config, corpus, option),
            "revision": _revision(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "processor": platform.machine(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "config": asdict(config),
            "steps": trainer.step,
            "tokens": trainer.step * config.batch * config.window,
            "minutes": round(trainer.elapsed / 60, 1),
            "history": trainer.history,
            "corpus": corpus,
            **trainer.history[-1],
            **facts,
        }
        with self._out.folder() as folder:
            save(folder)
            write_json(folder / PROVENANCE, card)
        self.checkpoint.unlink(missing_ok=True)
        return trainer.history[-1]


def command_line(arguments: str, config: TrainConfig, corpus: str, option: str = "--corpus") -> str:
    """Returns the command that reproduces a run, see ``TrainingRun.write``. The user's files are a placeholder."""
    texts = f"{option} FILES" if corpus == "user files" else ""
    return " ".join(f"foretoken train {arguments} {config.arguments()} {texts}".split())


def _revision() -> str | None:
    """Returns the revision of our source, None if it is no checkout or the machine has no git."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        git = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return git.stdout.strip() if git.returncode == 0 else None
