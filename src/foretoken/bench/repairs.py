"""Tasks for encoder-decoders: broken code to repair, from files outside the training data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from foretoken.models.formats.checkpoint import load_tokenizer

FILE = Path(__file__).with_name("repairs.jsonl")


@dataclass(frozen=True)
class Repair:
    """One task as token ids. source: the broken code. length: tokens of the fixed code, end-of-sequence included."""

    source: tuple[int, ...]
    length: int


def repairs(model: Path, count: int) -> list[Repair]:
    """Returns the first ``count`` tasks, tokenized for ``model``."""
    tokenizer = load_tokenizer(model)
    lines = FILE.read_text(encoding="utf-8").splitlines()[:count]
    tasks = [json.loads(line) for line in lines]
    return [
        Repair(tuple(tokenizer(task["prompt"])["input_ids"]), len(tokenizer(task["completion"])["input_ids"]))
        for task in tasks
    ]
