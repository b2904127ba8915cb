"""The program of a drafting worker: ``python -m foretoken.engine.drafting``, a thread, or a Ray actor.

It receives the names and folders of what to load, and then the events of the sequences (``propose.ahead``). A proposer
that needs more of the target than its text cannot be loaded here, because there is no target.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.models.base import Handle, Model, Scores
from foretoken.models.formats.checkpoint import load_tokenizer, resolve
from foretoken.models.loading import load_model
from foretoken.models.resumable import Resumable
from foretoken.propose.ahead import DraftingWorker
from foretoken.propose.base import Needs, Proposer
from foretoken.propose.transports import PipeEndpoint, QueueEndpoint, WorkerEndpoint
from foretoken.propose.wire import WorkerError, encode
from foretoken.speculation import Builder


class RemoteTarget(Model):
    """Stand-in for the target in a drafting worker: its vocabulary size and the length of its encoder."""

    def __init__(self, vocab_size: int, source_length: int) -> None:
        self.vocab_size, self.source_length = vocab_size, source_length

    def open(
        self,
        prompt: Sequence[int],
        source: Sequence[int] = (),
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> Handle:
        self._absent()

    def score(self, handles: Sequence[Handle], drafts: Sequence[Draft], taps: Sequence[int] = ()) -> list[Scores]:
        self._absent()

    def commit(self, handles: Sequence[Handle], tokens: Sequence[Sequence[int]]) -> None:
        self._absent()

    def close(self, handle: Handle) -> None:
        self._absent()

    def __getattr__(self, name: str) -> NoReturn:
        self._absent()

    def _absent(self) -> NoReturn:
        raise InvalidRequest(
            "a remote member drafts from the text alone, such as 'draft_model' and 'vocabulary'; this one needs the "
            "target itself, so let it draft beside it"
        )


def drafter(line: WorkerEndpoint, order: Mapping[str, Any]) -> DraftingWorker:
    """Loads the proposer that ``order`` describes (see ``propose.remote``). Raises InvalidRequest or ModelLoadError."""
    if order["threads"] is not None:
        torch.set_num_threads(order["threads"])
    models: list[Resumable] = []

    def load(name: str | Path) -> Model:
        model = load_model(resolve(name), dtype=order["dtype"], device=order["device"], backend=order["backend"])
        models.append(Resumable(model))
        return models[-1]

    folder = Path(order["tokenizer"])
    target = RemoteTarget(order["vocab_size"], order["source_length"])
    builder = Builder(target, load_tokenizer(folder), folder, load)
    proposer = builder.member(order["member"])
    if proposer.needs != Needs() or type(proposer) is Proposer:
        raise InvalidRequest(
            f"method {order['member'].get('method')!r} cannot be a remote member: it learns from the target's rows or "
            "drafts nothing; take 'draft_model' or another that needs the text alone"
        )
    return DraftingWorker(proposer, line, order["ahead"], models)


def serve(line: WorkerEndpoint, order: Mapping[str, Any]) -> None:
    """Loads the proposer and drafts until the engine disconnects. Errors of loading are sent to the engine."""
    try:
        worker = drafter(line, order)
    except Exception as error:
        line.reply(encode(WorkerError(type(error).__name__, str(error))))
        return
    worker.run()


class Host:
    """A drafting worker as a Ray actor."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        self._line = QueueEndpoint()
        threading.Thread(target=self._run, args=(order,), name="foretoken-drafting", daemon=True).start()

    def send(self, message: bytes) -> None:
        """Sends a message to the worker."""
        self._line.incoming.put(message)

    def receive(self) -> bytes | None:
        """Waits for the worker's next message and returns it; None when the worker has ended."""
        return self._line.outgoing.get()

    def _run(self, order: Mapping[str, Any]) -> None:
        try:
            serve(self._line, order)
        finally:
            self._line.outgoing.put(None)


def main(descriptor: int) -> None:
    """Runs a drafting worker in this process. descriptor: its connection to the engine, which ends the worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is sent to the whole process group
    line = PipeEndpoint(descriptor)
    serve(line, json.loads(line.wait()))


if __name__ == "__main__":
    main(int(sys.argv[1]))
