"""Division of the KV cache memory between target and proposer."""

from __future__ import annotations

from foretoken.core.errors import InvalidRequest
from foretoken.models.base import Model
from foretoken.models.formats.memory import free_memory
from foretoken.propose.base import Proposer

_PREFIX_SHARE = 0.25  # of free memory, the limit of the prefix cache


def state_tokens(target: Model, proposer: Proposer) -> int:
    """Returns the number of tokens whose KV cache takes as much memory as the recurrent states of one sequence."""
    each, state = target.kv_bytes_per_token + proposer.kv_bytes_per_token, target.state_bytes + proposer.state_bytes
    return -(-state // each) if each else 0


def split_kv_memory(
    target: Model, proposer: Proposer, max_bytes: int | None, prefixes: bool, max_sequences: int
) -> int | None:
    """Enables the prefix caches and returns the number of tokens whose KV cache fits, None for no limit.

    Args:
        target: The target model.
        proposer: The proposer.
        max_bytes: KV cache memory of both together, or None for no limit.
        prefixes: Whether to enable prefix caching.
        max_sequences: Number of sequences in one forward pass.

    Raises:
        InvalidRequest: Not even one sequence of the model's length fits.
    """
    each = target.kv_bytes_per_token + proposer.kv_bytes_per_token
    capacity = None
    if max_bytes is not None:
        if not target.kv_bytes_per_token:
            raise InvalidRequest("kv_cache_memory_bytes cannot bound this model, whose KV cache has no known size")
        capacity = max_bytes // each
        if capacity - (state := state_tokens(target, proposer)) <= target.max_length:
            raise InvalidRequest(
                f"kv_cache_memory_bytes of {max_bytes / 2**20:.0f} MiB holds {max(0, capacity - state)} tokens and a "
                f"sequence may have {target.max_length}; give it "
                f"{(target.max_length + state + 128) * each / 2**20:.0f} MiB, or lower "
                "max_model_len"
            )
    if prefixes and each:
        limit = max_bytes
        if limit is None:
            limit = min(
                max_sequences * (target.max_length + state_tokens(target, proposer)) * each,
                int(_PREFIX_SHARE * (free_memory(target.device) or 0)),
            )
        target.enable_prefix_cache(limit * target.kv_bytes_per_token // each)
        proposer.enable_prefix_cache(limit * proposer.kv_bytes_per_token // each)
    return capacity
