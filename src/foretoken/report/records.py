"""Access to records that another version or a user may have written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.report.markup import figure, number, percent, times


class PageRecord(dict[str, Any]):
    """A recorded object. Entries that are missing or of another type count as empty, and are shown as a dash."""

    @classmethod
    def of(cls, value: Any) -> PageRecord:
        """Returns ``value`` as a record, an empty one if it is not a mapping."""
        return cls(value) if isinstance(value, Mapping) else cls()

    def record(self, key: str) -> PageRecord:
        return PageRecord.of(self.get(key))

    def records(self, key: str) -> list[PageRecord]:
        return records(self.get(key))

    def items_of(self, key: str) -> list[Any]:
        return _items(self.get(key))

    def text(self, key: str) -> str:
        return str(self.get(key, ""))

    def number(self, key: str) -> float | None:
        """Returns the entry if it is a finite number."""
        return number(self.get(key))

    def value(self, key: str, default: float = 0.0) -> float:
        """Returns the entry if it is a finite number, else ``default``."""
        result = self.number(key)
        return default if result is None else result

    def count(self, key: str) -> int:
        return int(self.value(key))

    def figure(self, key: str, digits: int = 3) -> str:
        return figure(self.number(key), digits)

    def times(self, key: str) -> str:
        return times(self.number(key))

    def percent(self, key: str) -> str:
        return percent(self.number(key))

    def signed(self, key: str) -> str:
        result = self.number(key)
        return "–" if result is None else f"{result:+.2f}"

    def interval(self, low: str = "low", high: str = "high") -> str:
        """Returns an interval, nothing if it has no ends."""
        below, above = self.number(low), self.number(high)
        return "" if below is None or above is None else f"{below:.2f}–{above:.2f}"


def records(value: Any) -> list[PageRecord]:
    return [PageRecord(item) for item in _items(value) if isinstance(item, Mapping)]


def _items(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else []


def shown(value: Any) -> str:
    """Returns a recorded value as text."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {shown(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return figure(value) if isinstance(value, float) else "–" if value is None else str(value)
