"""The mask token of drafts that predict all positions in one pass: PARD's and P-EAGLE's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretoken.core.errors import InvalidRequest, ModelLoadError

MASK_KEYS = ("pard_token", "ptd_token_id")  # PARD's and vLLM's names


def mask_token(config: Mapping[str, Any], vocab: int, path: Path) -> int | None:
    """Returns the mask token that a config.json names; None if it names none.

    Args:
        vocab: size of the draft's input vocabulary.
        path: the checkpoint, for the message.

    Raises:
        ModelLoadError: it is no token of the vocabulary.
    """
    name = next((key for key in MASK_KEYS if config.get(key) is not None), None)
    if name is None:
        return None
    value = config[name]
    token = int(value) if isinstance(value, str) and value.isdecimal() else value  # some files quote it
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
        raise ModelLoadError(f"{path} has {name} = {value!r}; expected a token id below {vocab}")
    return token


def no_mask_token(path: Path) -> InvalidRequest:
    """Returns the error for a checkpoint that was not trained for parallel drafting."""
    return InvalidRequest(
        f"parallel_drafting needs a draft that was trained for it, and {path / 'config.json'} names no mask token "
        f"({', '.join(MASK_KEYS)}); leave it out, or take another draft"
    )
