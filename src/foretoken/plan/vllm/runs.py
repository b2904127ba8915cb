"""The runs that a plan for vLLM rests on: its processes, who takes turns with whom, what is asked."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from foretoken.bench.peers.protocol import PeerRequest, Setup
from foretoken.bench.peers.registry import BOOT, PEERS, folder
from foretoken.bench.peers.vllm_rounds import VllmStepTimes
from foretoken.bench.peers.worker import PeerError, PeerWorker
from foretoken.bench.setting import cores
from foretoken.core.errors import InvalidRequest
from foretoken.plan.vllm.planning import PLAIN, VllmCandidate, VllmRun

Say = Callable[[str, float], None]  # what is being done, and the share of the whole that is
_WARM = 8  # tokens of a question whose answer is not looked at


class PromptCompleter(Protocol):
    """Who completes prompts."""

    def rounds(self, question: PeerRequest) -> VllmStepTimes: ...

    def close(self) -> None: ...


class VllmProcess(PeerWorker):
    """A process of vLLM's. Raises PeerError."""

    def rounds(self, question: PeerRequest) -> VllmStepTimes:
        """Wake, complete, sleep."""
        return VllmStepTimes(**self._exchange(asdict(question)))


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What is measured, and where.

    target: a folder or a name that vLLM knows. python: of vLLM's environment, None for the one of ``make peers``.
    engine: further arguments of ``vllm.LLM``, such as tensor_parallel_size. alone: one process at a time, for targets
    of which the memory does not hold two; plain decoding is then measured once, before the others.
    """

    target: str
    temperatures: Sequence[float] = (0.0,)
    batches: Sequence[int] = (1,)
    max_tokens: int = 64
    python: Path | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False

    def command(self) -> list[str]:
        """Raises InvalidRequest where there is no such interpreter."""
        python = self.python or PEERS["vllm"].python
        if not python.exists():
            raise InvalidRequest(
                f"no vLLM at {python}; name the Python of its environment with --engine-python, or run `make peers`"
            )
        return [str(python), "-P", str(BOOT), "vllm_rounds"]

    def start(self, lane: VllmCandidate | None) -> PromptCompleter:
        """A process that speculates as ``lane`` says, deep enough for all its depths; None is plain."""
        engine = dict(self.engine)
        if lane is not None and lane.additional:
            engine["additional_config"] = {**engine.get("additional_config", {}), **lane.additional}
        config = lane.at(max(lane.depths)) if lane is not None else None
        options = (("speculative_config", json.dumps(config)), ("engine", json.dumps(engine)))
        name = lane.name if lane is not None else "plain"
        setup = Setup(
            "vllm", name, self.target, max_length=2048, batch=max(self.batches), threads=cores(), options=options
        )
        log = folder() / "logs" / f"plan-vllm-{re.sub(r'[^A-Za-z0-9]+', '-', name)}.log"
        return VllmProcess(self.command(), setup, log)


@dataclass(frozen=True, slots=True)
class Answers:
    """What one lane answered at one depth: ``rounds``, by group of prompts. The others: see ``VllmRun``."""

    lane: str
    depth: int
    beside: str
    temperature: float
    batch: int
    rounds: tuple[VllmStepTimes, ...]

    def run(self, groups: Sequence[int] | None = None) -> VllmRun:
        """Of these groups, all if None. Raises InvalidRequest where nothing was decoded."""
        chosen = self.rounds if groups is None else [self.rounds[i] for i in groups]
        return VllmRun.of(
            chosen, lane=self.lane, depth=self.depth, beside=self.beside, temperature=self.temperature, batch=self.batch
        )


def runs(
    bench: Bench,
    lanes: Sequence[VllmCandidate],
    prompts: Sequence[Sequence[int]],
    say: Say = lambda what, share: None,
    start: Callable[[VllmCandidate | None], PromptCompleter] | None = None,
    refused: Callable[[VllmCandidate, PeerError], None] | None = None,
) -> list[VllmRun]:
    """``answers``, summed up. Raises what it raises, and InvalidRequest where nothing was decoded."""
    return [each.run() for each in answers(bench, lanes, prompts, say, start, refused)]


def answers(
    bench: Bench,
    lanes: Sequence[VllmCandidate],
    prompts: Sequence[Sequence[int]],
    say: Say = lambda what, share: None,
    start: Callable[[VllmCandidate | None], PromptCompleter] | None = None,
    refused: Callable[[VllmCandidate, PeerError], None] | None = None,
) -> list[Answers]:
    """Every lane at its depths, and plain decoding beside each. start: makes a lane's process, ``bench.start`` if None.

    refused: told of a lane that vLLM does not load or run, and the others go on. Raises InvalidRequest; PeerError
    where plain decoding fails, and where any lane does and nobody is told.
    """
    if not prompts or not lanes:
        raise InvalidRequest("a plan needs a prompt and a way to speculate at least")
    begin = start or bench.start
    found: list[Answers] = []
    share = 1.0 / (2 * len(lanes) + 1)
    say("plain decoding: vLLM starts", 0.0)
    plain = begin(None)
    try:
        if bench.alone:
            found += _turns(bench, [(PLAIN, 0, plain)], PLAIN, prompts)
            plain.close()
        for number, lane in enumerate(lanes):
            done = (2 * number + 1) * share, (2 * number + 2) * share
            try:
                found += _beside(bench, lane, None if bench.alone else plain, prompts, (say, begin, done))
            except PeerError as error:
                if refused is None:
                    raise
                refused(lane, error)
    finally:
        plain.close()
    return found


def _beside(
    bench: Bench, lane: VllmCandidate, plain: PromptCompleter | None, prompts: Sequence[Sequence[int]],
    ways: tuple[Say, Callable[[VllmCandidate | None], PromptCompleter], tuple[float, float]],
) -> list[Answers]:  # fmt: skip
    """One lane's, in turns with ``plain``. ways: how to tell, how to start, and the shares that are done then."""
    say, begin, done = ways
    say(f"{lane.name}: vLLM starts", done[0])
    own = begin(lane)
    try:
        say(f"{lane.name}: short runs", done[1])
        seats = [(PLAIN, 0, plain)] if plain is not None else []
        seats += [(lane.name, depth, own) for depth in lane.depths]
        return _turns(bench, seats, lane.name, prompts)
    finally:
        own.close()


def _turns(
    bench: Bench, seats: Sequence[tuple[str, int, PromptCompleter]], beside: str, prompts: Sequence[Sequence[int]]
) -> list[Answers]:
    """All seats on every group of prompts, in another order each time."""
    found = []
    for temperature in bench.temperatures:
        for batch in bench.batches:
            heard: list[list[VllmStepTimes]] = [[] for _ in seats]
            groups = grouped(prompts, batch)
            for _, depth, asked in seats:
                asked.rounds(PeerRequest(groups[0], _WARM, temperature, depth))
            for _, depth, asked in seats:
                asked.rounds(PeerRequest([], 0, temperature, depth))  # whoever learns begins anew
            for turn, group in enumerate(groups):
                for i in range(len(seats)):
                    at = (i + turn) % len(seats)
                    _, depth, asked = seats[at]
                    heard[at].append(asked.rounds(PeerRequest(group, bench.max_tokens, temperature, depth)))
            for (lane, depth, _), own in zip(seats, heard, strict=True):
                found.append(Answers(lane, depth, beside, temperature, batch, tuple(own)))
    return found


def grouped(prompts: Sequence[Sequence[int]], batch: int) -> list[list[list[int]]]:
    """Groups of ``batch``; the last one is filled up with the first prompts."""
    count = -(-len(prompts) // batch) * batch
    filled = [list(prompts[i % len(prompts)]) for i in range(count)]
    return [filled[i : i + batch] for i in range(0, count, batch)]
