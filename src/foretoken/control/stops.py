"""When a draft ends before its budget is spent: rules that judge each place before a token is drawn for it.

A rule sees the draft's law q at the place, and perhaps the state that q was made of, never the token that is drawn:
then where a draft ends is a stopping time, and verification stays exact (non-anticipation). A rule that looked at the
drawn token's own probability would bend the law.
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
"""By users' names: the module of ``control`` whose ``RULE`` it is."""


class Gate(Protocol):
    """One draft of one sequence, asked at every depth in turn, once before each draw."""

    def stops(self, row: Tensor, hidden: Tensor | None) -> bool:
        """Whether nothing is drawn from ``row`` and the draft ends here.

        row: [V], the law that the next token would be drawn from; of a greedy draft, its law at temperature 1.
        hidden: [H], the draft's last normed state there, for a rule that wants it.
        """
        ...


class Stop:
    """Base of every rule, one for all sequences of a proposer; this one never stops. hidden: it wants the states."""

    hidden: bool = False

    def begin(self, context: Context) -> Gate:
        """A draft for ``context`` begins."""
        return _OPEN

    def observe(self, context: Context, step: StepOutput) -> None:
        """What became of the last draft that began for ``context``."""

    def forget(self, context: Context) -> None:
        """The sequence is over, for whatever reason; calling it for an unknown one does nothing."""


class _Open:
    def stops(self, row: Tensor, hidden: Tensor | None) -> bool:
        return False


_OPEN = _Open()


@dataclass(frozen=True)
class Rule:
    """A rule as users name it. config: its keys, a frozen dataclass. build: from those and the model that drafts."""

    config: type[Any]
    build: Callable[[Any, Model], Stop]


def check(value: Any) -> None:
    """Refuse what ``make`` could not read: unknown rules, unknown keys and values out of range. InvalidRequest."""
    if value is not None:
        _read(value)


def make(value: str | Mapping[str, Any] | None, model: Model) -> Stop | None:
    """The rule that ``value`` names, for drafts of ``model``; None for None.

    value: a rule's name, or {"rule": name} with the rule's own keys. Raises InvalidRequest, and ModelLoadError for a
    checkpoint that a rule cannot be made of.
    """
    if value is None:
        return None
    rule, config = _read(value)
    return rule.build(config, model)


def _read(value: Any) -> tuple[Rule, Any]:
    known = ", ".join(RULES)
    given = dict(value) if isinstance(value, Mapping) else {"rule": value}
    name = given.pop("rule", None)
    if not isinstance(name, str) or name not in RULES:
        raise InvalidRequest(
            f'draft_stop must be None, the name of a rule ({known}) or {{"rule": one of these, ...}}, got {value!r}'
        )
    rule: Rule = import_module(f"foretoken.control.{RULES[name]}").RULE
    keys = [f.name for f in fields(rule.config)]
    if unknown := sorted(set(given) - set(keys)):
        raise InvalidRequest(
            f"unknown key(s) in draft_stop: {', '.join(map(str, unknown))}; known: {', '.join(keys)} (rule {name!r})"
        )
    return rule, rule.config(**given)
