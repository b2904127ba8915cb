"""One way to decode, plain or speculative: a server, the fields that switch, and what it is able to tell."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from foretoken.probe.answers import Failed, Refused, Reply, ServerAnswer, TokenPlace
from foretoken.probe.client import Ask, EndpointClient
from foretoken.probe.dialects import Dialect

CHAT = "chat/completions"
_TOPS = (20, 5)  # alternatives to ask for, the first number that is taken
_PROBED = 6  # tokens of the first answer
_INSTRUCTION = "Continue this text, without any words of your own:\n\n"


Prompt = str | tuple[int, ...]


class Reference(StrEnum):
    """Where the target's distribution comes from."""

    CHECKPOINT = "the checkpoint, computed here"
    PROMPT = "the server's prompt_logprobs"
    EACH = "the server's logprobs, asked for one token at a time"
    INLINE = "the log-probabilities that came with the text"
    NONE = "nothing"


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a server tells. path: of completions. top: alternatives at each token, 0 without log-probabilities."""

    path: str = "completions"
    top: int = 0
    told: Mapping[str, Any] = field(default_factory=dict)
    reference: Reference = Reference.NONE


@dataclass(frozen=True, slots=True)
class EndpointRequest:
    """A completion to ask for.

    Attributes:
        prompt: A text, or token ids.
        max_tokens: Its longest length.
        tag: Tells apart equal requests.
        temperature: Sampling temperature; None sends none.
        top: Whether log-probabilities are wanted.
        options: Further fields, by OpenAI's or vLLM's names. They win over the side's own.
        endless: Whether the text goes on after an end-of-sequence token, where the server can do that.
        continued: Whether a chat is asked to continue the prompt as a text; else the prompt is the user's message.
    """

    prompt: Prompt
    max_tokens: int
    tag: str
    temperature: float | None = 0.0
    top: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    endless: bool = True
    continued: bool = True


@dataclass(frozen=True, slots=True)
class Side:
    """A way to decode.

    Attributes:
        name: "plain" or "speculative".
        client: The server.
        model: The model's name there.
        dialect: What the server calls its parameters.
        switch: Fields that make it this side.
        abilities: What it tells.
    """

    name: str
    client: EndpointClient
    model: str
    dialect: Dialect
    switch: Mapping[str, Any] = field(default_factory=dict)
    abilities: Abilities = field(default_factory=Abilities)

    @property
    def needs_logprobs(self) -> bool:
        """Whether tokens and their ids are told with log-probabilities alone, as by llama.cpp."""
        return not self.dialect.told

    def complete(self, requests: Sequence[EndpointRequest], concurrency: int) -> list[Reply]:
        """Returns a reply to each request, ``concurrency`` at a time."""
        top = self.abilities.top
        asks = [
            Ask(self.body(request), f"{self.name}/{request.tag}", top if request.top else 0) for request in requests
        ]
        replies = self.client.post(self.abilities.path, asks, concurrency)
        return [_of_prompt(reply, request.prompt) for reply, request in zip(replies, requests, strict=True)]

    def score(
        self, texts: Sequence[tuple[ServerAnswer, str]], concurrency: int
    ) -> list[tuple[TokenPlace, ...] | Failed]:
        """Returns the places of each text with the log-probabilities of plain decoding without any filter.

        Args:
            texts: (text, tag) of completions.
            concurrency: Requests at a time.
        """
        match self.abilities.reference:
            case Reference.PROMPT:
                return self._score_prompts(texts, concurrency)
            case Reference.EACH:
                return self._score_each(texts, concurrency)
            case _:
                return [text.places for text, _ in texts]

    def body(self, request: EndpointRequest) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "max_tokens": request.max_tokens}
        if self.abilities.path == CHAT:
            asked = f"{_INSTRUCTION if request.continued else ''}{request.prompt}"
            body["messages"] = [{"role": "user", "content": asked}]
        else:
            body["prompt"] = list(request.prompt) if isinstance(request.prompt, tuple) else request.prompt
        if request.temperature is not None:
            body["temperature"] = request.temperature
        if request.top and self.abilities.top:
            chat = {"logprobs": True, "top_logprobs": self.abilities.top}
            body |= chat if self.abilities.path == CHAT else {"logprobs": self.abilities.top}
        body |= {**self.dialect.neutral, **self.abilities.told, **self.switch}
        body |= self.dialect.endless if request.endless else {}
        return body | {self.dialect.name(name): value for name, value in request.options.items()}

    def _score_prompts(
        self, texts: Sequence[tuple[ServerAnswer, str]], concurrency: int
    ) -> list[tuple[TokenPlace, ...] | Failed]:
        options = {"prompt_logprobs": self.abilities.top}
        requests = [
            EndpointRequest((*text.prompt_ids, *text.ids), 1, f"{tag}/score", top=False, options=options)
            for text, tag in texts
        ]
        scored: list[tuple[TokenPlace, ...] | Failed] = []
        for (text, _), reply in zip(texts, self.complete(requests, concurrency), strict=True):
            if isinstance(reply, ServerAnswer) and len(reply.scored) == len(text.prompt_ids) + len(text.ids):
                rows = reply.scored[len(text.prompt_ids) :]
                scored.append(tuple(self._own(token, row) for token, row in zip(text.ids, rows, strict=True)))
            else:
                scored.append(Failed("no prompt_logprobs" if isinstance(reply, ServerAnswer) else reply.why))
        return scored

    def _own(self, token: int, row: TokenPlace | None) -> TokenPlace:
        """Returns a place of a scored prompt with the prompt's own token."""
        top = () if row is None else row.top
        return TokenPlace(str(token), dict(top).get(str(token)), top[: self.abilities.top])

    def _score_each(
        self, texts: Sequence[tuple[ServerAnswer, str]], concurrency: int
    ) -> list[tuple[TokenPlace, ...] | Failed]:
        requests = [
            EndpointRequest((*text.prompt_ids, *text.ids[:at]), 1, f"{tag}/score/{at}")
            for text, tag in texts
            for at in range(len(text.ids))
        ]
        replies = iter(self.complete(requests, concurrency))
        scored: list[tuple[TokenPlace, ...] | Failed] = []
        for text, _ in texts:
            own = [next(replies) for _ in text.ids]
            wrong = next((each for each in own if not isinstance(each, ServerAnswer) or not each.places), None)
            if wrong is None:
                rows = [each.places[0] for each in own if isinstance(each, ServerAnswer)]
                scored.append(tuple(self._own(token, row) for token, row in zip(text.ids, rows, strict=True)))
            else:
                scored.append(Failed("no logprobs" if isinstance(wrong, ServerAnswer) else wrong.why))
        return scored


def _of_prompt(reply: Reply, prompt: Prompt) -> Reply:
    if isinstance(reply, ServerAnswer) and isinstance(prompt, tuple) and not reply.prompt_ids:
        return replace(reply, prompt_ids=prompt)
    return reply


def probed(side: Side, prompt: str) -> Side | Refused | Failed:
    """Returns the side with its abilities, found out by a few requests."""
    reply: Reply = Failed("nothing was asked")
    for path in ("completions", CHAT):
        for top in (*_TOPS, 0):
            able = replace(side, abilities=Abilities(path, top, side.dialect.told))
            (reply,) = able.complete([EndpointRequest(prompt, _PROBED, f"probe/{top}")], 1)
            if isinstance(reply, ServerAnswer) and (reply.places or not top):
                return _with_reference(able, prompt, reply)
            if isinstance(reply, Failed):
                return reply
            if isinstance(reply, Refused) and reply.why[:3] in ("401", "403"):
                return reply
    return reply if isinstance(reply, Refused) else Failed("it answers with neither a text nor a refusal")


def answering(side: Side, prompt: str) -> Side | Refused | Failed:
    """Returns the side with the path of its completions, found out by a request or two."""
    refused: Refused | None = None
    for path in ("completions", CHAT):
        able = replace(side, abilities=Abilities(path, told=side.dialect.told))
        (reply,) = able.complete([EndpointRequest(prompt, _PROBED, f"probe/{path}", top=False)], 1)
        if isinstance(reply, ServerAnswer):
            return able
        if isinstance(reply, Failed) or reply.why[:3] in ("401", "403"):
            return reply
        refused = reply
    return refused or Failed("nothing was asked")


def _with_reference(side: Side, prompt: str, seen: ServerAnswer) -> Side:
    """Returns the side with the best source of the target's distribution that works."""
    able, text = side.abilities, seen
    if able.top and able.path != CHAT and seen.ids:
        text = replace(seen, prompt_ids=seen.prompt_ids or tokenized(side, prompt))
        kinds = (Reference.PROMPT, Reference.EACH) if side.dialect.scores else (Reference.EACH,)
        for kind in kinds if text.prompt_ids else ():
            scoring = replace(side, abilities=replace(able, reference=kind))
            (places,) = scoring.score([(text, f"probe/{kind.name.lower()}")], 1)
            if not isinstance(places, Failed) and all(place.top for place in places):
                return scoring
    return replace(side, abilities=replace(able, reference=Reference.INLINE if able.top else Reference.NONE))


def tokenized(side: Side, prompt: str) -> tuple[int, ...]:
    """Returns the ids of a prompt by llama.cpp's ``/tokenize``, nothing where there is none."""
    try:
        tokens = json.loads(side.client.get("/tokenize", {"content": prompt, "add_special": True}))["tokens"]
        return tuple(map(int, tokens))
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return ()
