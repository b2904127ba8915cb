"""Finds drafters of a model without a download: published ones by its names, and those that are its default.

A target is recognized by its weights, not by its name alone: a bundled head has the facts of its target in
``target.json``, which ``checkpoint_facts`` computes. A fine-tune changes norms or, with LoRA, matrices of attention.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foretoken import zoo
from foretoken.core.artifacts import HEADS_FOLDER
from foretoken.core.errors import ModelLoadError
from foretoken.core.files import read_json
from foretoken.models.formats.checkpoint import load_config, open_weights, resolve
from foretoken.models.formats.gguf import is_gguf
from foretoken.models.heads.mtp import has_mtp
from foretoken.zoo import PublishedDrafter, drafters, drafters_of, name_key

MTP = "mtp"
SHIPPED = ("dspark", "eagle3", MTP, "jetspec", "dflash", "medusa", "blockwise")
"""Heads that a target's folder may contain, by falling acceptance."""


def shipped_methods(target: Path) -> list[str]:
    """Returns the methods of the drafting heads in a target's folder: its MTP layers, then other heads."""
    try:
        layers = [MTP] if has_mtp(target) else []
    except ModelLoadError:  # weights that only transformers' modules can read
        layers = []
    return layers + [role for role in SHIPPED if (target / HEADS_FOLDER / role / "config.json").is_file()]


_BASE_MODEL = re.compile(r"^base_model:\s*(?:-\s*)?['\"]?([^\s'\"]+)", re.MULTILINE)
_CARD_CHARS = 4096  # of README.md, which begins with its metadata
_FACTS = "target.json"
_SIZES = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
_GROUP = 32  # weights of a matrix whose extremes are compared
_TOLERANCE = 0.01  # of the range of a group: the error of eight bits, and less than a fine-tune changes
_GGUF_NAMES = ("general.name", "general.base_model.0.repo_url", "general.base_model.0.name")


@dataclass(frozen=True)
class FoundDrafter:
    """A row of the table, and its folder on this machine; for layers of the target's checkpoint that checkpoint."""

    row: PublishedDrafter
    path: Path | None

    @property
    def place(self) -> str:
        if self.path is None:
            return "not here"
        if self.row.bundled:
            return "bundled"
        return "in the checkpoint" if self.row.in_target else "in the hub's cache"

    @property
    def line(self) -> str:
        return f"drafter: {self.row.name} ({self.row.form}, {self.place}) of {self.row.target}"


@dataclass(frozen=True)
class DefaultDrafter:
    """A drafter that is used if none is named.

    method: its method. model: its folder; None for heads that the target ships. line: its name and place.
    """

    method: str
    model: str | None
    line: str


def default_drafters(target: Path) -> list[DefaultDrafter]:
    """Returns the heads that a target ships, then the bundled ones that were trained for it."""
    found = []
    for method in shipped_methods(target):
        layers = method == MTP and not (target / HEADS_FOLDER / MTP).is_dir()
        place = "in the checkpoint" if layers else f"in {HEADS_FOLDER}/{method} of the model's folder"
        found.append(DefaultDrafter(method, None, f"drafter: {method} {place}"))
    folders = {model.name: model.path for model in zoo.list_models() if (model.path / _FACTS).is_file()}
    rows = [row for row in drafters() if row.bundled and row.name in folders]
    bundled = [FoundDrafter(row, folders[row.name]) for row in rows if _is_target(target, row, folders[row.name])]
    return found + [DefaultDrafter(drafter.row.method, str(drafter.path), drafter.line) for drafter in bundled]


def checkpoint_facts(path: Path) -> dict[str, Any]:
    """Returns the facts of ``target.json``: sizes, a digest of all norms, and extremes of one matrix.

    Norms are not quantized, and are hashed in bfloat16. The matrix is a row of the middle layer's value projection, in
    groups whose smallest and largest elements a quantization keeps.
    """
    config, weights = load_config(path), open_weights(path)
    digest = hashlib.sha256()
    for name in sorted(name for name in weights if name.endswith("norm.weight")):
        digest.update(weights[name].to(torch.bfloat16).view(torch.int16).numpy().tobytes())
    name = f"model.layers.{config['num_hidden_layers'] // 2}.self_attn.v_proj.weight"
    if name not in weights:
        raise ModelLoadError(f"{path} has no matrix {name}")
    row = weights[name][0].float().view(-1, _GROUP)
    return {
        "sizes": _sizes(config),
        "norms": digest.hexdigest(),
        "extremes": [row.amin(1).tolist(), row.amax(1).tolist()],
    }


def _sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: config.get(key) for key in _SIZES}


def _is_target(path: Path, row: PublishedDrafter, head: Path) -> bool:
    """Returns whether a checkpoint is the target of a bundled head.

    Its sizes and norms are those of the target, and either the name in the metadata of a GGUF file or the extremes of
    a matrix.
    """
    expected = read_json(head / _FACTS, "install foretoken again")
    try:
        if _sizes(load_config(path)) != expected["sizes"]:
            return False
        facts = checkpoint_facts(path)
        named = is_gguf(path) and name_key(names_of(path)[0]) in map(name_key, (row.target, *expected["names"]))
    except ModelLoadError:  # weights that only transformers' modules can read
        return False
    low, high = torch.tensor(expected["extremes"])
    difference = (torch.tensor(facts["extremes"]) - torch.stack((low, high))).abs()
    return facts["norms"] == expected["norms"] and (named or bool((difference <= _TOLERANCE * (high - low)).all()))


def published_drafters(model: str | Path, method: str | None = None) -> list[FoundDrafter]:
    """Returns the published drafters of a model, the best first.

    model: Folder, GGUF file or hub name. A hub name need not be in the cache.
    """
    path = local_path(str(model))
    names = [str(model).partition(":")[0]] if path is None else names_of(path)
    rows = [row for row in drafters_of(names) if method in (None, row.method)]
    return [FoundDrafter(row, _path_of(row, path)) for row in rows]


def known_drafters(found: list[FoundDrafter]) -> str:
    """Returns the names of drafters that can be downloaded, and the command for the first one."""
    names = [drafter.row.name for drafter in found if not drafter.row.in_target]
    return f"known are {', '.join(names)}; get one: hf download {names[0]}" if names else "none is known"


def names_of(path: Path) -> list[str]:
    """Returns the names of a local checkpoint: its own, then those of the model that it was made from.

    They are in the metadata of a GGUF file, in config.json and README.md of a folder, and in the path.
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


def local_path(model: str) -> Path | None:
    """Returns the path of a checkpoint; None for a hub name that is not in the cache."""
    path = Path(model).expanduser()
    return resolve(path) if path.exists() else _cached(model.partition(":")[0])


def _cached(hub_name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(hub_name, "config.json")
    except HFValidationError:
        return None
    return Path(file).parent if isinstance(file, str) else None
