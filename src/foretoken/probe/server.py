"""A server and one way to decode on it, plain or speculative: names of parameters, requests, and abilities."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from foretoken.core.errors import ForetokenError
from foretoken.probe.answers import Failed, Refused, Reply, ServerAnswer, TokenPlace
from foretoken.probe.client import Ask, EndpointClient, Journal, Patience

CHAT = "chat/completions"
CHARACTERS = 3.2  # of a token, about
_TOPS = (20, 5)  # numbers of alternatives to request, in this order
_PROBED = 6  # tokens of the first answer
_KEY_OR_MODEL = ("401", "403", "404")  # refusals that the user can fix
_INSTRUCTION = "Continue this text, without any words of your own:\n\n"


class ServerKind(StrEnum):
    """The kinds of servers that can be audited and planned for."""

    AUTO = "auto"
    FORETOKEN = "foretoken"
    VLLM = "vllm"
    LLAMACPP = "llamacpp"
    SGLANG = "sglang"
    OPENAI = "openai"


@dataclass(frozen=True, slots=True)
class Dialect:
    """One kind of server, or an engine: fields of requests, and names of parameters.

    window: number of last tokens, the prompt's included, that penalties count; None if presence and frequency count the
    text alone and repetition counts both.
    """

    kind: str
    neutral: Mapping[str, Any]  # switches default filters off: texts then follow softmax(logits / temperature)
    plain: Mapping[str, Any] | None = None  # switches speculation off for one request
    depth: str = ""  # name of a request's draft length
    endless: Mapping[str, Any] = field(default_factory=lambda: {"ignore_eos": True})  # continues after an end of text
    token_ids: Mapping[str, Any] = field(default_factory=lambda: {"return_token_ids": True})  # requests token ids
    scores: bool = False  # whether there is vLLM's prompt_logprobs
    names: Mapping[str, str] = field(default_factory=dict)  # of parameters, by OpenAI's or vLLM's
    unknown: frozenset[str] = frozenset()  # parameters that it does not offer
    window: int | None = None

    def grammar(self, schema: Mapping[str, Any], chat: bool) -> dict[str, Any]:
        """Returns the fields that constrain a text to a JSON schema."""
        if chat or self.kind is ServerKind.OPENAI:
            named = {"name": "audit", "schema": schema, "strict": True}
            return {"response_format": {"type": "json_schema", "json_schema": named}}
        match self.kind:
            case ServerKind.LLAMACPP:
                return {"json_schema": schema}
            case ServerKind.SGLANG:
                return {"json_schema": json.dumps(schema)}
            case _:
                return {"structured_outputs": {"json": schema}}


NEUTRAL: Mapping[str, Any] = {"top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
_NOT_OPENAI = frozenset({"top_k", "min_p", "repetition_penalty", "bad_words", "min_tokens", "stop_token_ids"})

DIALECTS: Mapping[str, Dialect] = {
    dialect.kind: dialect
    for dialect in (
        Dialect(
            ServerKind.FORETOKEN,
            {**NEUTRAL, "top_k": 0},
            plain={"speculative_tokens": 0},
            depth="speculative_tokens",
            scores=True,
        ),
        Dialect(ServerKind.VLLM, {**NEUTRAL, "top_k": -1}, scores=True),
        Dialect(ServerKind.SGLANG, {**NEUTRAL, "top_k": -1}, unknown=frozenset({"bad_words"})),
        Dialect(
            ServerKind.LLAMACPP,
            {"top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0, "top_k": 0, "typical_p": 1.0},
            plain={"speculative.n_max": 0},
            endless={},
            token_ids={},
            names={"repetition_penalty": "repeat_penalty"},
            unknown=frozenset({"bad_words", "min_tokens", "stop_token_ids"}),
            window=64,
        ),
        Dialect(ServerKind.OPENAI, {"top_p": 1.0}, endless={}, token_ids={}, unknown=_NOT_OPENAI),
    )
}


def detect(client: EndpointClient) -> Dialect:
    """Returns the dialect of a server from the owner of its models; OpenAI's if the owner is unknown."""
    try:
        owner = json.loads(client.get("/v1/models"))["data"][0].get("owned_by", "")
        return DIALECTS[ServerKind(owner)]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return DIALECTS[ServerKind.OPENAI]


def reported_depth(kind: str, client: EndpointClient) -> int | None:
    """Returns the draft length that a server reports, None if it reports none. Only SGLang does."""
    if kind != ServerKind.SGLANG:
        return None
    try:
        page = client.get("/server_info") or client.get("/get_server_info")
        steps = json.loads(page).get("speculative_num_steps")
        return int(steps) if steps else None
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


Prompt = str | tuple[int, ...]
"""A text, or token ids."""


class Reference(StrEnum):
    """The source of the target's distribution."""

    CHECKPOINT = "the checkpoint, computed here"
    PROMPT = "the server's prompt_logprobs"
    EACH = "the server's logprobs, asked for one token at a time"
    INLINE = "the log-probabilities that came with the text"
    NONE = "nothing"


@dataclass(frozen=True, slots=True)
class EndpointRequest:
    """A completion to request."""

    prompt: Prompt
    max_tokens: int
    tag: str  # distinguishes equal requests
    temperature: float | None = 0.0  # None sends none
    top: bool = True  # whether to request log-probabilities
    options: Mapping[str, Any] = field(default_factory=dict)  # by OpenAI's or vLLM's names; they override the side's
    endless: bool = True  # whether to continue after an end-of-sequence token, if the server can
    continued: bool = True  # whether a chat continues the prompt as a text; else the prompt is the user's message


@dataclass(frozen=True, slots=True)
class Side:
    """A way to decode on a server: "plain" or "speculative"; and the server's abilities, which ``probed`` finds out."""

    name: str
    client: EndpointClient
    model: str
    dialect: Dialect
    switch: Mapping[str, Any] = field(default_factory=dict)  # fields that select it
    depth: int = 0  # draft length, if it is known
    path: str = "completions"
    top: int = 0  # alternatives at each token, 0 without log-probabilities
    reference: Reference = Reference.NONE

    @property
    def needs_logprobs(self) -> bool:
        """Whether tokens and their ids come with log-probabilities alone, as from llama.cpp."""
        return not self.dialect.token_ids

    def complete(self, requests: Sequence[EndpointRequest], concurrency: int) -> list[Reply]:
        """Returns a reply to each request, ``concurrency`` at a time."""
        asks = [Ask(self.body(each), f"{self.name}/{each.tag}", self.top if each.top else 0) for each in requests]
        replies = self.client.post(self.path, asks, concurrency)
        return [
            replace(reply, prompt_ids=request.prompt)
            if isinstance(reply, ServerAnswer) and isinstance(request.prompt, tuple) and not reply.prompt_ids
            else reply
            for reply, request in zip(replies, requests, strict=True)
        ]

    def body(self, request: EndpointRequest) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "max_tokens": request.max_tokens}
        if self.path == CHAT:
            message = f"{_INSTRUCTION if request.continued else ''}{request.prompt}"
            body["messages"] = [{"role": "user", "content": message}]
        else:
            body["prompt"] = list(request.prompt) if isinstance(request.prompt, tuple) else request.prompt
        if request.temperature is not None:
            body["temperature"] = request.temperature
        if request.top and self.top:
            chat = {"logprobs": True, "top_logprobs": self.top}
            body |= chat if self.path == CHAT else {"logprobs": self.top}
        body |= {**self.dialect.neutral, **self.dialect.token_ids, **self.switch}
        body |= self.dialect.endless if request.endless else {}
        return body | {self.dialect.names.get(name, name): value for name, value in request.options.items()}

    def score(
        self, texts: Sequence[tuple[ServerAnswer, str]], concurrency: int
    ) -> list[tuple[TokenPlace, ...] | Failed]:
        """Returns the positions of each (text, tag) with the log-probabilities of plain decoding without any filter."""
        if self.reference not in (Reference.PROMPT, Reference.EACH):
            return [text.places for text, _ in texts]
        requests = [self._score_requests(text, tag) for text, tag in texts]
        replies = iter(self.complete([each for row in requests for each in row], concurrency))
        return [
            self._scored(text, [next(replies) for _ in row]) for (text, _), row in zip(texts, requests, strict=True)
        ]

    def _score_requests(self, text: ServerAnswer, tag: str) -> list[EndpointRequest]:
        if self.reference is Reference.PROMPT:
            options = {"prompt_logprobs": self.top}
            return [EndpointRequest((*text.prompt_ids, *text.ids), 1, f"{tag}/score", top=False, options=options)]
        return [
            EndpointRequest((*text.prompt_ids, *text.ids[:at]), 1, f"{tag}/score/{at}") for at in range(len(text.ids))
        ]

    def _scored(self, text: ServerAnswer, replies: Sequence[Reply]) -> tuple[TokenPlace, ...] | Failed:
        rows: list[TokenPlace | None] = []
        for reply in replies:
            if not isinstance(reply, ServerAnswer):
                return Failed(reply.why)
            if self.reference is Reference.EACH:
                if not reply.places:
                    return Failed("no logprobs")
                rows.append(reply.places[0])
            elif len(reply.scored) == len(text.prompt_ids) + len(text.ids):
                rows += reply.scored[len(text.prompt_ids) :]
            else:
                return Failed("no prompt_logprobs")
        tops = [() if row is None else row.top for row in rows]
        return tuple(
            TokenPlace(str(token), dict(top).get(str(token)), top[: self.top])
            for token, top in zip(text.ids, tops, strict=True)
        )


def sent(sides: Iterable[Side]) -> dict[str, int]:
    """Returns the requests and generated tokens that the sides have taken so far."""
    spent = {id(side.client.spent): side.client.spent for side in sides}.values()
    return {"requests": sum(one.requests for one in spent), "tokens": sum(one.tokens for one in spent)}


def probed(side: Side, prompt: str, logprobs: bool = True) -> Side | Refused | Failed:
    """Returns the side with its abilities, from a few requests. logprobs: whether to look for log-probabilities."""
    reply: Reply = Failed("nothing was asked")
    for path in ("completions", CHAT):
        for top in (*_TOPS, 0) if logprobs else (0,):
            able = replace(side, path=path, top=top)
            (reply,) = able.complete([EndpointRequest(prompt, _PROBED, f"probe/{top}")], 1)
            if isinstance(reply, ServerAnswer) and (reply.places or not top):
                return _with_reference(able, prompt, reply) if logprobs else able
            if isinstance(reply, Failed) or (isinstance(reply, Refused) and reply.why[:3] in ("401", "403")):
                return reply
    return reply if isinstance(reply, Refused) else Failed("it answers with neither a text nor a refusal")


def _with_reference(side: Side, prompt: str, answer: ServerAnswer) -> Side:
    """Returns the side with the best source of the target's distribution that works."""
    if side.top and side.path != CHAT and answer.ids:
        text = replace(answer, prompt_ids=answer.prompt_ids or tokenized(side, prompt))
        kinds = (Reference.PROMPT, Reference.EACH) if side.dialect.scores else (Reference.EACH,)
        for kind in kinds if text.prompt_ids else ():
            scoring = replace(side, reference=kind)
            (places,) = scoring.score([(text, f"probe/{kind.name.lower()}")], 1)
            if not isinstance(places, Failed) and all(place.top for place in places):
                return scoring
    return replace(side, reference=Reference.INLINE if side.top else Reference.NONE)


def tokenized(side: Side, prompt: str) -> tuple[int, ...]:
    """Returns the ids of a prompt by llama.cpp's ``/tokenize``, () if the server has no such page."""
    try:
        tokens = json.loads(side.client.get("/tokenize", {"content": prompt, "add_special": True}))["tokens"]
        return tuple(map(int, tokens))
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return ()


@dataclass(frozen=True, slots=True)
class ServerPair:
    """A server with speculation, and the same model without it."""

    url: str  # the server that speculates
    model: str  # the model's name there
    baseline: str | None = None  # a server of the same model without it; None if a request can switch it off
    kind: ServerKind = ServerKind.AUTO
    key: str | None = None  # an API key
    baseline_key: str | None = None  # of the baseline; None for the same
    patience: Patience = field(default_factory=Patience)

    def sides(self, answers: Journal[ServerAnswer] | None = None) -> list[Side]:
        """Returns the plain side, if there is one, and the speculative side. answers: Keeps the answers."""
        journal = Journal(ServerAnswer) if answers is None else answers
        client = EndpointClient(self.url, self.key, self.patience, journal)
        speculative = Side("speculative", client, self.model, self._dialect(client))
        plain = speculative.dialect.plain
        if self.baseline is None and plain is None:
            return [speculative]
        url, key = (self.url, self.key) if self.baseline is None else (self.baseline, self.baseline_key or self.key)
        other = EndpointClient(url, key, self.patience, journal)  # counts by itself
        dialect = speculative.dialect if self.baseline is None else self._dialect(other)
        return [Side("plain", other, self.model, dialect, dialect.plain or {}), speculative]

    def _dialect(self, client: EndpointClient) -> Dialect:
        return detect(client) if self.kind is ServerKind.AUTO else DIALECTS[self.kind]


class CannotTellError(Exception):
    """The measurements support no verdict. later: whether the same run may, when the server answers again."""

    def __init__(self, why: str, later: bool = False) -> None:
        super().__init__(why)
        self.later = later


def all_probed(sides: Iterable[Side], prompt: str, logprobs: bool = True) -> list[Side]:
    """Returns the sides with their abilities, see ``probed``.

    Raises CannotTellError if one gives no text, ForetokenError if the user can fix that.
    """
    result = []
    for side in sides:
        reply = probed(side, prompt, logprobs)
        if isinstance(reply, Refused) and reply.why[:3] in _KEY_OR_MODEL:
            raise ForetokenError(f"{side.client.url} refuses {side.model!r} ({reply.why}); see --model and --api-key")
        if not isinstance(reply, Side):
            raise CannotTellError(f"the {side.name} side, {side.client.url}, gave no text: {reply.why}", later=True)
        result.append(reply)
    return result
