"""Additions of a step to a request: its own log-probabilities and explanation, and not those of other steps."""

from __future__ import annotations

from math import log
from typing import Any

import pytest

from foretoken import LLM, SamplingParams


@pytest.mark.parametrize("depth", [0, 4])
def test_pieces_hold_the_log_probabilities_of_their_own_tokens(tiny_pair: Any, depth: int) -> None:
    llm = LLM(tiny_pair.target, tiny_pair.target, dtype="float32")  # drafts for itself, so that blocks are accepted
    params = SamplingParams(
        max_tokens=20, seed=3, logprobs=2, explain=True, ignore_eos=True, speculative_tokens=depth, n=2
    )
    pieces = list(llm.stream("def greet(name):\n", params))
    assert not depth or max(piece.step.accepted for piece in pieces) > 1
    for piece in pieces:
        assert piece.logprobs is not None and piece.explained is not None
        assert len(piece.explained.emitted_prob) == len(piece.token_ids) or piece.output is not None
        for token, entries, came in zip(piece.token_ids, piece.logprobs, piece.explained.emitted_prob, strict=False):
            assert entries[token].logprob == pytest.approx(log(came), abs=1e-4)
    for index in range(2):
        own = [piece for piece in pieces if piece.index == index]
        output = own[-1].output
        assert output is not None
        assert tuple(entries for piece in own for entries in piece.logprobs or ()) == output.logprobs
