"""Measurements of vLLM for a plan: what was run, and the tokens and times of each run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from foretoken.bench.peers.vllm_steps import VllmStepTimes
from foretoken.core.errors import InvalidRequest
from foretoken.plan.statistics import ratio_interval

LEVEL = 0.95


CHAIN = (1, 2, 4, 8)  # draft lengths of chains that are run


COPIED = (2, 4, 8)  # draft lengths of methods that copy text


PLAIN = ""  # name of plain decoding among the lanes


_DISTURBED = 3.0  # a step that takes this many times the median was disturbed, and is left out


_COPIES = ("ngram", "suffix", "custom_class")


@dataclass(frozen=True)
class VllmCandidate:
    """One way to speculate.

    Args:
        name: Unique within a plan.
        config: vLLM's speculative_config without num_speculative_tokens.
        depths: Draft lengths to be run.
        additional: vLLM's additional_config.
    """

    name: str
    config: Mapping[str, Any]
    depths: tuple[int, ...]
    additional: Mapping[str, Any] = field(default_factory=dict)

    def at(self, depth: int) -> dict[str, Any]:
        """Returns the ``speculative_config`` with ``depth`` draft tokens."""
        return {**self.config, "num_speculative_tokens": depth}

    @staticmethod
    def of(
        config: Mapping[str, Any],
        name: str = "",
        additional: Mapping[str, Any] | None = None,
        max_depth: int = CHAIN[-1],
    ) -> VllmCandidate:
        """Returns a candidate from vLLM's speculative_config.

        Args:
            config: vLLM's speculative_config.
            name: Name, by default the method and the model's folder.
            additional: vLLM's additional_config.
            max_depth: Greatest draft length where ``config`` gives none.

        Raises:
            InvalidRequest: The configuration names no method, or an impossible draft length.
        """
        own = dict(config)
        depth, method = own.pop("num_speculative_tokens", None), own.get("method")
        if not isinstance(method, str):
            raise InvalidRequest(f"a speculative_config for vLLM needs a 'method', got {dict(config)!r}")
        if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 1):
            raise InvalidRequest(f"num_speculative_tokens must be an integer of at least 1 in a plan, got {depth!r}")
        usual = COPIED if method in _COPIES else CHAIN
        depths = (depth,) if depth is not None else (*(d for d in usual if d < max_depth), max_depth)
        model = str(own.get("model", "")).rstrip("/").rpartition("/")[2]
        return VllmCandidate(name or f"{method} {model}".strip(), own, depths, additional or {})


@dataclass(frozen=True)
class VllmRun:
    """Measurements of one lane at one draft length, over groups of ``batch`` prompts.

    Args:
        lane: Name of the candidate, ``PLAIN`` for plain decoding.
        depth: Draft length, 0 for plain decoding.
        beside: Name of the lane with which it alternated.
        temperature: Sampling temperature.
        batch: Sequences at once.
        tokens: By prompt, tokens without those of the first pass.
        passes: By prompt, target passes without the first.
        steps: By group, number of timed steps.
        seconds: By group, mean seconds of a step.
        emitted: Number of passes that emitted 1, 2, ... tokens.
        first_seconds: By group, seconds until every prompt had its first token.
    """

    lane: str
    depth: int
    beside: str
    temperature: float
    batch: int
    tokens: tuple[int, ...]
    passes: tuple[int, ...]
    steps: tuple[int, ...]
    seconds: tuple[float, ...]
    emitted: tuple[int, ...]
    first_seconds: tuple[float, ...]

    @staticmethod
    def of(answers: Sequence[VllmStepTimes], **place: Any) -> VllmRun:
        """Returns a run from a worker's answers, one per group. Raises InvalidRequest where nothing was decoded."""
        timed = [_undisturbed(answer.seconds) for answer in answers if answer.seconds]
        if not timed:
            raise InvalidRequest("no step had all sequences in it; give more max_tokens or a smaller batch")
        emitted = [count for answer in answers for count in answer.emitted]
        return VllmRun(
            tokens=tuple(len(text) - 1 for answer in answers for text in answer.tokens),
            passes=tuple(passes for answer in answers for passes in answer.passes),
            steps=tuple(len(seconds) for seconds in timed),
            seconds=tuple(sum(seconds) / len(seconds) for seconds in timed),
            emitted=tuple(emitted.count(size) for size in range(1, max(emitted) + 1)),
            first_seconds=tuple(answer.first_seconds for answer in answers),
            **place,
        )

    @staticmethod
    def read(record: Mapping[str, Any]) -> VllmRun:
        """Returns a run from JSON."""
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in record.items()}
        return VllmRun(**fields)

    @property
    def tokens_per_pass(self) -> float:
        """Emitted tokens over target passes."""
        return sum(self.tokens) / max(1, sum(self.passes))

    @property
    def step_seconds(self) -> float:
        """Mean seconds of a step."""
        return sum(n * s for n, s in zip(self.steps, self.seconds, strict=True)) / sum(self.steps)

    @property
    def tokens_width(self) -> float:
        """Half the relative width of the interval of tokens per pass. Infinite for one request."""
        return _width(self.tokens, self.passes)

    @property
    def seconds_width(self) -> float:
        """Half the relative width of the interval of a step's time. 0 for one group, which has no spread."""
        if len(self.steps) < 2:
            return 0.0
        return _width([n * s for n, s in zip(self.steps, self.seconds, strict=True)], self.steps)

    def within(self, depth: int) -> float:
        """Returns tokens per pass if every pass accepted at most ``depth`` draft tokens."""
        return sum(min(size, depth + 1) * count for size, count in enumerate(self.emitted, 1)) / sum(self.emitted)

    def to_dict(self) -> dict[str, Any]:
        """Returns the run for JSON."""
        return asdict(self)


def _undisturbed(seconds: Sequence[float]) -> list[float]:
    """Leaves out disturbed steps."""
    longest = _DISTURBED * median(seconds)
    return [each for each in seconds if each <= longest]


def _width(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    interval = ratio_interval(numerators, denominators, LEVEL)
    return (interval.high - interval.low) / 2 / interval.estimate
