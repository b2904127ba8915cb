"""Rules that end a draft before its budget is spent. A rule is asked at each position before its token is drawn.

A rule sees the draft's distribution q at the position, and possibly its hidden state, but never the token that is
drawn. The end of a draft is then a stopping time, and verification stays exact (non-anticipation). A rule that
looked at the drawn token's own probability would bias the output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any, Protocol

from torch import Tensor

from foretoken.core.context import Context
from foretoken.core.errors import InvalidRequest
from foretoken.core.step import StepOutput
from foretoken.models.base import Model

RULES = {"entropy": "entropy", "margin": "margin", "learned": "learned"}
"""By users' names: the module of this package whose ``RULE`` it is."""


class Gate(Protocol):
    """Decides for one draft of one sequence. It is asked once at every depth in turn, before the draw."""

    def stops(self, row: Tensor, hidden: Tensor | None) -> bool:
        """Returns whether the draft ends here, so that nothing is drawn from ``row``.

        Args:
            row: [V], the distribution of the next draw. For a greedy draft, its distribution at temperature 1.
            hidden: [H], the draft's last normed state at this position, for rules that need it.
        """
        ...


class Stop:
    """Base class of the rules. One instance serves all sequences of a proposer. This one never stops.

    Attributes:
        hidden: Whether the rule needs hidden states.
    """

    hidden: bool = False

    def begin(self, context: Context) -> Gate:
        """Returns the gate of a new draft for ``context``."""
        return _OPEN

    def observe(self, context: Context, step: StepOutput) -> None:
        """Receives the outcome of the last draft that began for ``context``."""

    def forget(self, context: Context) -> None:
        """Drops the state of a sequence that has ended. Unknown sequences are ignored."""


class _Open:
    def stops(self, row: Tensor, hidden: Tensor | None) -> bool:
        return False


_OPEN = _Open()


@dataclass(frozen=True)
class StopRule:
    """A rule as users name it.

    Attributes:
        config: Frozen dataclass of the rule's keys.
        build: Makes the rule from its configuration and the model that drafts.
    """

    config: type[Any]
    build: Callable[[Any, Model], Stop]


def check(value: Any) -> None:
    """Raises InvalidRequest where ``make`` could not read ``value``."""
    if value is not None:
        _read(value)


def make(value: str | Mapping[str, Any] | None, model: Model) -> Stop | None:
    """Returns the rule that ``value`` names, None for None.

    Args:
        value: A rule's name, or {"rule": name} with the rule's own keys.
        model: The model that drafts.

    Raises:
        InvalidRequest: The rule or one of its keys is unknown, or a value is out of range.
        ModelLoadError: The rule's checkpoint cannot be loaded.
    """
    if value is None:
        return None
    rule, config = _read(value)
    return rule.build(config, model)


def _read(value: Any) -> tuple[StopRule, Any]:
    known = ", ".join(RULES)
    given = dict(value) if isinstance(value, Mapping) else {"rule": value}
    name = given.pop("rule", None)
    if not isinstance(name, str) or name not in RULES:
        raise InvalidRequest(
            f'draft_stop must be None, the name of a rule ({known}) or {{"rule": one of these, ...}}, got {value!r}'
        )
    rule: StopRule = import_module(f"foretoken.propose.stopping.{RULES[name]}").RULE
    keys = [f.name for f in fields(rule.config)]
    if unknown := sorted(set(given) - set(keys)):
        raise InvalidRequest(
            f"unknown key(s) in draft_stop: {', '.join(map(str, unknown))}; known: {', '.join(keys)} (rule {name!r})"
        )
    return rule, rule.config(**given)
