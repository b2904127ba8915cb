"""The table of published drafters, ``drafters.csv``: a row for each pair of a target and a drafter.

A licence is "unknown" where the source states none. ``source`` is the page that names the pair, or "bundled".
"""

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

BUNDLED = "bundled"
FORMS = {
    "dspark": "dspark",
    "eagle3": "eagle3",
    "p-eagle": "eagle3",
    "mtp": "mtp",
    "assistant": "assistant",
    "jetspec": "jetspec",
    "dflash": "dflash",
    "medusa": "medusa",
    "blockwise": "blockwise",
    "pard": "draft_model",
    "draft_model": "draft_model",
}
"""The method that drafts with each form of the table's column ``method``, by falling acceptance."""

# endings of names that tell the storage of the weights
_STORAGE = re.compile(r"-(gguf|i?q\d(-[a-z0-9]+)*|b?f16|f32|fp(8|16)(-[a-z]+)*|awq|gptq(-[a-z0-9]+)*|int[48]|[48]bit)$")


@dataclass(frozen=True)
class PublishedDrafter:
    """One row. target, name: hub names, or names of bundled models. form: a key of ``FORMS``."""

    target: str
    name: str
    form: str
    licence: str
    source: str

    @property
    def method(self) -> str:
        return FORMS[self.form]

    @property
    def bundled(self) -> bool:
        """Whether this package contains it."""
        return self.source == BUNDLED

    @property
    def in_target(self) -> bool:
        """Whether the target's checkpoint contains it."""
        return self.name == self.target


@cache
def drafters() -> tuple[PublishedDrafter, ...]:
    """Returns all rows of the table in its order."""
    with Path(__file__).with_name("drafters.csv").open(encoding="utf-8", newline="") as file:
        return tuple(PublishedDrafter(*row) for row in list(csv.reader(file))[1:])


def drafters_of(names: Iterable[str]) -> list[PublishedDrafter]:
    """Returns the drafters of the targets with these names: of the first name before those of the next.

    The drafters of a target are ordered by the acceptance of their form, then as in the table.
    """
    forms, rows = list(FORMS), drafters()
    found = []
    for key in dict.fromkeys(map(name_key, names)):
        of_target = [row for row in rows if name_key(row.target) == key]
        found += sorted(of_target, key=lambda row: forms.index(row.form))
    return found


def name_key(name: str) -> str:
    """Returns a model's name without owner, file type and storage of the weights, in lower case with hyphens."""
    key = re.sub(r"[^a-z0-9]+", "-", name.rstrip("/").rpartition("/")[2].lower()).strip("-").removeprefix("meta-")
    while (shorter := _STORAGE.sub("", key)) != key:
        key = shorter
    return key
