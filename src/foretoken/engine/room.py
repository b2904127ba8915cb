"""How memory for keys and values is shared between target and proposer."""

from __future__ import annotations

from foretoken.core.errors import InvalidRequest
from foretoken.models.base import Model
from foretoken.models.memory import free_memory
from foretoken.propose.base import Proposer

_KEPT = 0.25  # of free memory, at most, for the beginnings of prompts


def share_memory(
    target: Model, proposer: Proposer, wanted: int | None, prefixes: bool, max_sequences: int
) -> int | None:
    """Tell both what they may keep. -> tokens whose keys and values fit, None without a bound

    wanted: bytes for both together. prefixes: keep what was computed for prompts that begin alike.
    Raises InvalidRequest where not even one sequence of the model's length fits.
    """
    each = target.row_bytes + proposer.row_bytes
    capacity = None
    if wanted is not None:
        if not target.row_bytes:
            raise InvalidRequest("kv_memory cannot bound this model, whose keys and values have no known size")
        capacity = wanted // each
        if capacity <= target.max_length:
            raise InvalidRequest(
                f"kv_memory of {wanted / 2**20:.0f} MiB holds {capacity} tokens and a sequence may have "
                f"{target.max_length}; give it {(target.max_length + 128) * each / 2**20:.0f} MiB, or lower "
                "max_model_len"
            )
    if prefixes and each:
        limit = wanted
        if limit is None:
            limit = min(max_sequences * target.max_length * each, int(_KEPT * (free_memory(target.device) or 0)))
        target.keep(limit * target.row_bytes // each)
        proposer.keep(limit * proposer.row_bytes // each)
    return capacity
