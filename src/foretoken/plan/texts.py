"""Texts that the target samples after the prompts, their logits in one pass, and counts of steps on them."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from foretoken.core.context import Context
from foretoken.core.distributions import Law
from foretoken.core.draft import Draft
from foretoken.core.history import History
from foretoken.core.step import PositionCounts, StepOutput
from foretoken.core.streams import SeedDomain, Streams, derived_seed
from foretoken.engine.prompts import TokenizedPrompt
from foretoken.models.base import Model, Scores
from foretoken.plan.statistics import ratio_interval

Prompt = TokenizedPrompt | Sequence[int]
"""A tokenized prompt, or its token ids."""

BATCH = 8  # sequences per pass where results do not depend on it
_CHUNK = 64  # tokens of a text per teacher-forced pass


@dataclass(frozen=True, slots=True)
class SampledText:
    """One completion that the target sampled, in token ids."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]  # the completion
    limit: int  # greatest number of tokens; the completion is shorter where it ended by itself
    source: tuple[int, ...] = ()  # the encoder's input, for encoder-decoders

    @classmethod
    def of(cls, context: Context, limit: int) -> "SampledText":
        """Returns the completion of a context so far."""
        at = context.prompt_length
        return cls(tuple(context.tokens[:at]), tuple(context.tokens[at:]), limit, context.source)

    @property
    def whole(self) -> tuple[int, ...]:
        return self.prompt + self.tokens

    @property
    def start(self) -> TokenizedPrompt:
        return self.after(0)

    def after(self, count: int) -> TokenizedPrompt:
        """Returns a prompt that includes the first ``count`` tokens of the completion."""
        return TokenizedPrompt(None, [*self.prompt, *self.tokens[:count]], self.source)


def repeated(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Returns ``count`` prompts, the first ones again where there are fewer."""
    return [prompts[i % len(prompts)] for i in range(count)]


def contexts(prompts: Sequence[Prompt], law: Law, seed: int, first: int = 0) -> list[Context]:
    """Returns a context with its own random streams for each prompt. Ids count from ``first``."""
    result = []
    for i, prompt in enumerate(prompts):
        start = prompt if isinstance(prompt, TokenizedPrompt) else TokenizedPrompt(None, list(prompt))
        streams = Streams(derived_seed(SeedDomain.PLAN, seed, i))
        context = Context(first + i, list(start.tokens), len(start.tokens), law, streams, source=start.source)
        result.append(context)
    return result


@torch.inference_mode()
def teacher_forced(model: Model, text: SampledText, taps: Sequence[int] = ()) -> Iterator[Scores]:
    """Computes the model's logits before each token of a text, chunk by chunk.

    taps: layers whose hidden states are returned. Those of all chunks together are [len(whole) - 1, H], one row for
    each token but the last; the first chunk includes the prompt's.
    """
    known = 1 if taps else len(text.prompt)  # a prefix-cache hit would leave rows without hidden states
    handle = model.open(text.prompt[:known], text.source)
    try:
        model.commit([handle], [text.prompt[known:]])
        for start in range(0, len(text.tokens), _CHUNK):
            tokens = text.tokens[start : start + _CHUNK]
            (scores,) = model.score([handle], [Draft.chain(tokens[:-1])], taps)
            yield scores
            model.commit([handle], [tokens])
    finally:
        model.close(handle)


def text_logits(model: Model, text: SampledText) -> Tensor:
    """Returns the model's logits before each token of a text of n tokens, [n, V]."""
    return torch.cat([chunk.logits for chunk in teacher_forced(model, text)])


def text_distributions(logits: Tensor, text: SampledText, law: Law) -> Tensor:
    """Returns the sampling distribution of each token of a text given those before it, [n, V]. logits: [n, V]."""
    prompt, tokens = list(text.prompt), text.tokens
    histories = [History(prompt, len(prompt), tokens[:at]) for at in range(len(tokens))] if law.needs_history else []
    return law.probs(logits, histories)


@dataclass(slots=True)
class StepTally:
    """Steps of one request after its prefill. Expected values where the estimator computes expectations."""

    tokens: float = 0.0  # emitted
    steps: float = 0.0
    positions: PositionCounts = field(default_factory=PositionCounts)  # steps by draft position
    sizes: dict[int, float] = field(default_factory=dict)  # steps by number of draft tokens

    def add(self, step: StepOutput) -> None:
        """Counts one step, unless it is the prompt's."""
        if step.position == 0:
            return
        self.tokens += len(step.tokens)
        self.steps += 1
        self.sizes[len(step.draft)] = self.sizes.get(len(step.draft), 0.0) + 1.0
        self.positions.add(max(step.draft.depths, default=0), step.accepted)


@dataclass(frozen=True, slots=True)
class AcceptanceEstimate:
    """Tokens, steps and acceptance of one proposer at one draft length on the sample."""

    tallies: tuple[StepTally, ...]  # one per text
    estimator: str  # "distribution", "text" or "steps", see ``replay``
    texts: tuple[SampledText, ...] = ()  # those that the steps sampled, where they did not run on the sample's
    draws: int = 1  # number of such texts of each request

    @property
    def tokens(self) -> list[float]:
        """Emitted tokens of each text that had a step."""
        return [tally.tokens for tally in self.tallies if tally.steps > 0]

    @property
    def steps(self) -> list[float]:
        """Steps of each text that had one."""
        return [tally.steps for tally in self.tallies if tally.steps > 0]

    @property
    def tokens_per_pass(self) -> float:
        """Emitted tokens over target passes, without prefill. 1 if there are no steps."""
        return sum(self.tokens) / sum(self.steps) if self.steps else 1.0

    @property
    def requests(self) -> int:
        """Number of requests that had a step."""
        return len(self.steps) // self.draws

    @property
    def spread(self) -> float:
        """Half the width of the interval of log(tokens per pass) for another sample of as many requests.

        Infinite for one request. The other sample has one text per request, whose variance is that of the mean over all
        draws times their number.
        """
        if self.requests < 2:
            return math.inf
        return math.sqrt(1 + self.draws) * ratio_interval(self.tokens, self.steps).width

    def times(self, factor: float) -> "AcceptanceEstimate":
        """Returns the estimate with tokens per pass multiplied by ``factor``, but at least 1, by scaling the steps."""
        factor = max(factor, 1.0 / self.tokens_per_pass)
        return replace(self, tallies=tuple(replace(each, steps=each.steps / factor) for each in self.tallies))

    @property
    def sizes(self) -> dict[int, float]:
        """Fractions of the steps by number of draft tokens. No token is drafted where there are no steps."""
        counts: dict[int, float] = defaultdict(float)
        for size, count in (pair for tally in self.tallies for pair in tally.sizes.items()):
            counts[size] += count
        total = sum(counts.values())
        return {size: count / total for size, count in sorted(counts.items())} or {0: 1.0}

    @property
    def acceptance(self) -> tuple[float, ...]:
        """By position: steps that accepted so deep over steps that drafted so deep."""
        total = PositionCounts()
        for tally in self.tallies:
            total.merge(tally.positions)
        return total.rates
