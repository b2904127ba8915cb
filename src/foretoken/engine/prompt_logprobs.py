"""Log-probabilities of prompts: the target scores prompt tokens as if they were draft tokens."""

from __future__ import annotations

from collections.abc import Sequence as Many

from foretoken.core.draft import Draft
from foretoken.engine.sequence import Sequence, logprobs_of_rows
from foretoken.models.base import Scores

CHUNK = 128  # rows of logits at once


def prompt_logprob_drafts(prefilling: Many[Sequence]) -> list[Draft]:
    """Returns the next chunk of each prompt as a draft; empty for sequences without prompt log-probabilities."""
    return [
        Draft.chain(_chunk(sequence)) if sequence.needs_prompt_logprobs else Draft.empty() for sequence in prefilling
    ]


def record_prompt_logprobs(sequence: Sequence, scores: Scores) -> tuple[int, ...]:
    """Records the log-probabilities of a sequence's chunk. Returns the chunk's tokens, which are to be committed."""
    if not sequence.needs_prompt_logprobs:
        return ()
    chunk, count = _chunk(sequence), sequence.options.prompt_logprobs or 0
    sequence.prompt_recorded += logprobs_of_rows(scores.logits[: len(chunk)], chunk, count)
    return chunk


def _chunk(sequence: Sequence) -> tuple[int, ...]:
    start = len(sequence.handle.tokens)
    return tuple(sequence.context.tokens[start : min(start + CHUNK, sequence.context.prompt_length)])
