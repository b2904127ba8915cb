"""Chunked prefill: bounds the latency that prompts add to the steps of decoding sequences."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from foretoken.core.checks import integer
from foretoken.core.errors import InvalidRequest
from foretoken.core.step import Timings

PromptRows = int | Literal["auto"] | None
"""Prompt tokens in one step: None is no limit, a number is the limit, "auto" limits the time of a step."""

_MAX_ROWS = 512  # prompt tokens of a step without decoding sequences: a request may arrive during the step
_ENOUGH_ROWS = 64  # of such a step, so that no further prompt begins: the first token of this one need not wait for it
_FIRST_ROWS = 32  # until the time of a prompt token has been measured
_MIN_ROWS = 16
_MAX_STALL = 0.25  # seconds that many waiting requests may add to a step: more lowers TTFT, raises ITL
_SHORT = 4  # steps: a prompt that takes no more is prefilled instead of draft tokens
_DECAY = 0.9  # of the moving averages


@dataclass(frozen=True, slots=True)
class PrefillLimit:
    """Limits of one step."""

    rows: int | None  # number of prompt tokens; None is no limit
    spare: int = 0  # no further prompt begins when at most this number of ``rows`` is left
    drafts: bool = True  # whether decoding sequences may draft while prompt tokens are computed


class _Plain(NamedTuple):
    """Moving averages over steps without prefill."""

    sequences: float = 0.0
    draft_rows: float = 0.0
    seconds: float = 0.0


class PrefillPacer:
    """Limits the prompt tokens of a step, by measured times of steps with and without prefill.

    Each request that waits for its first token may add the time of a step without prefill to the next step, all of
    them together ``_MAX_STALL`` at most, or one such step where that is longer. So one long prompt doubles the latency
    of the running requests, and a burst is not paced by the few that run already.

    The rows of a prompt fill a pass until it is bound by arithmetic, where a draft token delays the first token of the
    prompt by as much as another prompt token does. So a short prompt takes the place of draft tokens, in equal steps.
    Beside a long prompt requests draft, since they would otherwise be slow for as long as it takes.
    limit: See ``PromptRows``. Raises InvalidRequest for any other value.
    """

    def __init__(self, limit: PromptRows = None) -> None:
        if isinstance(limit, str) and limit != "auto":
            raise InvalidRequest(f"max_num_batched_tokens must be a number, 'auto' or None, got {limit!r}")
        if not isinstance(limit, str):
            integer("max_num_batched_tokens", limit, 1, optional=True)
        self.limit = limit
        self._plain = {0: _Plain()}  # by the bit length of the number of sequences
        self._added = (0.0, 0.0)  # seconds that rows of steps with prefill added, and those rows

    def next_step(self, decoding: int, waiting: int, first: int) -> PrefillLimit:
        """Returns the limits of the next step.

        Args:
            decoding: Number of decoding sequences.
            waiting: Number of sequences that wait for their first token and could run.
            first: Number of prompt tokens of the first of these that are not computed, or more if that is unknown.
        """
        if self.limit != "auto":
            return PrefillLimit(self.limit)
        if not decoding:
            return PrefillLimit(_MAX_ROWS, spare=_MAX_ROWS - _ENOUGH_ROWS)
        rows = self.rows(decoding, waiting)
        instead = min(_MAX_ROWS, rows + int(self._step_without_prefill(decoding).draft_rows))
        steps = max(1, -(-first // instead))
        return PrefillLimit(rows) if steps > _SHORT else PrefillLimit(max(rows, -(-first // steps)), drafts=False)

    def rows(self, decoding: int, waiting: int) -> int:
        """Returns the number of prompt tokens beside ``decoding`` sequences and their draft tokens.

        Args:
            decoding: Number of decoding sequences, one or more.
            waiting: Number of sequences that wait for their first token and could run.
        """
        seconds, rows = self._added
        if not seconds:
            return _FIRST_ROWS
        row = seconds / rows
        step = self._step_without_prefill(decoding)
        plain = step.seconds + max(0.0, decoding - step.sequences) * row
        stall = max(plain, min(waiting * plain, _MAX_STALL))
        return max(_MIN_ROWS, min(_MAX_ROWS, int(stall / row)))

    def observe(self, timings: Timings, draft_rows: int = 0) -> None:
        """Records the times of a step with decoding sequences, in which ``draft_rows`` draft tokens were verified."""
        if self.limit != "auto":
            return
        plain = self._step_without_prefill(timings.batch)
        if timings.prompt_rows:
            # A sequence or draft token beyond those of the step without prefill is another row, as a prompt token is.
            more = max(0.0, timings.batch - plain.sequences) + draft_rows - plain.draft_rows
            if (rows := timings.prompt_rows + more) > 0.0:
                seconds, total = self._added
                self._added = _DECAY * seconds + max(0.0, timings.total - plain.seconds), _DECAY * total + rows
            return
        key, new = timings.batch.bit_length(), _Plain(timings.batch, draft_rows, timings.total)
        averages = zip(self._plain.get(key, new), new, strict=True)
        self._plain[key] = _Plain(*(_DECAY * old + (1.0 - _DECAY) * value for old, value in averages))

    def _step_without_prefill(self, batch: int) -> _Plain:
        """Returns the known steps without prefill whose number of sequences is nearest below ``batch``."""
        return self._plain[max(key for key in self._plain if key <= batch.bit_length())]
