"""Options of ``foretoken audit`` that all audits read, budgets, and the costs of measuring a server."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.cli.grouped import option
from foretoken.cli.options import Dtype
from foretoken.cli.theme import note
from foretoken.core.errors import InvalidRequest

if TYPE_CHECKING:
    from rich.console import Console

UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
THOUSANDS = {"": 1, "k": 1_000, "M": 1_000_000}


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """The texts that are compared."""

    prompts: Path | None = option(None, 'JSON lines with a "prompt" each. [our own functions]', metavar="FILE")
    budget: str = option(
        "2m", "As 90s, 5m or 1h, for an endpoint also as 60ktokens; more finds smaller errors.", metavar="TIME"
    )
    temperature: float = option(1.0, "Of the sampled texts; above 0.")
    seed: int = option(0, "Of all sampling.")
    dtype: Dtype = "auto"
    float32: bool = option(True, "Compare seeded texts in float32 as well.")


def announcing(notes: Console, dry_run: bool) -> Callable[[Mapping[str, Any]], bool]:
    """Returns a function that prints the costs of measuring a server, and returns whether to spend them."""

    def announce(costs: Mapping[str, Any]) -> bool:
        sent, waves = costs["sent"], ""
        if "waves" in costs:
            concurrency = ", ".join(map(str, costs["concurrency"]))
            waves = f" in {costs['waves']} waves of {concurrency} at once; about {costs['minutes']:.1f} minutes"
        line = (
            f"about {costs['requests']:,} requests, {costs['prompt_tokens']:,} prompt tokens and {costs['tokens']:,} "
            f"generated tokens{waves}; {sent['requests']:,} requests and {sent['tokens']:,} generated tokens are spent "
            "already, to find this out"
        )
        line += f"; {costs['power']}" if "power" in costs else ""
        note(notes, line)
        return not dry_run

    return announce


def budget(text: str) -> tuple[int | None, float | None]:
    """Returns a budget in tokens or in seconds, the other is None. Raises InvalidRequest."""
    counted = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kM]?)\s*tok(?:en)?s?", text.strip())
    if counted is not None and float(counted[1]) > 0.0:
        return int(float(counted[1]) * THOUSANDS[counted[2]]), None
    return None, duration(text, "a time such as 90s, 5m or 1h, or for an endpoint tokens such as 60ktokens")


def duration(text: str, expected: str = "a time such as 90s, 5m or 1h") -> float:
    """Returns the seconds of ``--budget``. Raises InvalidRequest."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if match is None or float(match[1]) == 0.0:
        raise InvalidRequest(f"--budget must be {expected}, got {text!r}")
    return float(match[1]) * UNITS[match[2]]
