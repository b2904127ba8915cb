"""The program of a drafting worker: ``python -m foretoken.engine.drafting``, a thread, or a Ray actor.

It is told what to load, by names and folders, and from then on what happens to the sequences (``propose.ahead``). A
proposer that wants anything of the target but its text cannot be loaded here: there is no target.
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
from foretoken.models.checkpoint import load_model, load_tokenizer, resolve
from foretoken.models.resumable import Resumable
from foretoken.propose.ahead import Drafter
from foretoken.propose.base import Needs, Proposer
from foretoken.propose.links import Line, Pipe, Queued
from foretoken.propose.wire import Trouble, encode
from foretoken.speculation import Builder


class Elsewhere(Model):
    """The target as a drafting worker knows it: its vocabulary, whether an encoder reads for it, and nothing else."""

    def __init__(self, vocab_size: int, source_length: int) -> None:
        self.vocab_size, self.source_length = vocab_size, source_length

    def open(self, prompt: Sequence[int], source: Sequence[int] = (), cache_salt: str | None = None) -> Handle:
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


def drafter(line: Line, order: Mapping[str, Any]) -> Drafter:
    """What ``order`` (see ``propose.remote``) asks for. Raises InvalidRequest or ModelLoadError."""
    if order["threads"] is not None:
        torch.set_num_threads(order["threads"])
    models: list[Resumable] = []

    def load(name: str | Path) -> Model:
        model = load_model(resolve(name), dtype=order["dtype"], device=order["device"], backend=order["backend"])
        models.append(Resumable(model))
        return models[-1]

    folder = Path(order["tokenizer"])
    target = Elsewhere(order["vocab_size"], order["source_length"])
    builder = Builder(target, load_tokenizer(folder), folder, load)
    proposer = builder.member(order["member"])
    if proposer.needs != Needs() or type(proposer) is Proposer:
        raise InvalidRequest(
            f"method {order['member'].get('method')!r} cannot be a remote member: it learns from the target's rows or "
            "drafts nothing; take 'draft_model' or another that needs the text alone"
        )
    return Drafter(proposer, line, order["ahead"], models)


def serve(line: Line, order: Mapping[str, Any]) -> None:
    """Load, and draft until the engine is gone. What cannot be loaded is told."""
    try:
        made = drafter(line, order)
    except Exception as error:
        line.reply(encode(Trouble(type(error).__name__, str(error))))
        return
    made.run()


class Host:
    """The same as a Ray actor."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        self._line = Queued()
        threading.Thread(target=self._run, args=(order,), name="foretoken-drafting", daemon=True).start()

    def send(self, message: bytes) -> None:
        """To the worker."""
        self._line.incoming.put(message)

    def receive(self) -> bytes | None:
        """From it, as soon as there is something; None when it is over."""
        return self._line.outgoing.get()

    def _run(self, order: Mapping[str, Any]) -> None:
        try:
            serve(self._line, order)
        finally:
            self._line.outgoing.put(None)


def main(descriptor: int) -> None:
    """A process of its own, whose connection to the engine is this descriptor. The engine says when it is over."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group
    line = Pipe(descriptor)
    serve(line, json.loads(line.wait()))


if __name__ == "__main__":
    main(int(sys.argv[1]))
