"""The program of a drafting worker: ``python -m foretoken.engine.drafting``, a thread, or a Ray actor.

It receives the names and folders of the proposer's files, and then the events of the sequences
(``propose.remote_worker``). A proposer that needs more of the target than its text cannot be loaded here.
"""

import json
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch

from foretoken.core.errors import InvalidRequest
from foretoken.models.base import Model
from foretoken.models.formats.checkpoint import load_tokenizer, resolve
from foretoken.models.loading import load_model
from foretoken.models.resumable import Resumable
from foretoken.propose.base import Needs, Proposer
from foretoken.propose.remote_transports import Disconnected, DraftEndpoint, PipeEndpoint
from foretoken.propose.remote_wire import WorkerError, encode
from foretoken.propose.remote_worker import DraftingWorker
from foretoken.speculation import Builder


class RemoteTarget(Model):
    """Stand-in for the target in a drafting worker: its vocabulary size and the length of its encoder."""

    def __init__(self, vocab_size: int, source_length: int) -> None:
        self.vocab_size, self.source_length = vocab_size, source_length

    def _absent(self, *_: Any, **__: Any) -> NoReturn:
        raise InvalidRequest(
            "a remote member drafts from the text alone, such as 'draft_model' and 'vocabulary'; this one needs the "
            "target itself, so configure it without 'remote'"
        )

    open = score = commit = close = __getattr__ = _absent


def _load(endpoint: DraftEndpoint, config: Mapping[str, Any]) -> DraftingWorker:
    """Loads the proposer that ``config`` describes (see ``propose.remote``)."""
    if config["threads"] is not None:
        torch.set_num_threads(config["threads"])
    models: list[Resumable] = []

    def load(name: str | Path, **options: Any) -> Model:
        keys = ("dtype", "device", "backend")
        model = load_model(resolve(name), **{key: config[key] for key in keys}, **options)
        models.append(Resumable(model))
        return models[-1]

    folder = Path(config["tokenizer"])
    target = RemoteTarget(config["vocab_size"], config["source_length"])
    builder = Builder(target, load_tokenizer(folder), folder, load)
    proposer = builder.member(config["member"])
    if proposer.needs != Needs() or type(proposer) is Proposer:
        raise InvalidRequest(
            f"method {config['member'].get('method')!r} cannot be a remote member: it learns from the target's rows or "
            "drafts nothing; use 'draft_model' or another method that needs the text alone"
        )
    return DraftingWorker(proposer, endpoint, config["ahead"], models)


def serve(endpoint: DraftEndpoint) -> None:
    """Receives the configuration, loads the proposer, and drafts until the engine disconnects.

    Errors while loading are sent to the engine.
    """
    with suppress(Disconnected):
        config = json.loads(endpoint.receive() or "")
        try:
            worker = _load(endpoint, config)
        except Exception as error:
            endpoint.send(encode(WorkerError(type(error).__name__, str(error))))
        else:
            worker.run()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is sent to the whole process group
    serve(PipeEndpoint(int(sys.argv[1])))  # closing this connection ends the worker
