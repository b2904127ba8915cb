"""Engines in a process each, audited like servers: vLLM's ``LLM`` and OpenVINO GenAI's ``LLMPipeline``.

A worker in the engine's environment (``bench/peers``) takes the bodies of ``/v1/completions`` and answers as a server
would. Requests that are sent at once are one batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter

from foretoken.bench.output import cores
from foretoken.bench.peers import export
from foretoken.bench.peers.protocol import Setup
from foretoken.bench.peers.registry import PEERS
from foretoken.bench.peers.worker import PeerError, PeerWorker, start
from foretoken.core.errors import InvalidRequest
from foretoken.models.formats.checkpoint import resolve
from foretoken.probe.answers import Failed, Refused, Reply, answer_of
from foretoken.probe.client import Ask, EndpointClient
from foretoken.probe.server import DIALECTS, NEUTRAL, Dialect, ServerKind, Side
from foretoken.speculation import SpeculativeConfig

_NO_STREAM = frozenset({"stream"})  # a generation is complete when it comes back
ENGINES: Mapping[str, Dialect] = {
    "vllm": replace(DIALECTS[ServerKind.VLLM], unknown=_NO_STREAM),
    "openvino": Dialect("openvino", NEUTRAL, unknown=_NO_STREAM | {"bad_words", "logit_bias", "logprobs"}),
}

Completer = Callable[[Sequence[Mapping[str, object]]], list[dict[str, object]]]
"""Returns the answers to requests that are completed at once. Raises PeerError."""


@dataclass(slots=True)
class EngineClient(EndpointClient):
    """An engine's process in the place of a server."""

    complete: Completer = field(default=lambda bodies: [])

    def __post_init__(self) -> None:
        return  # the name is no address

    def post(self, path: str, asks: Sequence[Ask], concurrency: int) -> list[Reply]:
        """Completes requests, ``concurrency`` in a batch. path: only ``completions`` are answered."""
        if path != "completions":
            return [Refused(f"404: {self.url} has no {path}") for _ in asks]
        size = max(1, concurrency)
        batches = (asks[start : start + size] for start in range(0, len(asks), size))
        return [reply for batch in batches for reply in self._batch(batch)]

    def get(self, path: str, body: Mapping[str, object] | None = None) -> str:
        """Returns "": an engine has no pages."""
        return ""

    def _batch(self, asks: Sequence[Ask]) -> list[Reply]:
        started = perf_counter()
        try:
            answers = self.complete([ask.body for ask in asks])
        except PeerError as error:
            return [Failed(str(error)) for _ in asks]
        seconds = perf_counter() - started
        self.spent.requests += len(asks)
        return [self._answered(answer, ask, seconds) for answer, ask in zip(answers, asks, strict=True)]

    def _answered(self, answer: Mapping[str, object], ask: Ask, seconds: float) -> Reply:
        self.tick()
        if "error" in answer:
            return Refused(f"400: {' '.join(str(answer['error']).split())[:200]}")
        reply = answer_of(answer, ask.top, seconds)
        self.spent.add(reply)
        return reply


@dataclass(frozen=True)
class EnginePair:
    """The processes of an engine with speculation and without it. name: "vllm" or "openvino". model: the target."""

    name: str
    model: str
    plain: PeerWorker
    speculative: PeerWorker

    @property
    def version(self) -> str:
        return self.plain.version

    @property
    def checkpoint(self) -> str | None:
        """The checkpoint to compute the target's distribution from, None if the engine reports it."""
        return None if ENGINES[self.name].scores else self.model

    def sides(self) -> list[Side]:
        """Returns the plain and the speculative side."""
        title, dialect = f"{self.name} {self.version}", ENGINES[self.name]
        return [
            Side(name, EngineClient(f"{title}, {name}", complete=process.complete), self.model, dialect)
            for name, process in (("plain", self.plain), ("speculative", self.speculative))
        ]


@contextmanager
def started(name: str, model: str | Path, config: SpeculativeConfig) -> Iterator[EnginePair]:
    """Runs both processes of an engine within the ``with`` block. name: Of ``ENGINES``.

    Raises:
        InvalidRequest: The engine is not set up, or does not have the method.
        ModelLoadError: A checkpoint cannot be converted for the engine.
        PeerError: The engine cannot load them.
    """
    peer, method = PEERS[name], config.method_in_force
    methods = [each for each in peer.methods if name != "openvino" or each == "draft_model"]
    if method not in methods or (method == "draft_model" and config.model is None):
        raise InvalidRequest(f"{name} is audited with {' or '.join(methods)}, not with {method!r}; name one")
    if peer.missing is not None:
        raise InvalidRequest(f"{name} is not set up ({peer.missing} is missing); `make peers` does it")
    convert = export.openvino if name == "openvino" else Path
    target, draft = resolve(model), str(convert(resolve(config.model))) if config.model else ""
    plain = Setup(name, "plain", str(convert(target)), threads=cores())
    speculative = replace(plain, method=method, draft=draft, depth=config.tokens)
    with ExitStack() as stack:
        yield EnginePair(
            name, str(target), *(stack.enter_context(closing(start(each, api=True))) for each in (plain, speculative))
        )
