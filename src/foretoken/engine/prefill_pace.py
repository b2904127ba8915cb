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
_STALL = 1.0  # extra time of a step, in steps without prefill
_DECAY = 0.9  # of the moving average of steps without prefill


class PrefillPacer:
    """Limits the prompt tokens of a step, by measured times of steps with and without prefill.

    Args:
        limit: See ``PromptRows``. Raises InvalidRequest for any other value.
    """

    def __init__(self, limit: PromptRows = None) -> None:
        if isinstance(limit, str) and limit != "auto":
            raise InvalidRequest(f"max_num_batched_tokens must be a number, 'auto' or None, got {limit!r}")
        if not isinstance(limit, str):
            integer("max_num_batched_tokens", limit, 1, optional=True)
        self.limit = limit
        self._plain: float | None = None
        self._row: float | None = None

    def rows(self, decoding: int) -> int | None:
        """Returns the limit of prompt tokens for a step with ``decoding`` decoding sequences; None is no limit."""
        if self.limit != "auto":
            return self.limit
        if not decoding:
            return _MAX_ROWS
        if self._plain is None or self._row is None:
            return _FIRST_ROWS
        return max(_MIN_ROWS, min(_MAX_ROWS, int(_STALL * self._plain / max(self._row, 1e-9))))

    def observe(self, timings: Timings) -> None:
        """Records the times of a step with decoding sequences."""
        seconds = timings.total
        if not timings.prompt_rows:
            self._plain = seconds if self._plain is None else _DECAY * self._plain + (1.0 - _DECAY) * seconds
        elif self._plain is not None:
            row = max(0.0, seconds - self._plain) / timings.prompt_rows
            self._row = row if self._row is None else 0.5 * (self._row + row)
