"""Runs of vLLM for a plan: its processes, the order in which they alternate, and their requests."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from foretoken.bench.peers.protocol import PeerRequest, Setup
from foretoken.bench.peers.registry import BOOT, PEERS, folder
from foretoken.bench.peers.vllm_steps import VllmStepTimes
from foretoken.bench.peers.worker import PeerError, PeerWorker
from foretoken.bench.setting import cores
from foretoken.core.errors import InvalidRequest
from foretoken.plan.vllm.measured import PLAIN, VllmCandidate, VllmRun

Say = Callable[[str, float], None]
"""Reports progress: what is being done, and the share of the whole that is done."""
_WARM_UP = 8  # tokens of a warm-up request


class PromptCompleter(Protocol):
    """Completes prompts and times the steps."""

    def complete(self, request: PeerRequest) -> VllmStepTimes:
        """Completes the request's prompts. Returns the tokens and the times of the steps."""
        ...

    def close(self) -> None:
        """Ends the process."""
        ...


StartProcess = Callable[[VllmCandidate | None], PromptCompleter]
"""Starts the process of a lane, None for plain decoding."""


class VllmProcess(PeerWorker):
    """A process of vLLM. Raises PeerError."""

    def complete(self, request: PeerRequest) -> VllmStepTimes:
        """Wakes the process, completes the prompts, and lets it sleep."""
        return VllmStepTimes(**self._exchange(asdict(request)))


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Settings of the measurement.

    Args:
        target: A folder, or a name that vLLM knows.
        temperatures: Sampling temperatures.
        batches: Numbers of sequences at once.
        max_tokens: Greatest number of tokens per request.
        python: Interpreter of vLLM's environment, None for the one of ``make peers``.
        engine: Further arguments of ``vllm.LLM``, such as tensor_parallel_size.
        alone: One process at a time, for targets too large to load twice. Plain decoding is then measured once, before
            the others.
    """

    target: str
    temperatures: Sequence[float] = (0.0,)
    batches: Sequence[int] = (1,)
    max_tokens: int = 64
    python: Path | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False

    def command(self) -> list[str]:
        """Returns the command of a worker. Raises InvalidRequest if the interpreter does not exist."""
        python = self.python or PEERS["vllm"].python
        if not python.exists():
            raise InvalidRequest(
                f"no vLLM at {python}; name the Python of its environment with --engine-python, or run `make peers`"
            )
        return [str(python), "-P", str(BOOT), "vllm_steps"]

    def start(self, lane: VllmCandidate | None) -> PromptCompleter:
        """Starts a process for all draft lengths of ``lane``, None for plain decoding."""
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
    """Answers of one lane at one draft length. Fields but ``groups`` as in ``VllmRun``.

    Args:
        groups: One answer per group of prompts.
    """

    lane: str
    depth: int
    beside: str
    temperature: float
    batch: int
    groups: tuple[VllmStepTimes, ...]

    def run(self, groups: Sequence[int] | None = None) -> VllmRun:
        """Returns the run over these groups, None for all. Raises InvalidRequest where nothing was decoded."""
        chosen = self.groups if groups is None else [self.groups[i] for i in groups]
        return VllmRun.of(
            chosen, lane=self.lane, depth=self.depth, beside=self.beside, temperature=self.temperature, batch=self.batch
        )


def runs(
    bench: Bench,
    lanes: Sequence[VllmCandidate],
    prompts: Sequence[Sequence[int]],
    say: Say = lambda what, share: None,
    start: StartProcess | None = None,
    refused: Callable[[VllmCandidate, PeerError], None] | None = None,
) -> list[VllmRun]:
    """As ``answers``, summed up. Also raises InvalidRequest where nothing was decoded."""
    return [each.run() for each in answers(bench, lanes, prompts, say, start, refused)]


def answers(
    bench: Bench,
    lanes: Sequence[VllmCandidate],
    prompts: Sequence[Sequence[int]],
    say: Say = lambda what, share: None,
    start: StartProcess | None = None,
    refused: Callable[[VllmCandidate, PeerError], None] | None = None,
) -> list[Answers]:
    """Runs every lane at its draft lengths, each beside plain decoding.

    Args:
        bench: Settings of the measurement.
        lanes: Candidates.
        prompts: Token ids.
        say: Reports progress.
        start: Starts the process of a lane. None is ``bench.start``.
        refused: Called with a lane that vLLM fails to load or run. The others continue.

    Raises:
        InvalidRequest: There are no prompts or lanes.
        PeerError: Plain decoding fails, or a lane does and ``refused`` is None.
    """
    if not prompts or not lanes:
        raise InvalidRequest("a plan needs a prompt and a way to speculate at least")
    session = _Session(bench, prompts, say, start or bench.start)
    result: list[Answers] = []
    share = 1.0 / (2 * len(lanes) + 1)
    say("plain decoding: vLLM starts", 0.0)
    plain = session.start(None)
    try:
        if bench.alone:
            result += session.alternate([(PLAIN, 0, plain)], PLAIN)
            plain.close()
        for number, lane in enumerate(lanes):
            shares = (2 * number + 1) * share, (2 * number + 2) * share
            try:
                result += session.measure(lane, None if bench.alone else plain, shares)
            except PeerError as error:
                if refused is None:
                    raise
                refused(lane, error)
    finally:
        plain.close()
    return result


@dataclass(frozen=True)
class _Session:
    """Everything that the lanes of a plan share."""

    bench: Bench
    prompts: Sequence[Sequence[int]]
    say: Say
    start: StartProcess

    def measure(self, lane: VllmCandidate, plain: PromptCompleter | None, shares: tuple[float, float]) -> list[Answers]:
        """Runs one lane, alternating with ``plain``. shares: progress when its process starts, and when it runs."""
        self.say(f"{lane.name}: vLLM starts", shares[0])
        own = self.start(lane)
        try:
            self.say(f"{lane.name}: short runs", shares[1])
            places = [(PLAIN, 0, plain)] if plain is not None else []
            places += [(lane.name, depth, own) for depth in lane.depths]
            return self.alternate(places, lane.name)
        finally:
            own.close()

    def alternate(self, places: Sequence[tuple[str, int, PromptCompleter]], beside: str) -> list[Answers]:
        """Runs all places (lane, draft length, process) on every group of prompts, in rotating order."""
        result = []
        for temperature in self.bench.temperatures:
            for batch in self.bench.batches:
                groups = grouped(self.prompts, batch)
                for _, depth, process in places:
                    process.complete(PeerRequest(groups[0], _WARM_UP, temperature, depth))
                for _, depth, process in places:  # a request without prompts resets proposers that learn
                    process.complete(PeerRequest([], 0, temperature, depth))
                completed = self._completed(places, groups, temperature)
                for (lane, depth, _), own in zip(places, completed, strict=True):
                    result.append(Answers(lane, depth, beside, temperature, batch, tuple(own)))
        return result

    def _completed(
        self, places: Sequence[tuple[str, int, PromptCompleter]], groups: Sequence[list[list[int]]], temperature: float
    ) -> list[list[VllmStepTimes]]:
        """Returns the answers of each place."""
        result: list[list[VllmStepTimes]] = [[] for _ in places]
        for turn, group in enumerate(groups):
            for i in range(len(places)):
                at = (i + turn) % len(places)
                _, depth, process = places[at]
                request = PeerRequest(group, self.bench.max_tokens, temperature, depth)
                result[at].append(process.complete(request))
        return result


def grouped(prompts: Sequence[Sequence[int]], batch: int) -> list[list[list[int]]]:
    """Returns groups of ``batch`` prompts. The last one is filled up with the first prompts."""
    count = -(-len(prompts) // batch) * batch
    filled = [list(prompts[i % len(prompts)]) for i in range(count)]
    return [filled[i : i + batch] for i in range(0, count, batch)]
