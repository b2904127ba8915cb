"""Inputs of the checks of an endpoint: its sides and prompts, the sizes of the samples, and a checkpoint."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from foretoken.audit.subject import Check, CheckOutcome
from foretoken.core.errors import InvalidRequest
from foretoken.models.loading import load_model
from foretoken.plan.texts import SampledText, text_logits
from foretoken.probe.answers import Failed, Reply, ServerAnswer, TokenPlace
from foretoken.probe.server import EndpointRequest, Prompt, Reference, Side

MIN_BUDGET = 4_000  # tokens of the smallest audit
OBJECTS, OBJECT_TOKENS = 4, 48  # JSON texts of each side
_TUNED = 7  # parameters that change the sampling distribution
_SMALL, _LARGE = 10_000, 100_000  # budgets from which texts are longer
_PARITY_SHARE, _TUNED_SHARE = 0.15, 0.25
_BASE_TEXTS = 26  # greedy texts that the other parameters of one side take, about
_TOP = 50  # likeliest tokens of a checkpoint that are cells of their own


class Way(StrEnum):
    """Ways to generate greedy texts."""

    ALONE = "alone"
    AGAIN = "again"
    CROWD = "in a crowd"
    PENALIZED = "with penalties"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of texts, and of tokens in each."""

    parity_prompts: int  # prompts whose greedy texts are compared
    parity_tokens: int
    sampled: int  # texts sampled with speculation
    sampled_plain: int  # without it, to test the reference
    sampled_tokens: int
    tuned: int  # texts for each sampling parameter, on each side
    tuned_tokens: int

    @classmethod
    def of(cls, tokens: int, sides: int, each: bool) -> "Sizes":
        """Returns the sizes for a budget in ``tokens``. Raises InvalidRequest if it is too small for an audit.

        sides: 1 if there is no plain side, else 2. each: whether a scored token takes a request of its own.
        """
        if tokens < MIN_BUDGET:
            raise InvalidRequest(f"--budget must be at least {MIN_BUDGET:,} tokens for an endpoint, got {tokens:,}")
        parity = 16 if tokens < _SMALL else 32 if tokens < _LARGE else 64
        prompts = _within(tokens * _PARITY_SHARE / (7 * parity), 4, 16)
        length, price = 24 if tokens < _LARGE else 32, 2 if each else 1
        tuned = _within(tokens * _TUNED_SHARE / (_TUNED * sides * length * price), 3, 64)
        fixed = sides * (_BASE_TEXTS * parity + OBJECTS * OBJECT_TOKENS) + (7 if sides == 2 else 1) * prompts * parity
        left = tokens - fixed - _TUNED * sides * tuned * length * price
        sampled = _within(left / (length * price), 3, 100_000)
        plain = sampled // 3 if sides == 2 else 0
        return cls(prompts, parity, sampled - plain, plain, length, tuned, length)

    def costs(self, sides: int, prompt_tokens: float, each: bool, scored: bool) -> dict[str, Mapping[str, int]]:
        """Returns estimated requests, prompt tokens and generated tokens by check. sides, each: as for ``of``.

        prompt_tokens: of one prompt. scored: whether sampled texts are sent back to be scored.
        """

        def cost(texts: int, tokens: int, sampled: bool = False) -> Mapping[str, int]:
            again = 0 if not sampled else texts * tokens if each else texts if scored else 0
            read = prompt_tokens + (tokens / 2 if each else tokens)  # of a text that is sent back
            prompts = round(texts * prompt_tokens) + round(again * read)
            return {"requests": texts + again, "prompt_tokens": prompts, "tokens": texts * tokens + again}

        return {
            "greedy parity": cost(7 * self.parity_prompts if sides == 2 else 0, self.parity_tokens),
            "sampled distribution": cost(self.sampled + self.sampled_plain, self.sampled_tokens, True),
            "sampling parameters": cost(_TUNED * sides * self.tuned, self.tuned_tokens, True),
            "other parameters": cost(sides * (_BASE_TEXTS + OBJECTS), self.parity_tokens),
        }


def _within(value: float, minimum: int, maximum: int) -> int:
    return max(minimum, min(maximum, int(value)))


class CheckpointReference:
    """The target's distribution from its checkpoint, computed here. Raises ModelLoadError if it cannot be loaded."""

    def __init__(self, model: str) -> None:
        self.name, self._model = model, load_model(model)

    def places(self, text: ServerAnswer) -> tuple[TokenPlace, ...] | Failed:
        """Returns the positions of a text, tokens named by their ids."""
        if not text.ids or not text.prompt_ids:
            return Failed("the server reports no token ids, which a checkpoint needs")
        highest = max(*text.ids, *text.prompt_ids)
        try:
            logits = text_logits(self._model, SampledText(text.prompt_ids, text.ids, len(text.ids)))
        except (IndexError, ValueError, RuntimeError) as error:
            return Failed(f"the checkpoint cannot read tokens up to {highest}: {error}")
        if highest >= logits.shape[-1]:
            return Failed(f"token {highest} is not in the checkpoint's vocabulary of {logits.shape[-1]}")
        logs = logits.double().log_softmax(-1)
        values, ids = logs.topk(min(_TOP, logs.shape[-1]))
        rows = zip(text.ids, logs, values.tolist(), ids.tolist(), strict=True)
        return tuple(
            TokenPlace(str(token), float(row[token]), tuple((str(i), float(v)) for i, v in zip(best, top, strict=True)))
            for token, row, top, best in rows
        )


@dataclass(frozen=True, slots=True)
class EndpointTask:
    """Inputs of a check."""

    speculative: Side  # the audited side
    plain: Side | None  # the same model without speculation
    prompts: tuple[Prompt, ...]
    sizes: Sizes
    concurrency: int  # requests at a time in a crowd
    level: float  # of significance, of one check
    seed: int  # of all random numbers
    checkpoint: CheckpointReference | None = None

    @property
    def sides(self) -> tuple[Side, ...]:
        """The sides, the plain one first."""
        return (self.speculative,) if self.plain is None else (self.plain, self.speculative)

    @property
    def judge(self) -> Side:
        """The side that reports the target's distribution."""
        return self.plain or self.speculative

    @property
    def reference(self) -> Reference:
        """The source of the target's distribution."""
        return self.judge.reference if self.checkpoint is None else Reference.CHECKPOINT

    def random(self, *purpose: object) -> random.Random:
        """Returns random numbers for one purpose."""
        return random.Random(f"{self.seed}/{purpose}")

    def request(
        self, number: int, tag: str, tokens: int | None = None, temperature: float | None = 0.0, **fields: Any
    ) -> EndpointRequest:
        """Returns a request with a prompt by number, which are cycled. tokens: ``parity_tokens`` by default."""
        length = self.sizes.parity_tokens if tokens is None else tokens
        return EndpointRequest(self.prompts[number % len(self.prompts)], length, tag, temperature, **fields)

    def greedy(self, side: Side, way: Way = Way.ALONE, **options: float) -> list[Reply]:
        """Returns greedy texts, one at a time or in a crowd, which has prompts several times if they are few."""
        count, crowd = self.sizes.parity_prompts, way is Way.CROWD
        total = max(count, self.concurrency) if crowd else count
        requests = [self.request(i, f"greedy/{way}/{i}", options=options) for i in range(total)]
        return side.complete(requests, self.concurrency if crowd else 1)[:count]

    def places(self, side: Side, texts: Sequence[tuple[ServerAnswer, str]]) -> list[tuple[TokenPlace, ...] | Failed]:
        """Returns the positions of (text, tag) of a side with the target's log-probabilities without any filter."""
        if self.checkpoint is not None:
            return [self.checkpoint.places(text) for text, _ in texts]
        judge = side if self.reference is Reference.INLINE else self.judge
        return judge.score([(text, f"{side.name}/{tag}") for text, tag in texts], self.concurrency)


def missing(replies: Sequence[Reply | tuple[TokenPlace, ...]]) -> list[str]:
    """Returns the reasons of the replies that are no answers."""
    return [reply.why for reply in replies if not isinstance(reply, ServerAnswer | tuple)]


def unanswered(name: str, why: Sequence[str], requests: int) -> Check:
    """Returns a check that is inconclusive because requests failed. why: the reasons."""
    numbers = {"failed": len(why), "asked": requests, "first": why[0]}
    return inconclusive(name, f"{len(why)} of {requests} requests got no answer; the first: {why[0]}", numbers)


def inconclusive(name: str, why: str, numbers: Mapping[str, Any] | None = None) -> Check:
    """Returns a check without a verdict."""
    return Check(name, CheckOutcome.INCONCLUSIVE, f"inconclusive, because {why}", numbers or {})
