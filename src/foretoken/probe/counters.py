"""What a server says it drafted and accepted: in an answer, or in the counters of its Prometheus page."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_COUNTER = re.compile(r"^(?:\w+:)(\w+?)(?:_total)?(\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')
_PREFIX = "spec_decode_num_"
_GENERATED = ("generation_tokens", "tokens_predicted")  # of all requests: vLLM, SGLang and ours; llama.cpp


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Counts of speculation.

    Attributes:
        drafted: Draft tokens.
        accepted: Accepted draft tokens.
        steps: Steps that verified a draft, None if the server does not say.
        by_position: Steps that accepted the draft token at each position, empty if the server does not say.
    """

    drafted: float
    accepted: float
    steps: float | None = None
    by_position: tuple[float, ...] = ()

    def minus(self, earlier: DraftCounts) -> DraftCounts:
        """Returns what was counted since ``earlier``."""
        steps = None if self.steps is None or earlier.steps is None else self.steps - earlier.steps
        before = (*earlier.by_position, *[0.0] * len(self.by_position))
        positions = tuple(now - then for now, then in zip(self.by_position, before, strict=False))
        return DraftCounts(self.drafted - earlier.drafted, self.accepted - earlier.accepted, steps, positions)

    def plus(self, other: DraftCounts) -> DraftCounts:
        """Returns both together."""
        steps = None if self.steps is None or other.steps is None else self.steps + other.steps
        length = max(len(self.by_position), len(other.by_position))
        rows = [(*each.by_position, *[0.0] * (length - len(each.by_position))) for each in (self, other)]
        positions = tuple(a + b for a, b in zip(*rows, strict=True))
        return DraftCounts(self.drafted + other.drafted, self.accepted + other.accepted, steps, positions)

    @property
    def contradiction(self) -> str:
        """What is impossible about the counts, "" if nothing is."""
        if min(self.drafted, self.accepted, self.steps or 0.0, *self.by_position) < 0:
            return "a counter fell"
        if self.accepted > self.drafted:
            return f"{self.accepted:,.0f} tokens were accepted of {self.drafted:,.0f} drafted"
        if any(after > before for before, after in zip(self.by_position, self.by_position[1:], strict=False)):
            return "later draft tokens were accepted more often than those before them"
        return ""


@dataclass(frozen=True, slots=True)
class ServerCounters:
    """Counters of a Prometheus page, each None where the page has none.

    Attributes:
        speculation: Draft tokens since the server started.
        generated: Generated tokens since then.
        accept_length: SGLang's gauge of tokens per pass, of its latest passes.
    """

    speculation: DraftCounts | None = None
    generated: float | None = None
    accept_length: float | None = None

    def since(self, earlier: ServerCounters, tokens: float) -> DraftCounts | None:
        """Returns what was counted since ``earlier``, None if the server does not tell.

        Args:
            earlier: The counters then.
            tokens: Tokens generated since, from which a gauge becomes counts; as many were drafted as accepted, or
                more.
        """
        if self.speculation is not None and earlier.speculation is not None:
            return self.speculation.minus(earlier.speculation)
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
            where, value = _POSITION.search(labels), _finite(text)
            if value is None:
                continue
            if name == f"{_PREFIX}accepted_tokens_per_pos" and where:
                positions[int(where[1])] = positions.get(int(where[1]), 0.0) + value
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


def _finite(value: Any) -> float | None:
    """Returns a number, None for what is none or is not finite."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _told(value: Any) -> float:
    number = _finite(value)
    if number is None:
        raise ValueError(f"a count of draft tokens was expected, got {str(value)[:40]!r}")
    return number


def counts_of(data: Mapping[str, Any]) -> DraftCounts | None:
    """Returns the counts in an answer: our and vLLM's ``metrics``, or llama.cpp's ``timings``.

    Raises:
        ValueError: A count is not a finite number.
    """
    metrics = (data.get("metrics") or {}).get("speculative_decoding")
    if metrics is not None:
        drafted, accepted = metrics["num_draft_tokens"], metrics.get("num_accepted_draft_tokens") or 0
        histogram = metrics.get("acceptance_histogram") or ()
        positions = tuple(sum(map(_told, histogram[at:])) for at in range(1, len(histogram)))
        steps = metrics.get("num_spec_steps")
        return DraftCounts(_told(drafted), _told(accepted), None if steps is None else _told(steps), positions)
    timings = data.get("timings")
    if timings is None:
        return None
    return DraftCounts(_told(timings.get("draft_n") or 0), _told(timings.get("draft_n_accepted") or 0))
