"""The protocol between the race and a peer's process: one JSON object per line. Standard library only.

The process receives a ``Setup`` and replies ``{"ready": version}``; then it replies to every ``PeerRequest`` with an
``Answer``, or with ``{"error": reason}``. A process that stands for a server replies to ``{"bodies": requests}`` with
``{"answers": ...}``.
"""

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
    """Models and settings that a process loads once."""

    system: str
    method: str  # "plain", or a speculation method
    target: str
    draft: str = ""
    depth: int = 0  # draft tokens per step; 0 where each request carries its own
    quantization: str = ""  # the race's name for the weights; "" is bf16
    weights: str = "bf16"  # how this system stores the target's weights: "bf16", "int8", "Q4_0" ...
    max_length: int = 2048  # prompt and output tokens together
    batch: int = 1
    threads: int = 1
    options: tuple[tuple[str, str], ...] = ()  # the system's own options, values as JSON


OWN_CHOICE = -1
"""Depth of a request that leaves it to the system."""


@dataclass(frozen=True)
class PeerRequest:
    """Completes prompts in one batch, each by ``max_tokens`` tokens, ignoring EOS.

    depth 0 is plain decoding, ``OWN_CHOICE`` what the system chooses.
    """

    prompts: list[list[int]]
    max_tokens: int
    temperature: float = 0.0
    depth: int = 0


@dataclass(frozen=True)
class Answer:
    """Completions and their timing."""

    tokens: list[list[int]]
    seconds: float
    first_seconds: float  # seconds until every prompt had its first tokens
    first_tokens: int  # all tokens emitted by then
    passes: int  # target passes, counted once for every sequence in a pass
    # passes of each prompt without its first, if the system counts them
    passes_each: list[int] = field(default_factory=list)
    # seconds of each decode step in which all sequences took part, if the system times them
    step_seconds: list[float] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)  # tokens of each such pass of each sequence

    @property
    def total(self) -> int:
        """Number of generated tokens of all prompts."""
        return sum(len(tokens) for tokens in self.tokens)


Complete = Callable[[PeerRequest], Answer]
ApiComplete = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
"""Completes bodies of ``/v1/completions``, by vLLM's names, at once; ``{"error": reason}`` if the engine refuses."""


@dataclass
class Watch:
    """Notes when each of ``count`` sequences has its first tokens."""

    count: int
    tokens: dict[int, int] = field(default_factory=dict)
    first: tuple[float, int] | None = None

    def saw(self, sequence: int, tokens: int, seconds: float) -> None:
        """Records ``tokens`` new tokens of ``sequence``, ``seconds`` after the start."""
        self.tokens[sequence] = self.tokens.get(sequence, 0) + tokens
        if self.first is None and len(self.tokens) == self.count:
            self.first = (seconds, sum(self.tokens.values()))

    def answer(self, tokens: list[list[int]], seconds: float, passes: int) -> Answer:
        """Returns the answer to a request of all sequences."""
        first_seconds, first_tokens = self.first or (seconds, sum(map(len, tokens)))
        return Answer(tokens, seconds, first_seconds, first_tokens, passes)


def serve(load: Callable[[Setup], tuple[Complete | ApiComplete, str]]) -> None:
    """Replies until standard input ends. Libraries may print to standard output; theirs goes to standard error.

    load: Returns a function that completes requests, and a version.
    """
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    die_with_parent()

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    complete: Callable[[Any], Any] | None = None
    for line in sys.stdin:
        try:
            message = json.loads(line)
            if complete is None:
                message["options"] = tuple((name, value) for name, value in message["options"])
                complete, version = load(Setup(**message))
                reply({"ready": version})
            elif "bodies" in message:
                reply({"answers": complete(message["bodies"])})
            else:
                reply(asdict(complete(PeerRequest(**message))))
        except Exception as error:
            reply({"error": f"{type(error).__name__}: {error}"})


def die_with_parent() -> None:
    """Makes the kernel end this process with its parent (Linux), since a killed race cannot end stopped processes."""
    if sys.platform == "linux":
        set_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
