"""What an engine and a drafting worker write to each other: plain numbers as JSON, tensors as their bytes.

Nothing that arrives is run: there is no pickle in it, and a message of another shape is an error. Numbers survive as
they are (JSON holds every float exactly, rows of probabilities travel bit by bit), so a draft that crossed is the draft
that was made.
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

_HEAD = 8  # bytes that say how long the JSON is
_LAWS: dict[str, type[Sampled] | type[WithoutReplacement] | type[TopPlusSampled]] = {
    "sampled": Sampled, "without_replacement": WithoutReplacement, "top_plus_sampled": TopPlusSampled,
}  # fmt: skip
_TYPES = {str(kind).removeprefix("torch."): kind for kind in (torch.float32, torch.float64, torch.float16)}


@dataclass(frozen=True, slots=True)
class Opening:
    """A sequence that is to be drafted for: all that drafts depend on. law: the keys of ``SamplingLaw``."""

    serial: int
    tokens: tuple[int, ...]
    prompt_length: int
    law: Mapping[str, Any]
    seed: int
    exactness: str
    prediction: tuple[int, ...] = ()
    source: tuple[int, ...] = ()
    cache_salt: str | None = None

    @staticmethod
    def of(serial: int, context: Context) -> Opening | None:
        """None where the law is none of ours. Of a grammar nothing crosses: the draft does not know it."""
        if not isinstance(context.law, SamplingLaw):
            return None
        law = asdict(replace(context.law, grammar=None))
        del law["grammar"]
        return Opening(
            serial, tuple(context.tokens), context.prompt_length, law, context.streams.seed, str(context.exactness),
            context.prediction, context.source, context.cache_salt,
        )  # fmt: skip

    def context(self) -> Context:
        """The sequence as the worker sees it."""
        law = {key: _frozen(value) for key, value in self.law.items()}
        return Context(
            self.serial, list(self.tokens), self.prompt_length, SamplingLaw(**law), Streams(self.seed),
            Exactness(self.exactness), prediction=tuple(self.prediction), source=tuple(self.source),
            cache_salt=self.cache_salt,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Commit:
    """Tokens that were emitted. budget: what was asked of the drafter in that round, 0 for nothing.

    path: accepted nodes of its own draft, None where another draft was verified. reason: why the sequence ended.
    """

    serial: int
    tokens: tuple[int, ...]
    budget: int
    path: tuple[int, ...] | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """Somebody waits for a draft of at most ``budget`` nodes behind the text as it is."""

    serial: int
    budget: int


@dataclass(frozen=True, slots=True)
class Frame:
    """One message to the worker; its parts happened in this order."""

    forgotten: tuple[int, ...] = ()
    opened: tuple[Opening, ...] = ()
    committed: tuple[Commit, ...] = ()
    asked: tuple[Ask, ...] = ()

    def encode(self) -> bytes:
        return _pack(asdict(self), [])

    @staticmethod
    def decode(data: bytes) -> Frame:
        given, _ = _unpack(data)
        return Frame(
            tuple(given["forgotten"]),
            tuple(_made(Opening, each) for each in given["opened"]),
            tuple(_made(Commit, each) for each in given["committed"]),
            tuple(_made(Ask, each) for each in given["asked"]),
        )


@dataclass(frozen=True, slots=True)
class Made:
    """A draft of at most ``budget`` nodes behind a text of ``length`` tokens that ends in ``tail``.

    tail: what the worker had not been told of when it drafted: its own guess at what would be emitted.
    """

    serial: int
    length: int
    tail: tuple[int, ...]
    budget: int
    draft: Draft

    def follows(self, tokens: Sequence[int]) -> bool:
        """Whether it was made behind this text, which goes on from what the worker had been told."""
        return len(tokens) == self.length and tuple(tokens[self.length - len(self.tail) :]) == self.tail

    def fits(self, budget: int, prefixes: bool) -> bool:
        """Whether it is, or begins with, the draft that ``budget`` asks for."""
        return budget == self.budget or (prefixes and budget < self.budget and len(self.draft) > 0)

    def cut(self, budget: int) -> Draft:
        """The first ``budget`` nodes of a chain."""
        draft = self.draft
        if budget >= len(draft):
            return draft
        law = Sampled(draft.law.probs[:budget]) if isinstance(draft.law, Sampled) else draft.law
        return Draft.chain(draft.tokens[:budget], law)


@dataclass(frozen=True, slots=True)
class Hello:
    """The worker is ready. prefixes: a draft of fewer nodes is the beginning of one of more (see ``ahead``)."""

    learns: bool
    prefixes: bool


@dataclass(frozen=True, slots=True)
class Trouble:
    """What the worker could not do. kind: the name of the exception."""

    kind: str
    message: str


Reply = Hello | Trouble | tuple[Made, ...]


def encode(reply: Reply) -> bytes:
    """A message from the worker."""
    if isinstance(reply, Hello | Trouble):
        return _pack({"kind": type(reply).__name__.lower(), "body": asdict(reply)}, [])
    tensors: list[Tensor] = []
    body = [
        {"serial": m.serial, "length": m.length, "tail": m.tail, "budget": m.budget, "draft": _draft(m.draft, tensors)}
        for m in reply
    ]
    return _pack({"kind": "made", "body": body}, tensors)


def decode(data: bytes) -> Reply:
    """The other way. Raises ValueError or KeyError for what is no such message."""
    given, tensors = _unpack(data)
    if given["kind"] == "hello":
        return Hello(**given["body"])
    if given["kind"] == "trouble":
        return Trouble(**given["body"])
    return tuple(
        Made(m["serial"], m["length"], tuple(m["tail"]), m["budget"], _drafted(m["draft"], tensors))
        for m in given["body"]
    )


def _draft(draft: Draft, tensors: list[Tensor]) -> dict[str, Any]:
    """A draft as JSON; its tensors are added to ``tensors`` and named by their places."""

    def place(tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        tensors.append(tensor.detach().cpu().contiguous())
        return len(tensors) - 1

    law = next((name for name, kind in _LAWS.items() if isinstance(draft.law, kind)), None)
    rows = None if isinstance(draft.law, PointMass) else place(draft.law.probs)
    return {
        "tokens": draft.ids, "parents": draft.parents, "law": law, "rows": rows, "scores": place(draft.scores),
    }  # fmt: skip


def _drafted(given: Mapping[str, Any], tensors: Sequence[Tensor]) -> Draft:
    if not given["tokens"]:
        return Draft.empty()
    law: ProposalLaw = PointMass() if given["law"] is None else _LAWS[given["law"]](tensors[given["rows"]])
    scores = None if given["scores"] is None else tensors[given["scores"]]
    return Draft(torch.tensor(given["tokens"], dtype=torch.int64), tuple(given["parents"]), law, scores)


def _pack(message: Mapping[str, Any], tensors: Sequence[Tensor]) -> bytes:
    facts = [{"type": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)} for t in tensors]
    head = json.dumps({"message": message, "tensors": facts}).encode()
    return b"".join([len(head).to_bytes(_HEAD, "big"), head, *(t.numpy().tobytes() for t in tensors)])


def _unpack(data: bytes) -> tuple[Any, list[Tensor]]:
    at = _HEAD + int.from_bytes(data[:_HEAD], "big")
    head = json.loads(data[_HEAD:at])
    tensors: list[Tensor] = []
    for fact in head["tensors"]:
        kind = _TYPES[fact["type"]]
        count = int(torch.Size(fact["shape"]).numel())
        body = bytearray(data[at : at + count * kind.itemsize])  # writable, as torch wants its memory
        tensors.append(torch.frombuffer(body, dtype=kind).view(fact["shape"]) if body else torch.empty(fact["shape"]))
        at += len(body)
    return head["message"], tensors


def _made(kind: type[Any], given: Mapping[str, Any]) -> Any:
    """A dataclass of numbers and tuples of numbers, its law left a mapping."""
    values = {f.name: given[f.name] for f in fields(kind)}
    return kind(**{key: value if key == "law" else _frozen(value) for key, value in values.items()})


def _frozen(value: Any) -> Any:
    """JSON's lists as the tuples that they were."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
