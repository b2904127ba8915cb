"""Whoever is audited: texts with and without speculation, and the rows of one plain pass of the target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from foretoken.core.context import Exactness
from foretoken.core.sampling import SamplingLaw

Ids = Sequence[int]


@dataclass(frozen=True, slots=True)
class Ask:
    """How to complete prompts.

    seeds: one for each prompt; the same seed, the same text.
    depth: drafted tokens a round, 0 plain decoding, None what its own controller says.
    ends: tokens after which a text is over. batch: sequences at once. keep: also return the rows tokens came from.
    """

    law: SamplingLaw
    max_tokens: int
    seeds: tuple[int, ...]
    depth: int | None = None
    grade: Exactness = Exactness.DISTRIBUTION
    ends: tuple[int, ...] = ()
    batch: int = 16
    keep: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a text.

    position: tokens before it. drafted: the draft's depth. whole: it was accepted down to that depth.
    q: [V], the law its first token was drafted by (a fixed candidate's is one-hot), where that is known and was made
    with other random numbers than the verdict.
    """

    position: int
    drafted: int
    whole: bool
    q: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """One completion. rounds: empty where they cannot be seen. rows: [n, V] logits, as the pass had them."""

    tokens: tuple[int, ...]
    rounds: tuple[Round, ...] = ()
    rows: Tensor | None = None


class Audited(Protocol):
    """An implementation of speculative decoding, and its own target's plain pass to hold it to.

    bit_equal: it promises that no row's logits depend on what shares its pass.
    batch: sequences it can complete at once. seeded: it has the trajectory grade. open: its rounds can be seen.
    depth: drafted tokens a round to ask for where drafting is wanted, None where that cannot be asked for.
    facts: what is audited, for the report. encode: text to token ids. ends: end-of-sequence tokens.
    """

    bit_equal: bool
    batch: int
    seeded: bool
    open: bool
    depth: int | None
    ends: tuple[int, ...]

    @property
    def facts(self) -> Mapping[str, Any]: ...

    @property
    def encode(self) -> Callable[[str], Sequence[int]]: ...

    def law(self, temperature: float) -> SamplingLaw:
        """The law it promises at ``temperature``, with its default filters."""
        ...

    def generate(self, prompts: Sequence[Ids], ask: Ask) -> list[Text]:
        """One completion for each prompt."""
        ...

    def logits(self, prompt: Ids, text: Ids) -> Tensor:
        """[n, V]: of ``text`` [n] after ``prompt``, in one plain pass of the target."""
        ...

    def reference(self, prompt: Ids, text: Ids, law: SamplingLaw) -> Tensor | None:
        """[n, V]: the law a draft would have along ``text``; None where ``Round.q`` tells it, or nothing."""
        ...

    def planted(self) -> Mapping[str, Audited]:
        """The same, with an error: what the test must find."""
        ...

    def self_drafting(self) -> Audited | None:
        """The same target as its own draft."""
        ...

    def in_float32(self) -> Audited | None:
        """The same in float32; None where it is, or where that cannot be had."""
        ...
