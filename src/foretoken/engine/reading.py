"""Prompts whose own log-probabilities are wanted: the target reads them as if they had been drafted."""

from __future__ import annotations

from collections.abc import Sequence as Many

from foretoken.core.draft import Draft
from foretoken.engine.sequence import Sequence, token_logprobs
from foretoken.models.base import Scores

PIECE = 128  # rows of logits at once


def drafts_aloud(reading: Many[Sequence]) -> list[Draft]:
    """For each the next piece of a prompt to be read aloud, nothing for the others."""
    return [Draft.chain(_piece(sequence)) if sequence.reads_aloud else Draft.empty() for sequence in reading]


def note_aloud(sequence: Sequence, scores: Scores) -> tuple[int, ...]:
    """Record what the target says of the piece. -> the piece, to be committed"""
    if not sequence.reads_aloud:
        return ()
    piece, count = _piece(sequence), sequence.wanted.prompt_logprobs or 0
    sequence.of_prompt += [token_logprobs(row, token, count) for row, token in zip(scores.logits, piece, strict=False)]
    return piece


def _piece(sequence: Sequence) -> tuple[int, ...]:
    start = len(sequence.handle.tokens)
    return tuple(sequence.context.tokens[start : min(start + PIECE, sequence.context.prompt_length)])
