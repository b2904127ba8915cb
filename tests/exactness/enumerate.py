"""The exact law of what production code emits, by running it once for every outcome of its random draws.

``Branching`` stands in for ``Streams``. A draw takes one of its possible outcomes and remembers how many there
were; ``outcomes`` runs a function again and again, depth first, until every branch has been taken, and adds up
the probabilities. Nothing is sampled, so the result is exact up to the rounding of float64. A function may return the
``Rest`` of its run, whose branches then do not repeat the draws before it.

Independence is an assumption of the sum, so it is checked: an address (purpose, index, kind) that is asked twice
within one run would repeat a number, and raises ``AddressReused``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from torch import Tensor

from foretoken.core.streams import Purpose

T = TypeVar("T", bound=Hashable)
R = TypeVar("R")
Text = tuple[int, ...]
Law = dict[Text, float]
DecodeStep = Callable[[Text, "Branching"], "Text | Rest[Text]"]


class AddressReused(AssertionError):
    """One random number would have answered two questions."""


@dataclass
class Branching:
    """Streams whose every draw is a branch; ``script`` says which outcome each draw takes.

    position: where the round begins; private numbers of another position would come again in another round.
    """

    position: int | None = None
    script: list[int] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    probability: float = 1.0
    used: set[tuple[object, ...]] = field(default_factory=set)

    def private(self, purpose: Purpose, position: int) -> BranchingStream:
        if self.position is not None and position != self.position:
            raise AddressReused(f"numbers of position {position} in the round that begins at {self.position}")
        return BranchingStream(self, purpose, position)

    def shared(self, position: int) -> BranchingStream:
        return BranchingStream(self, Purpose.SHARED, position)

    def check_shared(self, before: int) -> None:
        """Shared noise of a position not yet reached would be used again in the next step."""
        for purpose, position, *_ in self.used:
            if purpose is Purpose.SHARED and position >= before:  # type: ignore[operator]
                raise AddressReused(f"shared noise of position {position} drawn in a round that ends at {before}")

    def branch(self, address: tuple[object, ...], options: list[tuple[int, float]]) -> int:
        """Take one of ``options``, pairs of value and probability; impossible ones are no branches."""
        if address in self.used:
            raise AddressReused(f"asked twice: purpose, position, index, kind = {address}")
        self.used.add(address)
        options = [(value, p) for value, p in options if p > 0.0]
        if not options:
            raise ValueError("a draw with no possible outcome")
        at = len(self.widths)
        if at == len(self.script):
            self.script.append(0)
        self.widths.append(len(options))
        value, p = options[self.script[at]]
        self.probability *= p
        return value

    def resumed(self, script: list[int]) -> Branching:
        """Returns streams that go on after the draws of these, with branches of their own."""
        return Branching(self.position, script, [], self.probability, set(self.used))


@dataclass(frozen=True)
class Rest(Generic[T]):
    """The remainder of a run: all its branches continue from the earlier draws."""

    run: Callable[[Branching], T]


@dataclass
class BranchingUniform:
    """One number of which it is known that it lies from ``low`` up to ``high``; each answer branches within that."""

    streams: Branching
    address: tuple[object, ...]
    low: float = 0.0
    high: float = 1.0
    asked: int = 0

    def below(self, p: float) -> bool:
        if not 0.0 <= p <= 1.0:
            raise AssertionError(f"below({p}) is no probability")
        share = min(1.0, max(0.0, (p - self.low) / (self.high - self.low)))
        self.asked += 1
        result = bool(self.streams.branch((*self.address, self.asked), [(1, share), (0, 1.0 - share)]))
        self.low, self.high = (self.low, min(p, self.high)) if result else (max(p, self.low), self.high)
        return result


@dataclass(frozen=True)
class BranchingStream:
    """One purpose's draws; the interface of ``foretoken.core.streams.Stream``."""

    streams: Branching
    purpose: Purpose
    position: int

    def bernoulli(self, p: float, index: int) -> bool:
        if not 0.0 <= p <= 1.0:
            raise AssertionError(f"bernoulli({p}) is no probability")
        return bool(self.streams.branch(self._address(index, "bernoulli"), [(1, p), (0, 1.0 - p)]))

    def uniform(self, index: int) -> BranchingUniform:
        address = self._address(index, "bernoulli")
        self.streams.branch(address, [(0, 1.0)])  # in use: no other draw may have this number
        return BranchingUniform(self.streams, address)

    def categorical(self, weights: Tensor, index: int) -> int:
        return self.streams.branch(self._address(index, "categorical"), _options(weights))

    def _address(self, index: int, kind: str) -> tuple[object, ...]:
        if self.purpose is Purpose.SHARED:  # shared noise is addressed by where the token goes
            return (self.purpose, self.position + index, kind)
        return (self.purpose, self.position, index, kind)


def _options(weights: Tensor) -> list[tuple[int, float]]:
    values = weights.tolist()
    total = sum(values)
    if any(value < 0 for value in values) or not total > 0:
        raise ValueError(f"weights must be non-negative with a positive sum, got {values}")
    return [(token, value / total) for token, value in enumerate(values)]


def outcomes(run: Callable[[Branching], T | Rest[T]], position: int | None = None) -> dict[T, float]:
    """The law of ``run``'s result under all of its draws; it may use the private numbers of ``position`` only."""
    law: dict[T, float] = defaultdict(float)
    for result, streams in _branches(run, partial(Branching, position)):
        if isinstance(result, Rest):
            for outcome, ended in _branches(result.run, streams.resumed):
                law[outcome] += ended.probability
        else:
            law[result] += streams.probability
    return dict(law)


def _branches(run: Callable[[Branching], R], start: Callable[[list[int]], Branching]) -> Iterator[tuple[R, Branching]]:
    """Yields the result of every branch and the streams behind it."""
    script: list[int] = []
    while True:
        streams = start(script)
        yield run(streams), streams
        while script and script[-1] + 1 == streams.widths[len(script) - 1]:
            script.pop()
        if not script:
            return
        script[-1] += 1


def exact_law(emit: DecodeStep, length: int, ended: Callable[[Text], bool] = lambda text: False) -> Law:
    """The law of the first ``length`` tokens when ``emit(text so far, streams)`` is called until they are there.

    A text for which ``ended`` is true is not continued. Steps are independent given the text so far, since
    their numbers are addressed by its length; so the rounds after equal texts are enumerated once.
    """
    open_texts: dict[int, Law] = defaultdict(lambda: defaultdict(float))
    open_texts[0][()] = 1.0
    done: Law = defaultdict(float)

    def checked(text: Text, streams: Branching) -> Text | Rest[Text]:
        emitted = emit(text, streams)
        if isinstance(emitted, Rest):
            return Rest(lambda rest: check(text, emitted.run(rest), rest))
        return check(text, emitted, streams)

    def check(text: Text, emitted: Text, streams: Branching) -> Text:
        if not ended((text + emitted)[:length]):
            streams.check_shared(before=len(text) + len(emitted))
        return emitted

    for reached in range(length):
        for text, p in open_texts[reached].items():
            for emitted, q in outcomes(partial(checked, text), position=reached).items():
                if not emitted:
                    raise AssertionError(f"a round after {text} emitted nothing")
                longer = (text + emitted)[:length]
                if len(longer) == length or ended(longer):
                    done[longer] += p * q
                else:
                    open_texts[len(longer)][longer] += p * q
    return dict(done)


def autoregressive_law(
    row: Callable[[Text], Tensor], length: int, ended: Callable[[Text], bool] = lambda text: False
) -> Law:
    """The law of plain decoding: the product of ``row(text so far)``, each [V], normalized."""
    law: Law = {(): 1.0}
    for _ in range(length):
        longer: Law = {}
        for text, p in law.items():
            if text and ended(text):
                longer[text] = p
                continue
            values = row(text).double()
            for token, q in enumerate((values / values.sum()).tolist()):
                if q > 0.0:
                    longer[(*text, token)] = p * q
        law = longer
    return law


def total_variation(a: Mapping[Text, float], b: Mapping[Text, float]) -> float:
    """Half the sum of absolute differences; a law whose mass is not 1 also counts as wrong."""
    return 0.5 * sum(abs(a.get(k, 0.0) - b.get(k, 0.0)) for k in a.keys() | b.keys())
