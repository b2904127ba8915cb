"""Finds the layers and heads that a target's folder ships for drafting."""

from __future__ import annotations

from pathlib import Path

from foretoken.core.artifacts import HEADS_FOLDER
from foretoken.core.errors import ModelLoadError
from foretoken.models.heads.mtp import has_mtp

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
