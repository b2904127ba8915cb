"""An engine of known cost and acceptance: as waves on a clock of its own, and as a server that streams."""

import contextlib
import json
import math
import queue
import random
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tests.audit.endpoint.fake import QuietHandler, ThreadedServer, listening

from foretoken.probe.answers import Arrival, DraftCounts, Failed, ServerAnswer, summed
from foretoken.probe.workload import Wave

PROMPTS = tuple(f"prompt number {i}: " for i in range(24))


@dataclass(frozen=True)
class SimulatedEngine:
    """Seconds of a pass: base + row for every row + fixed and draft for every draft token if it drafts."""

    base: float = 0.020
    row: float = 0.0005
    fixed: float = 0.002
    draft: float = 0.002
    rate: float = 0.7
    spread: float = 0.1
    jitter: float = 0.02
    depth: int = 4
    one_token_chunks: bool = False
    batched: bool = False
    lies: float = 0.0
    told: bool = True

    def seconds(self, sequences: int, depth: int) -> float:
        own = self.fixed + self.draft * depth if depth else 0.0
        return self.base + self.row * sequences * (depth + 1) + own

    def tokens_per_pass(self, depth: int) -> float:
        rates = [min(0.99, max(0.0, self.rate + self.spread * z)) for z in (-1.2, -0.4, 0.4, 1.2)]
        passes = [1.0 / sum(rate**k for k in range(depth + 1)) for rate in rates]
        return 1.0 / (sum(passes) / len(passes))

    def speed(self, depth: int, sequences: int) -> float:
        """Tokens per second of all sequences."""
        tokens = self.tokens_per_pass(depth) if depth else 1.0
        return sequences * tokens / self.seconds(sequences, depth)

    def speedup(self, depth: int, sequences: int) -> float:
        return self.speed(depth, sequences) / self.speed(0, sequences)

    def accepted(self, prompt: str, depth: int, chance: random.Random) -> int:
        z = (-1.2, -0.4, 0.4, 1.2)[zlib.crc32(prompt.encode()) % 4]
        rate, count = min(0.99, max(0.0, self.rate + self.spread * z)), 0
        while count < depth and chance.random() < rate:
            count += 1
        return count


@dataclass
class SimulatedSender:
    """Stands in for ``WaveSender``."""

    engine: SimulatedEngine
    max_tokens: int
    fails_above: int = 10_000
    slots: int = 10_000
    others: float = 1.0
    sent: list[tuple[str, int]] = field(default_factory=list)

    def send(self, side: Any, prompts: Any, tag: str) -> Wave | Failed:
        self.sent.append((side.name, len(prompts)))
        if len(prompts) > self.fails_above:
            return Failed("429: slow down (tried 5 times)")
        depth = 0 if side.name == "plain" else next(iter(side.switch.values()), self.engine.depth)
        chance = random.Random(f"{side.name}/{tag}")
        clock = _Clock(self.engine, depth, self.max_tokens, prompts, chance, self.slots)
        answers = clock.run()
        counts = summed(answer.counts for answer in answers) if self.engine.told else None
        if counts is not None and depth and self.engine.lies:
            counts = replace(counts, accepted=counts.accepted * self.engine.lies)
        bare = tuple(replace(answer, counts=None) for answer in answers)
        return Wave(bare, counts, self.others * sum(answer.tokens for answer in answers))


@dataclass
class _Clock:
    engine: SimulatedEngine
    depth: int
    max_tokens: int
    prompts: Any
    chance: random.Random
    slots: int

    def run(self) -> list[ServerAnswer]:
        now, done = 0.05, dict[int, ServerAnswer]()
        waiting, active = list(range(len(self.prompts))), dict[int, list[Arrival]]()
        counts, emitted = {i: [0, 0, 0] for i in waiting}, dict.fromkeys(waiting, 1)
        while waiting or active:
            while waiting and len(active) < self.slots:
                active[waiting.pop(0)] = [Arrival(now, 1, 4)]
            now += self.engine.seconds(len(active), self.depth) * (1 + self.engine.jitter * self.chance.gauss(0, 1))
            for i in list(active):
                left = self.max_tokens - emitted[i]
                drafted = min(self.depth, left - 1)
                accepted = self.engine.accepted(self.prompts[i], drafted, self.chance)
                counts[i][0] += drafted
                counts[i][1] += accepted
                counts[i][2] += drafted > 0
                emitted[i] += accepted + 1
                self._arrive(active[i], now, accepted + 1)
                if left - accepted - 1 <= 0:
                    done[i] = self._answer(active.pop(i), counts[i], now)
        return [done[i] for i in sorted(done)]

    def _arrive(self, arrivals: list[Arrival], now: float, tokens: int) -> None:
        if self.engine.one_token_chunks:
            arrivals += [Arrival(now + 1e-5 * k, None, 4) for k in range(tokens)]
        else:
            arrivals.append(Arrival(now, tokens, 4 * tokens))

    def _answer(self, arrivals: list[Arrival], counts: list[int], now: float) -> ServerAnswer:
        if self.engine.batched:
            arrivals = [
                Arrival(chunk[-1].seconds, None, sum(one.characters for one in chunk))
                for chunk in (arrivals[i : i + 5] for i in range(0, len(arrivals), 5))
            ]
        if self.engine.one_token_chunks:
            arrivals = [arrival._replace(tokens=None) for arrival in arrivals]
        drafts = DraftCounts(float(counts[0]), float(counts[1]), float(counts[2]))
        total = self.max_tokens
        return ServerAnswer("x" * 4 * total, tokens=total, seconds=now, arrivals=tuple(arrivals), counts=drafts)


@dataclass
class StreamingBehaviour:
    """A server of a simulated engine. trouble: what happens to streams after ``healthy`` of them."""

    engine: SimulatedEngine = field(
        default_factory=lambda: SimulatedEngine(base=0.004, row=0.0001, fixed=0.0004, draft=0.0004)
    )
    trouble: str = ""
    healthy: int = 0
    owner: str = "vllm"
    seen: int = 0
    drafted: int = 0
    accepted: int = 0
    drafts: int = 0
    generated: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class _Sequence:
    prompt: str
    left: int
    depth: int
    out: queue.Queue[int]


class _Passes(threading.Thread):
    """Decodes all running sequences, one pass after the other."""

    def __init__(self, behaviour: StreamingBehaviour, speculative: bool) -> None:
        super().__init__(daemon=True)
        self.behaviour, self.depth = behaviour, behaviour.engine.depth if speculative else 0
        self.arriving: queue.Queue[_Sequence] = queue.Queue()
        self.ended = False
        self.chance = random.Random(7)

    def run(self) -> None:
        active = list[_Sequence]()
        while not self.ended:
            with contextlib.suppress(queue.Empty):
                if not active:
                    active.append(self._begun(self.arriving.get(timeout=0.02)))
                while True:
                    active.append(self._begun(self.arriving.get_nowait()))
            if active:
                time.sleep(self.behaviour.engine.seconds(len(active), max(each.depth for each in active)))
                active = [each for each in active if self._goes_on(each)]

    def _begun(self, each: _Sequence) -> _Sequence:
        time.sleep(0.001)
        self._emit(each, 1)
        return each

    def _goes_on(self, each: _Sequence) -> bool:
        drafted = min(each.depth, each.left - 1)
        accepted = self.behaviour.engine.accepted(each.prompt, drafted, self.chance)
        self.behaviour.drafted += drafted
        self.behaviour.accepted += accepted
        self.behaviour.drafts += drafted > 0
        self._emit(each, accepted + 1)
        if each.left <= 0:
            each.out.put(0)
        return each.left > 0

    def _emit(self, each: _Sequence, tokens: int) -> None:
        self.behaviour.generated += tokens
        each.left -= tokens
        each.out.put(tokens)


class _StreamHandler(QuietHandler):
    behaviour: StreamingBehaviour
    passes: _Passes

    def do_GET(self) -> None:
        behaviour = self.behaviour
        if self.path == "/v1/models":
            self.send(200, json.dumps({"data": [{"id": "sim", "owned_by": behaviour.owner}]}).encode())
        elif self.path == "/metrics" and behaviour.engine.told:
            told = {
                "spec_decode_num_drafts_total": behaviour.drafts,
                "spec_decode_num_draft_tokens_total": behaviour.drafted,
                "spec_decode_num_accepted_tokens_total": behaviour.accepted * (behaviour.engine.lies or 1),
                "generation_tokens_total": behaviour.generated,
            }
            if not self.passes.depth:
                told = {"generation_tokens_total": behaviour.generated}
            page = "".join(f'vllm:{name}{{engine="0"}} {value}\n' for name, value in told.items())
            self.send(200, page.encode())
        else:
            self.send(404, b"{}")

    def do_POST(self) -> None:
        behaviour = self.behaviour
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with behaviour.lock:
            behaviour.seen += 1
            number = behaviour.seen
        trouble = behaviour.trouble if number > behaviour.healthy else ""
        if self.troubled(trouble):
            return
        if trouble == "no streams" and body.get("stream"):
            self.send(400, b'{"error": {"message": "stream is not supported"}}')
            return
        limit, out = int(body["max_tokens"]), queue.Queue[int]()
        depth = int(body.get("speculative_tokens", self.passes.depth))
        self.passes.arriving.put(_Sequence(str(body["prompt"]), limit, depth, out))
        if not body.get("stream"):
            while out.get():
                pass
            choice = {"text": "x" * limit, "finish_reason": "length"}
            usage = {"completion_tokens": limit, "prompt_tokens": 5}
            self.send(200, json.dumps({"choices": [choice], "usage": usage}).encode())
            return
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        position = zlib.crc32(str(body["prompt"]).encode()) % 50
        while tokens := out.get():
            ids = [(position + k) % 50 for k in range(tokens)]
            position += tokens
            choice = {"text": "word " * tokens, "token_ids": ids, "prompt_token_ids": [1, 2, 3]}
            self._event({"choices": [choice]})
            if trouble == "closes":
                return
        self._event({"choices": [], "usage": {"completion_tokens": limit, "prompt_tokens": 5}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, value: Any) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
        self.wfile.flush()


@contextlib.contextmanager
def streaming(behaviour: StreamingBehaviour, speculative: bool = True) -> Iterator[str]:
    """Runs a server. Yields its address."""
    passes = _Passes(behaviour, speculative)
    handler = type("SimulatedHandler", (_StreamHandler,), {"behaviour": behaviour, "passes": passes})
    passes.start()
    try:
        with listening(ThreadedServer(("127.0.0.1", 0), handler)) as address:
            yield address
    finally:
        passes.ended = True


def close(one: float, other: float, within: float) -> bool:
    """Whether two positive figures differ by less than a share."""
    return abs(math.log(one / other)) < within
