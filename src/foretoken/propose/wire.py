"""Wire format between an engine and a drafting worker: numbers as JSON, tensors as raw bytes.

Nothing in a message is executed: there is no pickle, and a message of another shape is an error. Values survive exactly
(JSON represents every float exactly, and rows of probabilities are copied bit by bit), so the received draft equals the
draft that was sent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from foretoken.core.context import Context, Exactness
from foretoken.core.draft import Draft
from foretoken.core.law import PointMass, ProposalLaw, Sampled, TopPlusSampled, WithoutReplacement
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams

_HEADER_SIZE = 8  # bytes that hold the length of the JSON
_LAWS: dict[str, type[Sampled] | type[WithoutReplacement] | type[TopPlusSampled]] = {
    "sampled": Sampled,
    "without_replacement": WithoutReplacement,
    "top_plus_sampled": TopPlusSampled,
}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64, torch.float16)}


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Opens a drafting session for one sequence: everything that its drafts depend on.

    Attributes:
        law: The fields of ``SamplingLaw`` by name, without the grammar.
    """

    session_id: int
    tokens: tuple[int, ...]
    prompt_length: int
    law: Mapping[str, Any]
    seed: int
    exactness: str
    prediction: tuple[int, ...] = ()
    source: tuple[int, ...] = ()
    cache_salt: str | None = None

    @staticmethod
    def of(session_id: int, context: Context) -> OpenSession | None:
        """Returns the message for ``context``, or None if its law is not a ``SamplingLaw``.

        A grammar is not sent: the draft ignores it.
        """
        if not isinstance(context.law, SamplingLaw):
            return None
        law = asdict(replace(context.law, grammar=None)) | {"bad_words": tuple(context.law.bad_words)}
        del law["grammar"]
        return OpenSession(
            session_id,
            tuple(context.tokens),
            context.prompt_length,
            law,
            context.streams.seed,
            str(context.exactness),
            context.prediction,
            context.source,
            context.cache_salt,
        )

    def context(self) -> Context:
        """Returns the context that the worker drafts with."""
        law = SamplingLaw(**{key: _as_tuple(value) for key, value in self.law.items()})
        return Context(
            self.session_id,
            list(self.tokens),
            self.prompt_length,
            law,
            Streams(self.seed),
            Exactness(self.exactness),
            prediction=tuple(self.prediction),
            source=tuple(self.source),
            cache_salt=self.cache_salt,
        )


@dataclass(frozen=True, slots=True)
class Commit:
    """Tokens that were emitted in one decode step.

    Attributes:
        budget: Draft tokens that the step allowed this drafter, 0 for none.
        path: Accepted nodes of the worker's own draft, None if another draft was verified.
        reason: The finish reason, None while the sequence continues.
    """

    session_id: int
    tokens: tuple[int, ...]
    budget: int
    path: tuple[int, ...] | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """The engine waits for a draft of at most ``budget`` nodes after the committed text."""

    session_id: int
    budget: int


@dataclass(frozen=True, slots=True)
class EngineMessage:
    """One message to the worker. Its parts happened in the order of the fields."""

    closed: tuple[int, ...] = ()
    opened: tuple[OpenSession, ...] = ()
    committed: tuple[Commit, ...] = ()
    requested: tuple[DraftRequest, ...] = ()

    def encode(self) -> bytes:
        """Returns the message as bytes."""
        return _pack(asdict(self), [])

    @staticmethod
    def decode(data: bytes) -> EngineMessage:
        """Inverse of ``encode``."""
        body, _ = _unpack(data)
        return EngineMessage(
            tuple(body["closed"]),
            tuple(_record(OpenSession, each) for each in body["opened"]),
            tuple(_record(Commit, each) for each in body["committed"]),
            tuple(_record(DraftRequest, each) for each in body["requested"]),
        )


@dataclass(frozen=True, slots=True)
class DraftReply:
    """A draft after a text of ``length`` tokens.

    Attributes:
        assumed: The last tokens of that text, which the worker predicted because they were not committed yet.
        budget: Maximum number of nodes that was drafted for.
    """

    session_id: int
    length: int
    assumed: tuple[int, ...]
    budget: int
    draft: Draft

    def follows(self, tokens: Sequence[int]) -> bool:
        """Returns whether the draft was made for exactly this text, which extends what the worker had received."""
        return len(tokens) == self.length and tuple(tokens[self.length - len(self.assumed) :]) == self.assumed

    def fits(self, budget: int, prefixes: bool) -> bool:
        """Returns whether it is, or where ``prefixes`` holds begins with, the draft for ``budget``."""
        return budget == self.budget or (prefixes and budget < self.budget and len(self.draft) > 0)

    def cut(self, budget: int) -> Draft:
        """Returns the first ``budget`` nodes of a chain."""
        draft = self.draft
        if budget >= len(draft):
            return draft
        law = Sampled(draft.law.probs[:budget]) if isinstance(draft.law, Sampled) else draft.law
        return Draft.chain(draft.tokens[:budget], law)


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """The worker has loaded.

    Attributes:
        learns: The proposer keeps state across requests (see ``Proposer.learns``).
        prefixes: A draft for a smaller budget is a prefix of the draft for a larger one.
    """

    learns: bool
    prefixes: bool


@dataclass(frozen=True, slots=True)
class WorkerError:
    """An exception in the worker.

    Attributes:
        kind: Class name of the exception.
    """

    kind: str
    message: str


WorkerReply = WorkerReady | WorkerError | tuple[DraftReply, ...]


def encode(reply: WorkerReply) -> bytes:
    """Returns a message from the worker as bytes."""
    if isinstance(reply, WorkerReady | WorkerError):
        return _pack({"kind": "ready" if isinstance(reply, WorkerReady) else "error", "body": asdict(reply)}, [])
    tensors: list[Tensor] = []
    body = [
        {
            "session_id": each.session_id,
            "length": each.length,
            "assumed": each.assumed,
            "budget": each.budget,
            "draft": _encoded_draft(each.draft, tensors),
        }
        for each in reply
    ]
    return _pack({"kind": "drafts", "body": body}, tensors)


def decode(data: bytes) -> WorkerReply:
    """Inverse of ``encode``. Raises ValueError or KeyError for anything else."""
    message, tensors = _unpack(data)
    kind, body = message["kind"], message["body"]
    if kind == "ready":
        return WorkerReady(**body)
    if kind == "error":
        return WorkerError(**body)
    return tuple(
        DraftReply(
            each["session_id"],
            each["length"],
            tuple(each["assumed"]),
            each["budget"],
            _decoded_draft(each["draft"], tensors),
        )
        for each in body
    )


def _encoded_draft(draft: Draft, tensors: list[Tensor]) -> dict[str, Any]:
    """Returns a draft as JSON. Its tensors are appended to ``tensors`` and referred to by index."""

    def index_of(tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        tensors.append(tensor.detach().cpu().contiguous())
        return len(tensors) - 1

    return {
        "tokens": draft.ids,
        "parents": draft.parents,
        "law": next((name for name, law in _LAWS.items() if isinstance(draft.law, law)), None),
        "rows": None if isinstance(draft.law, PointMass) else index_of(draft.law.probs),
        "scores": index_of(draft.scores),
    }


def _decoded_draft(body: Mapping[str, Any], tensors: Sequence[Tensor]) -> Draft:
    if not body["tokens"]:
        return Draft.empty()
    law: ProposalLaw = PointMass() if body["law"] is None else _LAWS[body["law"]](tensors[body["rows"]])
    scores = None if body["scores"] is None else tensors[body["scores"]]
    return Draft(torch.tensor(body["tokens"], dtype=torch.int64), tuple(body["parents"]), law, scores)


def _pack(message: Mapping[str, Any], tensors: Sequence[Tensor]) -> bytes:
    """Returns the length of the JSON (big-endian), the JSON, and the tensors' bytes."""
    facts = [{"type": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)} for t in tensors]
    head = json.dumps({"message": message, "tensors": facts}).encode()
    return b"".join([len(head).to_bytes(_HEADER_SIZE, "big"), head, *(t.numpy().tobytes() for t in tensors)])


def _unpack(data: bytes) -> tuple[Any, list[Tensor]]:
    """Inverse of ``_pack``."""
    start = _HEADER_SIZE + int.from_bytes(data[:_HEADER_SIZE], "big")
    head = json.loads(data[_HEADER_SIZE:start])
    tensors: list[Tensor] = []
    for fact in head["tensors"]:
        dtype = _DTYPES[fact["type"]]
        count = int(torch.Size(fact["shape"]).numel())
        body = bytearray(data[start : start + count * dtype.itemsize])  # torch.frombuffer wants writable memory
        tensors.append(torch.frombuffer(body, dtype=dtype).view(fact["shape"]) if body else torch.empty(fact["shape"]))
        start += len(body)
    return head["message"], tensors


def _record(kind: type[Any], body: Mapping[str, Any]) -> Any:
    """Returns a dataclass of numbers and tuples of numbers; a law stays a mapping."""
    values = {f.name: body[f.name] for f in fields(kind)}
    return kind(**{key: value if key == "law" else _as_tuple(value) for key, value in values.items()})


def _as_tuple(value: Any) -> Any:
    """Returns JSON lists as tuples, recursively."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value
