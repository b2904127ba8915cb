"""Chunked prefill: bounds the latency that prompts add to the steps of decoding sequences."""

from __future__ import annotations

from typing import Literal

from foretoken.core.checks import integer
from foretoken.core.errors import InvalidRequest
from foretoken.core.step import Timings

PromptRows = int | Literal["auto"] | None
"""Prompt tokens in one step: None is no limit, a number is the limit, "auto" limits the time of a step."""

_MAX_ROWS = 512  # prompt tokens of a step without decoding sequences: a request may arrive during the step
_FIRST_ROWS = 32  # until the time of a prompt token has been measured
_MIN_ROWS = 16
_MAX_STALL = 0.25  # seconds that many waiting requests may add to a step: more lowers TTFT, raises ITL
_DECAY = 0.9  # of the moving averages


class PrefillPacer:
    """Limits the prompt tokens of a step, by measured times of steps with and without prefill.

    Each request that waits for its first token may add the time of a step without prefill to the next step, all of
    them together ``_MAX_STALL`` at most, or one such step where that is longer. So one long prompt doubles the latency
    of the running requests, and a burst is not paced by the few that run already.

    Args:
        limit: See ``PromptRows``. Raises InvalidRequest for any other value.
    """

    def __init__(self, limit: PromptRows = None) -> None:
        if isinstance(limit, str) and limit != "auto":
            raise InvalidRequest(f"max_num_batched_tokens must be a number, 'auto' or None, got {limit!r}")
        if not isinstance(limit, str):
            integer("max_num_batched_tokens", limit, 1, optional=True)
        self.limit = limit
        self._plain = {0: (0.0, 0.0)}  # sequences and seconds of steps without prefill, by the bit length of the former
        self._added = (0.0, 0.0)  # seconds that rows of steps with prefill added, and those rows

    def rows(self, decoding: int, waiting: int = 1) -> int | None:
        """Returns the limit of prompt tokens for a step; None is no limit.

        Args:
            decoding: Number of decoding sequences.
            waiting: Number of sequences that wait for their first token and could run.
        """
        if self.limit != "auto":
            return self.limit
        if not decoding:
            return _MAX_ROWS
        seconds, rows = self._added
        if not seconds:
            return _FIRST_ROWS
        row = seconds / rows
        sequences, plain = self._step_without_prefill(decoding)
        plain += max(0.0, decoding - sequences) * row
        stall = max(plain, min(waiting * plain, _MAX_STALL))
        return max(_MIN_ROWS, min(_MAX_ROWS, int(stall / row)))

    def observe(self, timings: Timings) -> None:
        """Records the times of a step with decoding sequences."""
        sequences, plain = self._step_without_prefill(timings.batch)
        if timings.prompt_rows:
            # A sequence beyond those of the step without prefill is another row, as a prompt token is.
            rows = timings.prompt_rows + max(0.0, timings.batch - sequences)
            seconds, total = self._added
            self._added = _DECAY * seconds + max(0.0, timings.total - plain), _DECAY * total + rows
            return
        key, new = timings.batch.bit_length(), (float(timings.batch), timings.total)
        old = self._plain.get(key, new)
        self._plain[key] = _DECAY * old[0] + (1.0 - _DECAY) * new[0], _DECAY * old[1] + (1.0 - _DECAY) * new[1]

    def _step_without_prefill(self, batch: int) -> tuple[float, float]:
        """Returns sequences and seconds of the known steps without prefill that are nearest below ``batch``."""
        return self._plain[max(key for key in self._plain if key <= batch.bit_length())]
