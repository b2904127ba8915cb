"""One decode step on tables small enough to enumerate, made of production parts where they exist.

Distributions come from ``SamplingLaw`` with each node's own history, the verifier from ``choose``, its randomness from
``stream_for``. Only the networks are tables and the proposers a few lines each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import torch
from torch import Tensor

from foretoken.core.context import Context, Exactness
from foretoken.core.distributions import Law
from foretoken.core.draft import Draft, Sampled, TopPlusSampled, WithoutReplacement
from foretoken.core.history import History
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Purpose, Stream, Streams
from foretoken.verify import Verifier, choose, stream_for

from .enumerate import Branching, Rest, Text, autoregressive_law, exact_law, total_variation
from .enumerate import Law as TextLaw

Table = Callable[[Text], Tensor]  # all tokens so far -> logits [V]
Propose = Callable[[Context, int], Draft]
Cut = Callable[[Text, Text], Text]  # (text so far, what a verdict adds) -> what is emitted of it
Shape = Callable[[Text, Text], int]  # (path to a node, all tokens sampled so far) -> its number of children
PROMPT: Text = (0, 1)
PLAIN = SamplingLaw()


def table(
    vocab: int, seed: int, sharpness: float = 1.0, zeros: float = 0.0, dtype: torch.dtype = torch.float64
) -> Table:
    """Random logits for every history; each is -inf with probability ``zeros``, but never all of a row."""

    @cache
    def row(tokens: Text) -> Tensor:
        rng = np.random.default_rng((seed, *tokens))
        logits = rng.normal(scale=sharpness, size=vocab)
        barred = rng.random(vocab) < zeros
        barred[rng.integers(vocab)] = False
        logits[barred] = -np.inf
        return torch.tensor(logits, dtype=dtype)

    return row


def constant(*probs: float, dtype: torch.dtype = torch.float64) -> Table:
    """The same law after every history."""
    logits = torch.tensor(probs, dtype=torch.float64).log().to(dtype)
    return lambda tokens: logits


def row_of(model: Table, law: Law, context: Context, path: Sequence[int] = ()) -> Tensor:
    """The law of ``model`` below ``path``, [V]."""
    return _row(model, law, tuple(context.tokens), context.prompt_length, tuple(path))


@lru_cache(maxsize=100_000)  # an enumeration asks for the same rows once per branch
def _row(model: Table, law: Law, tokens: Text, prompt_length: int, path: Text) -> Tensor:
    return law.probs(model((*tokens, *path))[None], [History(tokens, prompt_length, path)])[0]


@dataclass(frozen=True)
class Pair:
    """Inputs of one enumeration; mistakes are planted by replacing one of them."""

    target: Table
    propose: Propose
    law: Law = PLAIN
    exactness: Exactness = Exactness.DISTRIBUTION
    rejection: str = "block"
    budget: Callable[[int], int] = lambda generated: 3
    cut: Cut = lambda text, added: added
    verifier: Verifier | None = None
    target_rows: Callable[[Context, Draft, Table], Tensor] | None = None
    stream: Callable[[Exactness, Streams, int], Stream] = stream_for

    def emit(self, text: Text, streams: Branching | Streams) -> Text:
        """Runs one decode step after ``text``: budget, draft, forward pass, distributions, verify, cut."""
        return self._verified(text, *self._drafted(text, streams), streams)

    def step(self, text: Text, streams: Branching) -> Rest[Text]:
        """The same, for enumerations: how a draft is verified branches without drafting it again."""
        draft, rows = self._drafted(text, streams)
        return Rest(lambda rest: self._verified(text, draft, rows, rest))

    def _context(self, text: Text, streams: Branching | Streams) -> Context:
        return Context(0, [*PROMPT, *text], len(PROMPT), self.law, streams, self.exactness)  # type: ignore[arg-type]

    def _drafted(self, text: Text, streams: Branching | Streams) -> tuple[Draft, Tensor]:
        """A draft, and the target's rows."""
        context = self._context(text, streams)
        draft = self.propose(context, self.budget(len(text)))
        return draft, (self.target_rows or target_rows)(context, draft, self.target)

    def _verified(self, text: Text, draft: Draft, rows: Tensor, streams: Branching | Streams) -> Text:
        context = self._context(text, streams)
        verifier = self.verifier or choose(draft.law, self.exactness, self.rejection)
        verdict = verifier(draft, rows, self.stream(self.exactness, context.streams, context.generated))
        return self.cut(text, (*(draft.ids[i] for i in verdict.path), verdict.token))

    def text(self, seed: int, length: int) -> Text:
        """The text of one request with ``seed``, through the real ``Streams``."""
        text: Text = ()
        while len(text) < length:
            text += self.emit(text, Streams(seed))
        return text[:length]

    def reference(self, length: int, ended: Callable[[Text], bool] = lambda text: False) -> TextLaw:
        """The target's distribution without drafts: every token follows committed ones."""

        def row(text: Text) -> Tensor:
            tokens = [*PROMPT, *text]
            return self.law.probs(self.target(tuple(tokens))[None], [History(tokens, len(PROMPT))])[0]

        return autoregressive_law(row, length, ended)

    def gap(self, length: int, ended: Callable[[Text], bool] = lambda text: False) -> float:
        """Total variation between what is emitted and what the target alone would emit."""
        return total_variation(exact_law(self.step, length, ended), self.reference(length, ended))


def target_rows(context: Context, draft: Draft, target: Table) -> Tensor:
    """[n+1, V]: the target's logits at the root and every node, each with its own history."""
    return _rows(target, context.law, tuple(context.tokens), context.prompt_length, draft.ids, draft.parents)


@lru_cache(maxsize=100_000)
def _rows(target: Table, law: Law, tokens: Text, prompt_length: int, ids: Text, parents: Text) -> Tensor:
    draft = Draft.tree(ids, parents)
    context = Context(0, list(tokens), prompt_length, law, Streams(0))
    return law.probs(node_logits(context, draft, target), context.histories(draft))


def node_logits(context: Context, draft: Draft, target: Table) -> Tensor:
    """[n+1, V]: what a pass over the draft returns."""
    paths = [(), *(tuple(draft.ids[i] for i in draft.path(node)) for node in range(len(draft)))]
    return torch.stack([target((*context.tokens, *path)) for path in paths])


# Proposers


def drawn(model: Table, law: Law | None = None, stop: Callable[[Tensor], bool] = lambda q: False) -> Propose:
    """A chain sampled from the draft; ``stop`` may end it early, by q before anything is sampled from it."""

    def propose(context: Context, budget: int) -> Draft:
        stream = context.streams.private(Purpose.DRAFT, context.generated)
        tokens: list[int] = []
        rows: list[Tensor] = []
        while len(tokens) < budget:
            q = row_of(model, law or context.law, context, tokens)
            if stop(q):
                break
            tokens.append(stream.categorical(q, index=len(tokens)))
            rows.append(q)
        return Draft.chain(tokens, Sampled(torch.stack(rows))) if rows else Draft.empty()

    return propose


def argmax(model: Table) -> Propose:
    """A chain of the draft's most probable tokens: fixed candidates."""

    def propose(context: Context, budget: int) -> Draft:
        tokens: list[int] = []
        for _ in range(budget):
            tokens.append(int(model((*context.tokens, *tokens)).argmax()))
        return Draft.chain(tokens)

    return propose


def fixed_tree(tokens: Sequence[int], parents: Sequence[int]) -> Propose:
    """The same tree in every step."""
    return lambda context, budget: Draft.tree(tokens, tuple(parents))


def drawn_tree(model: Table, widths: Sequence[int], replace: bool, law: Law | None = None) -> Propose:
    """``widths[d]`` siblings below every node of depth d, sampled i.i.d. or one after another without replacement."""
    return shaped_tree(model, _by_level(widths), replace, law)


def shaped_tree(model: Table, shape: Shape, replace: bool, law: Law | None = None) -> Propose:
    """As ``drawn_tree``; ``shape`` gives the number of siblings below a node before any of them is sampled."""

    def children(q: Tensor, width: int, draw: Callable[[Tensor], int]) -> list[int]:
        tokens: list[int] = []
        left, some = _without(q, ())
        while len(tokens) < width and some:
            tokens.append(draw(left))
            if not replace:
                left, some = _without(q, tuple(tokens))
        return tokens

    return _grown(model, shape, children, Sampled if replace else WithoutReplacement, law)


def top_plus_tree(model: Table, widths: Sequence[int], law: Law | None = None) -> Propose:
    """All but the last of the siblings are the most probable tokens, the last is sampled from the rest."""

    def children(q: Tensor, width: int, draw: Callable[[Tensor], int]) -> list[int]:
        tokens = _top(q, width - 1)
        left, some = _without(q, tokens)
        # With nothing left to draw from, the last sibling is one more fixed candidate.
        return [*tokens, draw(left) if some else int(q.argmin())]

    return _grown(model, _by_level(widths), children, TopPlusSampled, law)


@lru_cache(maxsize=100_000)  # rows come from the cache above, so they are the same tensors in every branch
def _without(q: Tensor, tokens: Text) -> tuple[Tensor, bool]:
    """q with 0 at ``tokens``, and whether anything is left."""
    left = q.clone()
    left[list(tokens)] = 0.0
    return left, bool(left.sum() > 0)


@lru_cache(maxsize=100_000)
def _top(q: Tensor, count: int) -> Text:
    return tuple(q.topk(count).indices.tolist())


def _by_level(widths: Sequence[int]) -> Shape:
    return lambda path, drawn: widths[len(path)] if len(path) < len(widths) else 0


def _grown(
    model: Table,
    shape: Shape,
    children: Callable[[Tensor, int, Callable[[Tensor], int]], list[int]],
    kind: type[Sampled] | type[WithoutReplacement] | type[TopPlusSampled],
    law: Law | None,
) -> Propose:
    """Breadth first, node by node; row i + 1 of q is node i's, -1 if nothing was sampled from it."""

    def propose(context: Context, budget: int) -> Draft:
        stream = context.streams.private(Purpose.DRAFT, context.generated)
        tokens: list[int] = []
        parents: list[int] = []
        rows: list[Tensor] = []
        waiting: list[tuple[int, Text]] = [(-1, ())]
        for node, path in waiting:
            width = shape(path, tuple(tokens))
            q = row_of(model, law or context.law, context, path)
            rows.append(q if width else torch.full_like(q, -1.0))
            draws = iter(range(len(tokens), len(tokens) + width))
            for token in children(q, width, lambda w: stream.categorical(w, index=next(draws))) if width else ():  # noqa: B023
                waiting.append((len(tokens), (*path, token)))
                tokens.append(token)
                parents.append(node)
        if not tokens:
            return Draft.empty()
        return Draft(tuple(tokens), tuple(parents), kind(torch.stack(rows)))

    return propose
