"""Messages between an engine and a drafting worker, as bytes.

A message is the length of its JSON, the JSON, and the elements of its tensors. Nothing in a message is executed, and
unknown types and fields are errors. JSON represents every float exactly and tensors are copied bit by bit, so the
received draft equals the sent one.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.core.context import Context, Exactness
from foretoken.core.draft import Draft, PointMass, Sampled, TopPlusSampled, WithoutReplacement
from foretoken.core.restrictions import BadWords
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams

_HEADER_SIZE = 8  # bytes that hold the length of the JSON; tensors start at multiples of it


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Opens a drafting session for one sequence: everything that its drafts depend on."""

    session_id: int
    tokens: tuple[int, ...]
    prompt_length: int
    law: SamplingLaw
    seed: int
    exactness: str
    prediction: tuple[int, ...] = ()
    source: tuple[int, ...] = ()
    cache_salt: str | None = None

    @staticmethod
    def of(session_id: int, context: Context) -> "OpenSession | None":
        """Returns the message for ``context``, or None if its distribution is not a ``SamplingLaw``.

        A grammar is not sent: the worker drafts without it.
        """
        if not isinstance(context.law, SamplingLaw):
            return None
        return OpenSession(
            session_id,
            tuple(context.tokens),
            context.prompt_length,
            replace(context.law, grammar=None),
            context.streams.seed,
            str(context.exactness),
            context.prediction,
            context.source,
            context.cache_salt,
        )

    def context(self) -> Context:
        return Context(
            self.session_id,
            list(self.tokens),
            self.prompt_length,
            self.law,
            Streams(self.seed),
            Exactness(self.exactness),
            prediction=self.prediction,
            source=self.source,
            cache_salt=self.cache_salt,
        )


@dataclass(frozen=True, slots=True)
class Commit:
    """Tokens that were emitted since the last commit."""

    session_id: int
    tokens: tuple[int, ...]
    budget: int  # draft tokens that the step allowed this drafter, 0 for none
    path: tuple[int, ...] | None = None  # accepted nodes of the worker's draft, None if another draft was verified
    reason: str | None = None  # the finish reason, None while the sequence continues
    requested: bool = False  # the engine waits for a draft of at most ``budget`` nodes after these tokens


@dataclass(frozen=True, slots=True)
class EngineMessage:
    """One message to the worker. Its events happened in the order of the fields; ``closed`` holds session ids."""

    closed: tuple[int, ...] = ()
    opened: tuple[OpenSession, ...] = ()
    committed: tuple[Commit, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftReply:
    """A draft after a text of ``length`` tokens."""

    session_id: int
    length: int
    # the last tokens of that text, which the worker predicted because they were not committed yet
    assumed: tuple[int, ...]
    budget: int  # maximum number of nodes that was drafted for
    draft: Draft

    def follows(self, tokens: Sequence[int]) -> bool:
        """Returns whether the draft was made for exactly this text, which extends the text that the worker received."""
        return len(tokens) == self.length and tuple(tokens[self.length - len(self.assumed) :]) == self.assumed

    def fits(self, budget: int, prefixes: bool) -> bool:
        """Returns whether this is the draft for ``budget`` or, if ``prefixes``, begins with it."""
        return budget == self.budget or (prefixes and budget < self.budget and len(self.draft) > 0)

    def cut(self, budget: int) -> Draft:
        draft = self.draft
        if budget >= len(draft):
            return draft
        law = Sampled(draft.law.probs[:budget]) if isinstance(draft.law, Sampled) else draft.law
        return Draft.chain(draft.ids[:budget], law)


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """The worker has loaded."""

    learns: bool  # the proposer keeps state across requests (see ``Proposer.learns``)
    prefixes: bool  # a draft for a smaller budget is a prefix of the draft for a larger one


@dataclass(frozen=True, slots=True)
class WorkerError:
    """An exception in the worker, by the name of its class."""

    kind: str
    message: str


Message = EngineMessage | WorkerReady | WorkerError | tuple[DraftReply, ...]

_TYPES: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *(EngineMessage, OpenSession, Commit, SamplingLaw),
        *(WorkerReady, WorkerError, DraftReply, Draft, PointMass, Sampled, WithoutReplacement, TopPlusSampled),
    )
}


def encode(message: Message) -> bytes:
    chunks: list[bytes] = []

    def record(value: Any) -> Any:
        if isinstance(value, BadWords):
            return tuple(value)
        if isinstance(value, Tensor):
            array, start = value.detach().cpu().contiguous().numpy(), sum(map(len, chunks))
            chunks.extend((array.tobytes(), bytes(-array.nbytes % _HEADER_SIZE)))
            return {"dtype": array.dtype.name, "shape": array.shape, "start": start}
        # A draft on a device, of a subclass, is sent as any other.
        kind = next(name for each in type(value).__mro__ if (name := each.__name__) in _TYPES)
        return {"type": kind} | {f.name: getattr(value, f.name) for f in fields(value) if f.init}

    body = json.dumps(message, default=record).encode()
    return b"".join((len(body).to_bytes(_HEADER_SIZE, "big"), body, *chunks))


def decode(data: bytes) -> Any:
    """Inverse of ``encode``. Raises an exception for anything else."""
    end = _HEADER_SIZE + int.from_bytes(data[:_HEADER_SIZE], "big")
    elements = bytearray(memoryview(data)[end:])  # tensors must be writable

    def value(record: dict[str, Any]) -> Any:
        if "dtype" in record:
            array = np.ndarray(record["shape"], np.dtype(record["dtype"]), elements, record["start"])
            return torch.from_numpy(array)
        return _TYPES[record.pop("type")](**{name: _as_tuple(field) for name, field in record.items()})

    return _as_tuple(json.loads(data[_HEADER_SIZE:end], object_hook=value))


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value
