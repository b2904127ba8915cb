"""The interface of an audited implementation: completions with and without speculation, and the target's logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from foretoken.core.context import Exactness
from foretoken.core.sampling import SamplingLaw

Ids = Sequence[int]


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

    def planted(self) -> Mapping[str, Audited]:
        """Returns copies with a planted error, by description. The audit must find each of them."""

    def self_drafting(self) -> Audited | None:
        """Returns the subject with its target as its own draft, None if that is impossible."""

    def in_float32(self) -> Audited | None:
        """Returns the subject in float32, None if it is already or if that is impossible."""
