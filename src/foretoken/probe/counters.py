"""Draft tokens as servers count them: in an answer, or on the server's Prometheus page."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any

_COUNTER = re.compile(r"^(?:\w+:)(\w+?)(?:_total)?(\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')
_PREFIX = "spec_decode_num_"
_GENERATED = ("generation_tokens", "tokens_predicted")  # of all requests: vLLM, SGLang and ours; llama.cpp


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Counts of speculation. by_position: steps that accepted the draft token there, empty if unknown."""

    drafted: float
    accepted: float
    steps: float | None = None  # steps that verified a draft
    by_position: tuple[float, ...] = ()

    def plus(self, other: DraftCounts, sign: float = 1.0) -> DraftCounts:
        """Returns the sum, or with ``sign`` -1 the difference."""
        steps = None if self.steps is None or other.steps is None else self.steps + sign * other.steps
        positions = zip_longest(self.by_position, other.by_position, fillvalue=0.0)
        return DraftCounts(
            self.drafted + sign * other.drafted,
            self.accepted + sign * other.accepted,
            steps,
            tuple(a + sign * b for a, b in positions),
        )

    @property
    def contradiction(self) -> str:
        """The reason why the counts are impossible, "" if they are possible."""
        if min(self.drafted, self.accepted, self.steps or 0.0, *self.by_position) < 0:
            return "a counter fell"
        if self.accepted > self.drafted:
            return f"{self.accepted:,.0f} tokens were accepted of {self.drafted:,.0f} drafted"
        if any(after > before for before, after in pairwise(self.by_position)):
            return "later draft tokens were accepted more often than those before them"
        return ""


def summed(counts: Iterable[DraftCounts | None]) -> DraftCounts | None:
    """Returns the sum, None if one of the counts is missing."""
    total = DraftCounts(0.0, 0.0, 0.0)
    for each in counts:
        if each is None:
            return None
        total = total.plus(each)
    return total


@dataclass(frozen=True, slots=True)
class ServerCounters:
    """Counters of a Prometheus page since the server started, None where the page has none."""

    speculation: DraftCounts | None = None
    generated: float | None = None  # tokens of all requests
    accept_length: float | None = None  # SGLang's gauge of tokens per pass, over its latest passes

    def since(self, earlier: ServerCounters, tokens: float) -> DraftCounts | None:
        """Returns the counts since ``earlier``, None if the server has no counters.

        A gauge becomes counts by the number of ``tokens`` generated since. It does not say how many tokens were
        drafted; at least the accepted ones were.
        """
        if self.speculation is not None and earlier.speculation is not None:
            return self.speculation.plus(earlier.speculation, -1.0)
        if self.accept_length is None or self.accept_length < 1.0:
            return None
        accepted = tokens * (1.0 - 1.0 / self.accept_length)
        return DraftCounts(accepted, accepted)

    @staticmethod
    def of(page: str) -> ServerCounters:
        """Returns the counters of a page, summed over engines and models."""
        sums: dict[str, float] = {}
        positions: dict[int, float] = {}
        lengths: list[float] = []
        for name, labels, text in _COUNTER.findall(page):
            position, value = _POSITION.search(labels), _finite(text)
            if value is None:
                continue
            if name == f"{_PREFIX}accepted_tokens_per_pos" and position:
                positions[int(position[1])] = positions.get(int(position[1]), 0.0) + value
            elif name == "spec_accept_length":
                lengths.append(value)
            else:
                sums[name] = sums.get(name, 0.0) + value
        generated = next((sums[name] for name in _GENERATED if name in sums), None)
        drafted, accepted = sums.get(f"{_PREFIX}draft_tokens"), sums.get(f"{_PREFIX}accepted_tokens")
        if drafted is None or accepted is None:
            return ServerCounters(None, generated, sum(lengths) / len(lengths) if lengths else None)
        by_position = tuple(positions[at] for at in sorted(positions))
        return ServerCounters(DraftCounts(drafted, accepted, sums.get(f"{_PREFIX}drafts"), by_position), generated)


def counts_of(answer: Mapping[str, Any]) -> DraftCounts | None:
    """Returns the counts in an answer: our and vLLM's ``metrics``, or llama.cpp's ``timings``.

    Raises:
        ValueError: A count is not a finite number.
    """
    metrics = (answer.get("metrics") or {}).get("speculative_decoding")
    if metrics is not None:
        histogram, steps = metrics.get("acceptance_histogram") or (), metrics.get("num_spec_steps")
        return DraftCounts(
            _count(metrics["num_draft_tokens"]),
            _count(metrics.get("num_accepted_draft_tokens") or 0),
            None if steps is None else _count(steps),
            tuple(sum(map(_count, histogram[at:])) for at in range(1, len(histogram))),
        )
    timings = answer.get("timings")
    if timings is None:
        return None
    return DraftCounts(_count(timings.get("draft_n") or 0), _count(timings.get("draft_n_accepted") or 0))


def _finite(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _count(value: Any) -> float:
    if (number := _finite(value)) is None:
        raise ValueError(f"a count of draft tokens was expected, got {str(value)[:40]!r}")
    return number
