"""Beginnings of requests, from which a target writes its own training text. They give it variety, not content."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).with_name("requests.json")
EMPTY_SHARE = 0.3


@cache
def _listed() -> dict[str, Any]:
    return dict(json.loads(FILE.read_text(encoding="utf-8")))


def beginnings(rng: np.random.Generator, count: int) -> list[str]:
    """Returns beginnings of ``count`` requests, of which ``EMPTY_SHARE`` are empty."""
    # Most words of a vocabulary begin with a space: one at the end of a beginning would exclude them.
    return ["" if rng.random() < EMPTY_SHARE else _beginning(rng).rstrip(" ") for _ in range(count)]


def _beginning(rng: np.random.Generator) -> str:
    def chosen(listed: Sequence[str]) -> str:
        return listed[int(rng.integers(len(listed)))]

    lists = _listed()
    return chosen(lists["beginnings"]).format(
        topic=chosen(lists["topics"]),
        name=chosen(lists["names"]),
        other=chosen(lists["names"]),
        number=int(rng.integers(2, 200)),
        language=chosen(lists["languages"]),
        **{name: chosen(words) for name, words in lists["words"].items()},
    )
