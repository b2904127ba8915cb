"""The bundled models: small models trained on the source of the Python standard library, and a head for SmolLM2.

``drafters.csv`` is the table of published drafters, a row for each pair of a target and a drafter. A licence is
"unknown" where the source states none. ``source`` is the page that names the pair, or "bundled".
"""

import csv
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from foretoken.core.errors import InvalidRequest
from foretoken.core.files import cache_folder, read_json

__all__ = ["ZooModel", "cache_folder", "list_models", "path"]

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class ZooModel:
    """One bundled model. card: its README. size_bytes: size of all its files."""

    name: str
    role: str
    path: Path
    size_bytes: int
    parameters: int
    card: str


def list_models() -> list[ZooModel]:
    """Returns all bundled models, targets first, then by name. Reads no weights."""
    models = [_read(entry) for entry in _HERE.glob("*/zoo.json")]
    return sorted(models, key=lambda m: (m.role != "target", m.role != "draft", m.role, m.name))


def path(name: str) -> Path:
    """Returns the folder of a bundled model by name or role. Raises InvalidRequest that lists the known ones."""
    models = list_models()
    for model in [*(m for m in models if m.name == name), *(m for m in models if m.role == name)]:
        return model.path
    names = ", ".join(f"{m.name} ({m.role})" for m in models) or "none in this installation"
    raise InvalidRequest(f"no bundled model {name!r}; known: {names}")


@cache
def _read(entry: Path) -> ZooModel:
    folder, facts = entry.parent, read_json(entry, "install foretoken again")
    card = folder / "README.md"
    return ZooModel(
        name=facts["name"],
        role=facts["role"],
        path=folder,
        size_bytes=sum(f.stat().st_size for f in folder.iterdir() if f.is_file()),
        parameters=sum(_parameters(f) for f in folder.glob("*.safetensors")),
        card=card.read_text(encoding="utf-8") if card.exists() else "",
    )


def _parameters(file: Path) -> int:
    """Counts parameters from the safetensors header: 8 bytes of length, then JSON."""
    with file.open("rb") as handle:
        header = json.loads(handle.read(int.from_bytes(handle.read(8), "little")))
    return sum(math.prod(t["shape"]) for name, t in header.items() if name != "__metadata__")


BUNDLED = "bundled"
FORMS = {
    "dspark": "dspark",
    "eagle3": "eagle3",
    "p-eagle": "eagle3",
    "mtp": "mtp",
    "assistant": "assistant",
    "jetspec": "jetspec",
    "dflash": "dflash",
    "medusa": "medusa",
    "blockwise": "blockwise",
    "pard": "draft_model",
    "draft_model": "draft_model",
}
"""The method that drafts with each form of the table's column ``method``, by falling acceptance."""

# endings of names that tell the storage of the weights
_STORAGE = re.compile(r"-(gguf|i?q\d(-[a-z0-9]+)*|b?f16|f32|fp(8|16)(-[a-z]+)*|awq|gptq(-[a-z0-9]+)*|int[48]|[48]bit)$")


@dataclass(frozen=True)
class PublishedDrafter:
    """One row. target, name: hub names, or names of bundled models. form: a key of ``FORMS``."""

    target: str
    name: str
    form: str
    licence: str
    source: str

    @property
    def method(self) -> str:
        return FORMS[self.form]

    @property
    def bundled(self) -> bool:
        """Whether this package contains it."""
        return self.source == BUNDLED

    @property
    def in_target(self) -> bool:
        """Whether the target's checkpoint contains it."""
        return self.name == self.target


@cache
def drafters() -> tuple[PublishedDrafter, ...]:
    """Returns all rows of the table in its order."""
    with Path(__file__).with_name("drafters.csv").open(encoding="utf-8", newline="") as file:
        return tuple(PublishedDrafter(*row) for row in list(csv.reader(file))[1:])


def drafters_of(names: Iterable[str]) -> list[PublishedDrafter]:
    """Returns the drafters of the targets with these names: of the first name before those of the next.

    The drafters of a target are ordered by the acceptance of their form, then as in the table.
    """
    forms, rows = list(FORMS), drafters()
    found = []
    for key in dict.fromkeys(map(name_key, names)):
        of_target = [row for row in rows if name_key(row.target) == key]
        found += sorted(of_target, key=lambda row: forms.index(row.form))
    return found


def name_key(name: str) -> str:
    """Returns a model's name without owner, file type and storage of the weights, in lower case with hyphens."""
    key = re.sub(r"[^a-z0-9]+", "-", name.rstrip("/").rpartition("/")[2].lower()).strip("-").removeprefix("meta-")
    while (shorter := _STORAGE.sub("", key)) != key:
        key = shorter
    return key
