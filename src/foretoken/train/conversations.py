"""Text that a target writes without data: both sides of conversations (Magpie, 2406.08464), or documents."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.core.errors import InvalidRequest
from foretoken.engine.chat_template import apply_template, own_template
from foretoken.train.sampling import Turns

FILE = Path(__file__).with_name("requests.json")
EMPTY_SHARE = 0.3
COMPARED = 96  # windows whose first tokens are equal count as duplicates
_MARKS = ("QXFIRST", "QXSECOND", "QXTHIRD")


def turns_of(tokenizer: Any, ends: list[int]) -> tuple[Turns, str]:
    """Returns the turns of a model with these end-of-sequence ids, and its kind of text: conversations or documents.

    Conversations need a chat template that keeps earlier turns and ends an answer with one of ``ends``.
    """
    try:
        own_template(tokenizer, "this model", "")
        roles = ("user", "assistant", "user")
        messages = [{"role": role, "content": mark} for role, mark in zip(roles, _MARKS, strict=True)]
        rest: str = apply_template(tokenizer, messages, tokenize=False)
        separators = []
        for mark in _MARKS:
            before, rest = rest.split(mark, 1)
            separators.append(tuple(tokenizer.encode(before, add_special_tokens=False)))
        opening, answer, request = separators
        if request[0] in ends and opening:
            marked = [answer[0]] if tokenizer.decode([answer[0]], skip_special_tokens=True) == "" else []
            return Turns(opening, answer, request, tuple({*ends, *marked})), "conversations"
    except (InvalidRequest, ValueError, IndexError):  # no template, or one that omits earlier turns
        pass
    start = tuple(tokenizer.encode("", add_special_tokens=True)) or tuple(ends[:1]) or (0,)
    return Turns(start, ends=tuple(ends)), "documents"


def starts_of(tokenizer: Any, turns: Turns, rng: np.random.Generator, count: int) -> list[list[int]]:
    """Returns first tokens of ``count`` texts: the opening, and in a conversation the beginning of a request."""
    if not turns.answer:
        return [list(turns.opening)] * count
    texts = beginnings(rng, count)
    return [[*turns.opening, *(tokenizer.encode(text, add_special_tokens=False) if text else ())] for text in texts]


def without_duplicates(windows: Tensor) -> Tensor:
    """Returns the windows [N, T] whose first tokens are those of no earlier one."""
    _, first = np.unique(windows[:, :COMPARED].numpy(), axis=0, return_index=True)
    return windows[torch.from_numpy(np.sort(first))]


@cache
def _word_lists() -> dict[str, Any]:
    return dict(json.loads(FILE.read_text(encoding="utf-8")))


def beginnings(rng: np.random.Generator, count: int) -> list[str]:
    """Returns beginnings of ``count`` requests, which add variety. A fraction ``EMPTY_SHARE`` of them is empty."""
    # Most words of a vocabulary begin with a space: one at the end of a beginning would exclude them.
    return ["" if rng.random() < EMPTY_SHARE else _beginning(rng).rstrip(" ") for _ in range(count)]


def _beginning(rng: np.random.Generator) -> str:
    def chosen(listed: Sequence[str]) -> str:
        return listed[int(rng.integers(len(listed)))]

    lists = _word_lists()
    return chosen(lists["beginnings"]).format(
        topic=chosen(lists["topics"]),
        name=chosen(lists["names"]),
        other=chosen(lists["names"]),
        number=int(rng.integers(2, 200)),
        language=chosen(lists["languages"]),
        **{name: chosen(words) for name, words in lists["words"].items()},
    )
