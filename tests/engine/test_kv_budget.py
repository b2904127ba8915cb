"""Shares of the memory for keys and values."""

import pytest

from foretoken.core.errors import InvalidRequest
from foretoken.engine.kv_budget import split_kv_memory
from foretoken.models.toy import ToyModel
from foretoken.propose.base import Proposer


class Sized(ToyModel):
    """A target whose tokens take 30 bytes each."""

    kept: int | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        return 30

    def enable_prefix_cache(self, max_bytes: int) -> bool:
        self.kept = max_bytes
        return True


class Drafting(Proposer):
    """A proposer whose tokens take 10 bytes each."""

    kept: int | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        return 10

    def enable_prefix_cache(self, max_bytes: int) -> None:
        self.kept = max_bytes


def test_tokens_are_counted_in_the_target_and_in_the_draft() -> None:
    target, proposer = Sized(max_length=50), Drafting()
    assert split_kv_memory(target, proposer, 4000, prefixes=False, max_sequences=4) == 100
    assert (target.kept, proposer.kept) == (None, None)
    assert split_kv_memory(target, Proposer(), 3000, prefixes=False, max_sequences=4) == 100
    with pytest.raises(InvalidRequest, match="holds 50 tokens and a sequence may have 50"):
        split_kv_memory(target, proposer, 2000, prefixes=False, max_sequences=4)


def test_prefixes_are_kept_in_both_by_what_their_tokens_take() -> None:
    target, proposer = Sized(max_length=50), Drafting()
    split_kv_memory(target, proposer, 4000, prefixes=True, max_sequences=4)
    assert (target.kept, proposer.kept) == (3000, 1000)
    assert split_kv_memory(target, proposer, None, prefixes=True, max_sequences=2) is None
    assert (target.kept, proposer.kept) == (3000, 1000)  # two sequences of 50 tokens
