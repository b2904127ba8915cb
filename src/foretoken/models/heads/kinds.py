"""Recognizes what a checkpoint drafts with by its config.json, and finds what a target's folder ships for drafting."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretoken.core.errors import ModelLoadError
from foretoken.models.heads.assistant import ASSISTANTS
from foretoken.models.heads.files import FOLDER
from foretoken.models.heads.mtp import has_mtp

MTP = "mtp"
SHIPPED = ("dspark", "eagle3", MTP, "dflash", "medusa", "blockwise")
"""Heads that a target's folder may contain, those that accepted most tokens first."""


def heads_method(config: Mapping[str, Any]) -> str | None:
    """Returns the method that drafts with the heads of a config.json; None if it is no configuration of heads."""
    kind, names = str(config.get("model_type")), " ".join(config.get("architectures") or []).lower()
    if "eagle" in names or "eagle" in kind:
        return "eagle3" if "eagle3" in names or config.get("draft_vocab_size") else "eagle"
    if config.get("speculators_model_type") in ("dflash", "dspark"):
        return str(config["speculators_model_type"])
    if "dspark" in names or "dflash" in names:
        return "dspark" if "dspark" in names else "dflash"
    if kind in ASSISTANTS:
        return "assistant"
    if config.get("foretoken_mtp") is not None:
        return MTP
    if kind == "medusa" or "medusa_num_heads" in config:
        return "medusa"
    if kind in ("foretoken_blockwise", "foretoken_early_exit"):
        return kind.removeprefix("foretoken_")
    return None


def shipped_methods(target: Path) -> list[str]:
    """Returns the methods that draft with what ``target`` ships: its MTP layers, then heads in its folder."""
    try:
        layers = [MTP] if has_mtp(target) else []
    except ModelLoadError:  # weights that only transformers' modules read
        layers = []
    return layers + [role for role in SHIPPED if (target / FOLDER / role / "config.json").is_file()]
