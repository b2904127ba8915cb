"""What the target writes after the user's prompts, and what it says of every token of it in one pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.control.base import Controller
from foretoken.core.context import Context
from foretoken.core.distributions import Law
from foretoken.core.draft import Draft
from foretoken.core.streams import SeedDomain, Streams, derived_seed
from foretoken.engine.loop import Engine
from foretoken.engine.prompts import TokenizedPrompt
from foretoken.engine.stopping import Length
from foretoken.models.base import Model
from foretoken.propose.base import Proposer

Start = TokenizedPrompt | Sequence[int]  # a prompt as it was read, or the tokens alone

TOGETHER = 8  # sequences that share a pass where nothing depends on it
_PIECE = 64  # tokens of a text that share a pass


def silent() -> None:
    """Who wants no progress."""


@dataclass(frozen=True, slots=True)
class SampledText:
    """One completion, a draw of the target's. limit: tokens it could have had; fewer where it ended by itself.

    source: what an encoder read for it.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    limit: int
    source: tuple[int, ...] = ()

    @classmethod
    def of(cls, context: Context, limit: int) -> SampledText:
        """What has been written so far."""
        at = context.prompt_length
        return cls(tuple(context.tokens[:at]), tuple(context.tokens[at:]), limit, context.source)

    @property
    def whole(self) -> tuple[int, ...]:
        return self.prompt + self.tokens

    @property
    def start(self) -> TokenizedPrompt:
        return self.after(0)

    def after(self, count: int) -> TokenizedPrompt:
        """A prompt to go on from ``count`` of its tokens."""
        return TokenizedPrompt(None, [*self.prompt, *self.tokens[:count]], self.source)


def contexts(prompts: Sequence[Start], law: Law, seed: int, first: int = 0) -> list[Context]:
    """One for each prompt, with random numbers of its own; identifiers count from ``first``."""
    starts = [
        prompt if isinstance(prompt, TokenizedPrompt) else TokenizedPrompt(None, list(prompt)) for prompt in prompts
    ]
    return [
        Context(
            first + i, list(start.tokens), len(start.tokens), law, Streams(derived_seed(SeedDomain.PLAN, seed, i)),
            source=start.source,
        )
        for i, start in enumerate(starts)
    ]  # fmt: skip


def write(
    target: Model,
    prompts: Sequence[Start],
    law: Law,
    limit: int,
    eos: Collection[int] = (),
    seed: int = 0,
    tick: Callable[[], None] = silent,
) -> list[SampledText]:
    """Plain decoding of every prompt, ``limit`` tokens at most. tick: called for each finished text."""
    engine = Engine(target, Proposer(), Controller(), max_sequences=TOGETHER)
    made = contexts(prompts, law, seed)
    for step in engine.run((context, Length(limit, eos)) for context in made):
        if step.finish_reason is not None:
            tick()
    return [SampledText.of(context, limit) for context in made]


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of a text. logits: [n, V], what was said before each. taps: see ``told``."""

    tokens: tuple[int, ...]
    logits: Tensor
    taps: dict[int, Tensor]


@torch.inference_mode()
def told(model: Model, text: SampledText, taps: Sequence[int] = ()) -> Iterator[Piece]:
    """Teacher-forced: what ``model`` says of ``text``, piece by piece, the prompt's hidden states with the first.

    taps of all pieces: [len(whole) - 1, H], at every token but the last, which nothing follows.
    """
    known = 1 if taps else len(text.prompt)  # of rows that others computed there are no states
    handle = model.open(text.prompt[:known], text.source)
    try:
        model.commit([handle], [text.prompt[known:]])
        for start in range(0, len(text.tokens), _PIECE):
            tokens = text.tokens[start : start + _PIECE]
            (scores,) = model.score([handle], [Draft.chain(tokens[:-1])], taps)
            yield Piece(tokens, scores.logits, scores.taps)
            model.commit([handle], [tokens])
    finally:
        model.close(handle)


def laws(text: SampledText, pieces: Iterator[Piece], law: Law) -> Iterator[Tensor]:
    """[n, V] for each piece: the law of each token after those before it."""
    context = Context(0, list(text.prompt), len(text.prompt), law, Streams(0))
    for piece in pieces:
        histories = [context.history(piece.tokens[:i]) for i in range(len(piece.tokens))] if law.needs_history else ()
        yield law.probs(piece.logits, histories)
        context.tokens.extend(piece.tokens)
