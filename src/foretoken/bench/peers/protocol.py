"""What the race and a peer's process say to each other: one JSON object a line. Standard library only.

The process gets a ``Setup`` and answers ``{"ready": version}``; then for every ``Ask`` an ``Answer``. What it cannot do
it answers with ``{"error": reason}``.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Setup:
    """What a process loads, once.

    method: "plain", or how it speculates. depth: 0 where the process takes it with every question.
    quantization: "" is bf16. max_length: prompt and output together. options: the system's own, values as JSON.
    """

    system: str
    method: str
    target: str
    draft: str = ""
    depth: int = 0
    quantization: str = ""
    max_length: int = 2048
    batch: int = 1
    threads: int = 1
    options: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Ask:
    """Complete these prompts at once, each by ``max_tokens``, end-of-text ignored; depth 0 is plain decoding."""

    prompts: list[list[int]]
    max_tokens: int
    temperature: float = 0.0
    depth: int = 0


@dataclass(frozen=True)
class Answer:
    """What came out and what it took.

    first_seconds, first_tokens: until every prompt had its first tokens, and all tokens there were by then.
    passes: of the target, counted once for every sequence that shared it.
    """

    tokens: list[list[int]]
    seconds: float
    first_seconds: float
    first_tokens: int
    passes: int

    @property
    def total(self) -> int:
        return sum(len(tokens) for tokens in self.tokens)


Complete = Callable[[Ask], Answer]


@dataclass
class Watch:
    """Notes when every one of ``count`` sequences has its first tokens."""

    count: int
    tokens: dict[int, int] = field(default_factory=dict)
    first: tuple[float, int] | None = None

    def saw(self, sequence: int, tokens: int, seconds: float) -> None:
        """``sequence`` has ``tokens`` more, ``seconds`` after the start."""
        self.tokens[sequence] = self.tokens.get(sequence, 0) + tokens
        if self.first is None and len(self.tokens) == self.count:
            self.first = (seconds, sum(self.tokens.values()))

    def answer(self, tokens: list[list[int]], seconds: float, passes: int) -> Answer:
        first_seconds, first_tokens = self.first or (seconds, sum(map(len, tokens)))
        return Answer(tokens, seconds, first_seconds, first_tokens, passes)


def serve(load: Callable[[Setup], tuple[Complete, str]]) -> None:
    """Answer until standard input ends. ``load`` -> how to complete, and the version that does.

    Libraries print as they please, so what they take for standard output is standard error.
    """
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    _die_with_parent()

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    complete: Complete | None = None
    for line in sys.stdin:
        try:
            message = json.loads(line)
            if complete is None:
                message["options"] = tuple((name, value) for name, value in message["options"])
                complete, version = load(Setup(**message))
                reply({"ready": version})
            else:
                reply(asdict(complete(Ask(**message))))
        except Exception as error:
            reply({"error": f"{type(error).__name__}: {error}"})


def _die_with_parent() -> None:
    """A race that is killed outright cannot end processes that sleep; the kernel does it where it can (Linux)."""
    if sys.platform == "linux":
        set_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
