"""What reproduces a training run, written beside its weights."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from foretoken.core.artifacts import Destination
from foretoken.train.files import PROVENANCE, write_json
from foretoken.train.optimization import TrainConfig
from foretoken.train.trainer import Trainer


def command_line(what: str, config: TrainConfig, corpus: str, option: str = "--corpus") -> str:
    """Returns the command that reproduces a run.

    Args:
        what: Its arguments but those of the configuration.
        config: Training configuration.
        corpus: Name of the corpus. Files of the user's own are a placeholder.
        option: Name of the option for the corpus.
    """
    texts = f"{option} FILES" if corpus == "user files" else ""
    return " ".join(f"foretoken train {what} {config.arguments()} {texts}".split())


def provenance(command: str, config: TrainConfig, trainer: Trainer, **extra: object) -> dict[str, object]:
    """Returns what is needed to reproduce a run: command, versions, revision, settings and learning curve."""
    return {
        "command": command,
        "revision": _revision(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": platform.machine(),
        "device": _device(trainer.model),
        "config": asdict(config),
        "steps": trainer.step,
        "tokens": trainer.step * config.batch * config.window,
        "minutes": round(trainer.elapsed / 60, 1),
        "history": trainer.history,
        **extra,
    }


def write_trained(
    out: Destination, trainer: Trainer, card: dict[str, object], save: Callable[[Path], None]
) -> dict[str, float]:
    """Writes what was trained, whole or not at all, and removes the checkpoint. Returns the last evaluation.

    Args:
        out: Folder to write.
        trainer: Has finished its run.
        card: From ``provenance``.
        save: Writes the weights to a folder.
    """
    with out.folder() as folder:
        save(folder)
        write_json(folder / PROVENANCE, card)
    trainer.checkpoint.unlink(missing_ok=True)
    return trainer.history[-1]


def _revision() -> str | None:
    """Returns the revision of our source, None where it is no checkout or the machine has no git."""
    try:
        asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        git = subprocess.run(asked, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return git.stdout.strip() if git.returncode == 0 else None


def _device(model: nn.Module) -> str:
    """Returns "cpu", or the GPU's name."""
    device = next(model.parameters()).device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
