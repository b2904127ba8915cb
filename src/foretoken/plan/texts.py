"""Texts that the target samples after the prompts, and the logits of all their tokens in one pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.context import Context
from foretoken.core.distributions import Law
from foretoken.core.draft import Draft
from foretoken.core.history import History
from foretoken.core.streams import SeedDomain, Streams, derived_seed
from foretoken.engine.prompts import TokenizedPrompt
from foretoken.models.base import Model, Scores

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
    def of(cls, context: Context, limit: int) -> SampledText:
        """Returns the completion of a context so far."""
        at = context.prompt_length
        return cls(tuple(context.tokens[:at]), tuple(context.tokens[at:]), limit, context.source)

    @property
    def whole(self) -> tuple[int, ...]:
        """Prompt and completion."""
        return self.prompt + self.tokens

    @property
    def start(self) -> TokenizedPrompt:
        """The prompt."""
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
