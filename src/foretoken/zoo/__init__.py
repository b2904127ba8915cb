"""The bundled models: small models trained on the source of the Python standard library, and a head for SmolLM2."""

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from foretoken.core.errors import InvalidRequest
from foretoken.core.files import read_json
from foretoken.core.folders import cache_folder

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
