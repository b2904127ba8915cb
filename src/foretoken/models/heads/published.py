"""Finds published drafters of a model, without a download: by the model's names, and on this machine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from foretoken import zoo
from foretoken.models.formats.checkpoint import load_config, resolve
from foretoken.models.formats.gguf import is_gguf
from foretoken.models.heads.kinds import MTP, shipped_methods
from foretoken.zoo.drafters import PublishedDrafter, drafters_of

_BASE_MODEL = re.compile(r"^base_model:\s*(?:-\s*)?['\"]?([^\s'\"]+)", re.MULTILINE)
_CARD_CHARS = 4096  # of README.md, which begins with its metadata
_GGUF_NAMES = ("general.name", "general.base_model.0.repo_url", "general.base_model.0.name")


@dataclass(frozen=True)
class FoundDrafter:
    """A row of the table, and its folder on this machine; for layers of the target's checkpoint that checkpoint."""

    row: PublishedDrafter
    path: Path | None

    @property
    def place(self) -> str:
        """Its location in words."""
        if self.path is None:
            return "not here"
        if self.row.bundled:
            return "bundled"
        return "in the checkpoint" if self.row.in_target else "in the hub's cache"

    @property
    def line(self) -> str:
        """The drafter in one line."""
        return f"drafter: {self.row.name} ({self.row.form}, {self.place}) of {self.row.target}"


def published_drafters(model: str | Path) -> list[FoundDrafter]:
    """Returns the published drafters of a model, the best first.

    Args:
        model: Folder, GGUF file or hub name. A hub name need not be in the cache.

    Raises:
        ModelLoadError: The checkpoint on this machine is damaged.
    """
    path = _local(str(model))
    names = [str(model).partition(":")[0]] if path is None else names_of(path)
    return [FoundDrafter(row, _path_of(row, path)) for row in drafters_of(names)]


def names_of(path: Path) -> list[str]:
    """Returns the names of a local checkpoint: its own, then those of the model that it was made from.

    They are in the metadata of a GGUF file, in config.json and README.md of a folder, and in the path.

    Raises:
        ModelLoadError: The checkpoint is damaged.
    """
    if is_gguf(path):
        from foretoken.models.formats.gguf.header import Header

        metadata = Header.read(path).metadata
        own, *bases = [str(metadata.get(key) or "") for key in _GGUF_NAMES]
        return [name for name in (own, path.stem, *bases) if name]
    cached = next((part for part in path.parts if part.startswith("models--")), None)
    own = path.resolve().name if cached is None else cached.removeprefix("models--").replace("--", "/")
    named, card = load_config(path).get("_name_or_path"), path / "README.md"
    bases = _BASE_MODEL.findall(card.read_text("utf-8", "replace")[:_CARD_CHARS]) if card.is_file() else []
    return [own, *([named] if isinstance(named, str) else []), *bases]


def _path_of(row: PublishedDrafter, target: Path | None) -> Path | None:
    """Returns the folder of a drafter; None if it is not on this machine, or its weights are pickles only."""
    if row.bundled:
        return next((model.path for model in zoo.list_models() if model.name == row.name), None)
    if row.in_target:
        return target if target is not None and MTP in shipped_methods(target) else None
    folder = _cached(row.name)
    return folder if folder is not None and any(folder.glob("*.safetensors")) else None


def _local(model: str) -> Path | None:
    """Returns the path of a checkpoint; None for a hub name that is not in the cache."""
    path = Path(model).expanduser()
    return resolve(path) if path.exists() else _cached(model.partition(":")[0])


def _cached(hub_name: str) -> Path | None:
    """Returns the folder of a repository in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(hub_name, "config.json")
    except HFValidationError:
        return None
    return Path(file).parent if isinstance(file, str) else None
