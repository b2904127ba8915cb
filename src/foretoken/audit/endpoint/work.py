"""What every check of an endpoint receives, and how much it may ask for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.audit.endpoint.checkpoint import CheckpointReference
from foretoken.audit.endpoint.sizes import Sizes
from foretoken.audit.result import Check, CheckOutcome
from foretoken.probe.answers import Failed, Reply, ServerAnswer, TokenPlace
from foretoken.probe.side import EndpointRequest, Prompt, Reference, Side

ALONE, AGAIN, CROWD, PENALIZED = "alone", "again", "in a crowd", "with penalties"
PENALTIES = {"presence_penalty": 1.0, "frequency_penalty": 1.0}  # of greedy texts, which they change much


@dataclass(frozen=True, slots=True)
class EndpointTask:
    """What a check needs.

    Attributes:
        speculative: The audited side.
        plain: The same model without speculation, None if there is no way to have it.
        prompts: Texts, or token ids where the server takes them.
        sizes: How much to generate.
        concurrency: Requests at a time where a crowd is wanted.
        level: Significance level of one check.
        seed: All random numbers of the audit are derived from it.
        checkpoint: The model, computed here.
    """

    speculative: Side
    plain: Side | None
    prompts: tuple[Prompt, ...]
    sizes: Sizes
    concurrency: int
    level: float
    seed: int
    checkpoint: CheckpointReference | None = None

    @property
    def sides(self) -> tuple[Side, ...]:
        """The sides, the plain one first."""
        return (self.speculative,) if self.plain is None else (self.plain, self.speculative)

    @property
    def judge(self) -> Side:
        """The side that tells the target's distribution."""
        return self.plain or self.speculative

    @property
    def reference(self) -> Reference:
        """Where the target's distribution comes from."""
        return self.judge.abilities.reference if self.checkpoint is None else Reference.CHECKPOINT

    def prompt(self, number: int) -> Prompt:
        """Returns a prompt. They are cycled."""
        return self.prompts[number % len(self.prompts)]

    def random(self, *purpose: object) -> random.Random:
        """Returns random numbers that nothing else uses."""
        return random.Random(f"{self.seed}/{purpose}")

    def greedy(self, side: Side, way: str = ALONE) -> list[Reply]:
        """Returns greedy texts, one at a time or ``CROWD``.

        A crowd has prompts several times if they are few, and the first of each counts. ``PENALIZED`` has penalties.
        """
        count, tokens = self.sizes.parity_prompts, self.sizes.parity_tokens
        options = PENALTIES if way == PENALIZED else {}
        requests = [EndpointRequest(self.prompt(i), tokens, f"greedy/{way}/{i}", options=options) for i in range(count)]
        if way != CROWD:
            return side.complete(requests, 1)
        others = range(count, max(count, self.concurrency))
        crowd = [EndpointRequest(self.prompt(i), tokens, f"greedy/{way}/{i}") for i in others]
        return side.complete([*requests, *crowd], self.concurrency)[:count]

    def ask(self, side: Side, requests: Sequence[EndpointRequest]) -> list[Reply]:
        """Returns a reply to each request, asked in a crowd."""
        return side.complete(requests, self.concurrency)

    def places(self, side: Side, texts: Sequence[tuple[ServerAnswer, str]]) -> list[tuple[TokenPlace, ...] | Failed]:
        """Returns the places of texts of a side with the target's log-probabilities without any filter."""
        if self.checkpoint is not None:
            return [self.checkpoint.places(text) for text, _ in texts]
        judge = side if self.reference is Reference.INLINE else self.judge
        return judge.score([(text, f"{side.name}/{tag}") for text, tag in texts], self.concurrency)


def missing(replies: Sequence[Reply | tuple[TokenPlace, ...]]) -> list[str]:
    """Returns why replies are no answers."""
    return [reply.why for reply in replies if not isinstance(reply, ServerAnswer | tuple)]


def because(name: str, why: Sequence[str], asked: int) -> Check:
    """Returns a check that is inconclusive because requests failed."""
    evidence = f"inconclusive, because {len(why)} of {asked} requests got no answer; the first: {why[0]}"
    return Check(name, CheckOutcome.INCONCLUSIVE, evidence, {"failed": len(why), "asked": asked, "first": why[0]})
