"""Prompts of the benchmarks: bundled Python functions, alone or after other text, prompts from a file, and repairs."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foretoken.core.errors import InvalidRequest
from foretoken.core.files import read_text
from foretoken.engine.prompts import apply_template

_FUNCTIONS = tomllib.loads(Path(__file__).with_name("functions.toml").read_text(encoding="utf-8"))
FUNCTIONS = tuple(str(each["prompt"]) for each in _FUNCTIONS["function"])
REPAIRS = Path(__file__).with_name("repairs.jsonl")
CONTEXTS = ("textwrap", "shlex", "queue", "bisect", "heapq", "sched", "fnmatch", "copy")  # of the standard library


def ragged(ids_of: Callable[[str], list[int]], count: int = 16, low: int = 20, high: int = 1000) -> list[list[int]]:
    """Returns prompts of ``low`` to ``high`` tokens: bundled functions after part of a standard library module.

    Lengths grow by a constant factor and come in mixed order. The modules are those of the running Python.
    """
    lengths = [round(low * (high / low) ** (i / max(1, count - 1))) for i in range(count)]
    prompts: list[list[int]] = []
    for i in range(count):
        text = FUNCTIONS[i % len(FUNCTIONS)]
        at = i
        while len(ids := ids_of(text)) < high:
            text = f"{_module(CONTEXTS[at % len(CONTEXTS)])}\n\n{text}"
            at += 1
        prompts.append(ids[-lengths[i * 7 % count if count % 7 else i] :])
    return prompts


def _module(name: str) -> str:
    """Returns the source of a standard library module."""
    import importlib.util

    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise InvalidRequest(f"this Python lacks the source of {name!r}; pass --prompts with a file of prompts")
    return Path(spec.origin).read_text(encoding="utf-8")


def prompts_or_functions(path: Path | None, count: int | None = None) -> list[str]:
    """Returns the prompts of a file, or without one our own functions; at most ``count`` of them."""
    return list(FUNCTIONS)[:count] if path is None else load_prompts(path, count)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Returns the token ids of a text of any length."""
    return list(tokenizer(text, verbose=False)["input_ids"])


def encoded_prompts(tokenizer: Any, path: Path | None, count: int | None = None) -> list[list[int]]:
    """Returns the prompts of a file as token ids, through the chat template if the model has one, or our own functions.

    Our functions are continued as they are.
    """
    texts = prompts_or_functions(path, count)
    if path is None or not getattr(tokenizer, "chat_template", None):
        return [encode(tokenizer, text) for text in texts]
    chats = ([{"role": "user", "content": text}] for text in texts)
    return [list(apply_template(tokenizer, c, add_generation_prompt=True, return_dict=False)) for c in chats]


def load_prompts(path: Path, count: int | None = None) -> list[str]:
    """Returns the first prompts of a JSON-lines file: the field ``prompt``, or the first of ``turns``."""
    prompts: list[str] = []
    for number, line in enumerate(read_text("the prompts", path, "JSON lines").splitlines(), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            prompts.append(str(fields["turns"][0] if "turns" in fields else fields["prompt"]))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise InvalidRequest(
                f'{path}, line {number}: expected one JSON object a line with a "prompt", got {line[:60]!r}'
            ) from error
    if not prompts:
        raise InvalidRequest(f"{path} holds no prompts; expected one JSON object a line")
    return prompts[:count]


def repairs(tokenizer: Any, count: int) -> list[tuple[list[int], int]]:
    """Returns tasks for encoder-decoders, from files outside the training data.

    Each is broken code as token ids, and the number of tokens of the fixed code, end-of-sequence included.
    """
    tasks = [json.loads(line) for line in REPAIRS.read_text(encoding="utf-8").splitlines()[:count]]
    return [(tokenizer(task["prompt"])["input_ids"], len(tokenizer(task["completion"])["input_ids"])) for task in tasks]
