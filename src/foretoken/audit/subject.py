"""The interface of an audited implementation, and the task that every check of it receives.

An implementation completes prompts with and without speculation, and has its target's logits. The result of an audit is
an outcome, figures and one line of evidence per check.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from time import monotonic
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from foretoken.core.context import Exactness
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import random_seed_from

Ids = Sequence[int]
NOISE_TOKENS = 32  # of each prompt whose logits are compared


@dataclass(frozen=True, slots=True)
class CompletionSettings:
    """Settings of completions."""

    law: SamplingLaw  # the sampling parameters
    max_tokens: int  # per completion
    seeds: tuple[int, ...]  # one per prompt
    depth: int | None = None  # draft tokens per step; 0 is plain decoding, None leaves it to the subject's controller
    grade: Exactness = Exactness.DISTRIBUTION  # the exactness grade that is requested
    ends: tuple[int, ...] = ()  # token ids that end a completion
    batch: int = 16  # sequences that run at once
    keep: bool = False  # also return the logits that each token was sampled from


@dataclass(frozen=True, slots=True)
class AuditStep:
    """One decode step of a completion.

    q: [V], the distribution of the first draft token (one-hot for a fixed candidate). None if it is unknown or where
    drafting and verification shared random numbers.
    """

    position: int  # tokens generated before the step
    drafted: int  # depth of the draft
    whole: bool  # whether a path of that depth was accepted
    q: Tensor | None = None


@dataclass(frozen=True, slots=True)
class AuditedCompletion:
    """One completion. steps: empty where they are not visible. rows: logits [n, V] as computed while decoding."""

    tokens: tuple[int, ...]
    steps: tuple[AuditStep, ...] = ()
    rows: Tensor | None = None


class Audited(Protocol):
    """An implementation of speculative decoding, and its target's plain forward pass as the reference.

    Attributes:
        bit_equal: Whether its logits are batch-invariant.
        batch: Number of sequences that it can complete at once.
        seeded: Whether it has the trajectory grade: one text per seed.
        open: Whether its decode steps are visible.
        depth: Draft tokens per step to request, None if that cannot be requested.
        ends: End-of-sequence token ids.
    """

    bit_equal: bool
    batch: int
    seeded: bool
    open: bool
    depth: int | None
    ends: tuple[int, ...]

    @property
    def facts(self) -> Mapping[str, Any]:
        """The audited engine and models, for the report."""

    @property
    def encode(self) -> Callable[[str], Sequence[int]]:
        """Converts a text to token ids."""

    def law(self, temperature: float) -> SamplingLaw:
        """Returns the distribution that it promises at ``temperature``, with its default filters."""

    def generate(self, prompts: Sequence[Ids], settings: CompletionSettings) -> list[AuditedCompletion]:
        """Returns one completion per prompt."""

    def logits(self, prompt: Ids, text: Ids) -> Tensor:
        """Returns logits [n, V] of ``text`` [n] after ``prompt``, from one forward pass of the target."""

    def reference(self, prompt: Ids, text: Ids, law: SamplingLaw) -> Tensor | None:
        """Returns the draft's distributions [n, V] along ``text``, None if ``AuditStep.q`` has them or none exist."""

    def planted(self) -> "Mapping[str, Audited]":
        """Returns copies with a planted error, by description. The audit must find each of them."""

    def self_drafting(self) -> "Audited | None":
        """Returns the subject with its target as its own draft, None if that is impossible."""

    def in_float32(self) -> "Audited | None":
        """Returns the subject in float32, None if it is already or if that is impossible."""


class AuditSpeed(NamedTuple):
    """Seconds that a completion of ``NOISE_TOKENS`` takes, and the computation of its exact distributions."""

    completion: float = 0.0
    distributions: float = 0.0


@dataclass(frozen=True, slots=True)
class AuditTask:
    """Inputs of a check."""

    subject: Audited  # the audited implementation
    prompts: tuple[Ids, ...]  # token ids
    temperature: float
    seed: int  # all seeds of the audit are derived from it
    level: float  # significance level of one check
    deadline: float  # by time.monotonic; a check runs one portion at least, whose size ``fitting`` bounds
    noise: float = 0.0  # largest difference between logits of two passes, 0 where passes are batch-invariant
    tick: Callable[[], None] = field(default=lambda: None)  # called after every portion
    speed: AuditSpeed = field(default_factory=AuditSpeed)  # by which portions are bounded

    def fitting(self, max_texts: int, completions: int, distributions: int = 0) -> int:
        """Returns the number of texts, from 1 to ``max_texts``, that can be checked before the deadline.

        Each text takes that many completions of ``NOISE_TOKENS``, and computations of exact distributions (0 or 1).
        """
        seconds = completions * self.speed.completion + distributions * self.speed.distributions
        return max(1, min(max_texts, int((self.deadline - monotonic()) / seconds))) if seconds > 0.0 else max_texts

    def portions(self, max_portions: int) -> Iterator[int]:
        """Yields 0, 1, 2, ... until the deadline, at most ``max_portions`` of them."""
        for index in range(max_portions):
            if index and monotonic() >= self.deadline:
                return
            yield index
            self.tick()

    def turn(self, portion: int, size: int) -> tuple[Ids, ...]:
        """Returns the ``size`` prompts of a portion. Prompts are cycled."""
        return tuple(self.prompts[(portion * size + i) % len(self.prompts)] for i in range(size))

    def seeds(self, purpose: int, portion: int, size: int) -> tuple[int, ...]:
        """Returns one seed per prompt of a portion, from 0 to ``MAX_SEED``. No two checks share any."""
        return tuple(random_seed_from(self.seed, purpose, portion, i) >> 1 for i in range(size))


def noise(subject: Audited, prompts: Sequence[Ids]) -> float:
    """Returns the largest difference of a logit between decoding and one forward pass over the same text."""
    if subject.bit_equal:
        return 0.0
    settings = CompletionSettings(subject.law(0.0), NOISE_TOKENS, (0,) * len(prompts), batch=subject.batch, keep=True)
    largest = 0.0
    for prompt, text in zip(prompts, subject.generate(prompts, settings), strict=True):
        if text.rows is not None:
            largest = max(largest, float((text.rows - subject.logits(prompt, text.tokens).float()).abs().max()))
    return largest


class CheckOutcome(StrEnum):
    """The outcome of one check, or of the whole audit."""

    PASSED = "passed"
    FAILED = "failed"
    INCONCLUSIVE = "inconclusive"  # no error was found, and the data are too few to find one
    SKIPPED = "skipped"  # does not apply


@dataclass(frozen=True, slots=True)
class Check:
    """One check. numbers: its figures, JSON-serializable. evidence: one line for people. seconds: its duration."""

    name: str
    outcome: CheckOutcome
    evidence: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Audit:
    """The verdict on one implementation. subject: what was audited, with its settings."""

    subject: Mapping[str, Any]
    checks: tuple[Check, ...]
    seconds: float

    @property
    def outcome(self) -> CheckOutcome:
        """Failed if any check failed; passed if none is inconclusive and the planted errors were found."""
        outcomes = {check.outcome for check in self.checks}
        if CheckOutcome.FAILED in outcomes:
            return CheckOutcome.FAILED
        controlled = any(c.name == CONTROL and c.outcome is CheckOutcome.PASSED for c in self.checks)
        return (
            CheckOutcome.INCONCLUSIVE
            if CheckOutcome.INCONCLUSIVE in outcomes or not controlled
            else CheckOutcome.PASSED
        )

    @property
    def summary(self) -> str:
        """The verdict in one sentence."""
        named = {
            outcome: ", ".join(check.name for check in self.checks if check.outcome is outcome)
            for outcome in CheckOutcome
        }
        match self.outcome:
            case CheckOutcome.FAILED:
                return f"not exact: {named[CheckOutcome.FAILED]} failed"
            case CheckOutcome.INCONCLUSIVE:
                doubtful = named[CheckOutcome.INCONCLUSIVE] or f"{CONTROL} (not run)"
                return f"no error was found, but not enough was seen: {doubtful} inconclusive"
            case _:
                ran = sum(check.outcome is CheckOutcome.PASSED for check in self.checks)
                return f"no error found by {ran} checks, which did find the errors planted to test them"

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-serializable dictionary, ``outcome`` and ``summary`` included."""
        checks = [asdict(check) | {"outcome": str(check.outcome)} for check in self.checks]
        return {
            "outcome": str(self.outcome),
            "summary": self.summary,
            "seconds": self.seconds,
            "subject": dict(self.subject),
            "checks": checks,
        }


CONTROL = "negative control"
