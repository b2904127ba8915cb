"""The client's own prediction (OpenAI's predicted outputs): a reference text that the output follows, edits apart."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.propose.base import Method, Proposer, Workshop
from foretoken.propose.continuations import likeliest

Tokens = tuple[int, ...]

GRAM = 4  # so many tokens that agree are taken for the same place wherever in the reference they stand
AHEAD, BEHIND = 128, 16  # how far from the expected place fewer are believed, two at least
SHORT = 8  # an edit of at most so many tokens is a replacement that may come again, such as a rename
HOPELESS = 64  # tokens away from the reference after which nothing is proposed until it is met again


@dataclass(frozen=True, slots=True)
class PredictionConfig:
    """replay_edits: where the text replaced a few tokens of the reference, expect the same at their next occurrence."""

    replay_edits: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.replay_edits, bool):
            raise InvalidRequest(f"replay_edits must be true or false, got {self.replay_edits!r}")


@dataclass(slots=True)
class Follower:
    """Where a text stands in its reference.

    at: the reference's token that is expected next, or was when the text left the reference.
    gap: what the text has had since it left; empty while it follows.
    edits: pieces of the reference and what the text last had in their place.
    """

    reference: Tokens
    replay: bool = True
    at: int = 0
    gap: list[int] = field(default_factory=list)
    edits: dict[Tokens, Tokens] = field(default_factory=dict)
    seen: int = 0
    _ends: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    _grams: dict[Tokens, list[int]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        for end in range(1, len(self.reference) + 1):
            self._ends[self.reference[end - 1]].append(end)
            if end >= GRAM:
                self._grams[self.reference[end - GRAM : end]].append(end)

    def follow(self, tokens: Sequence[int]) -> None:
        """Take in what the text had next."""
        self.seen += len(tokens)
        for token in tokens:
            if not self.gap and self.at < len(self.reference) and self.reference[self.at] == token:
                if edit := self._edit(self.at):
                    del self.edits[edit[0]]  # not replaced this time
                self.at += 1
            else:
                self.gap.append(token)
                self._meet()

    def guess(self, budget: int) -> Draft:
        """What comes next; where the text has left the reference, several ways in which it may come back."""
        if not self.gap:
            chains = [self._ahead(self.at, budget)]
        elif (edit := self._edit(self.at)) and self._under_way(edit[1]):
            rest = edit[1][len(self.gap) :]
            chains = [(*rest, *self._ahead(self.at + len(edit[0]), budget))[:budget]]
        elif len(self.gap) > HOPELESS:
            chains = []
        else:
            # As many tokens replaced as came; one that came stands further on; one replaced by all; something put in.
            met = min((end for _, end in self._places() if end > self.at), default=self.at)
            starts = dict.fromkeys((self.at + len(self.gap), met, self.at + 1, self.at))
            sizes = (budget - 2 * (budget // 4), budget // 4, budget // 4)
            chains = [self._ahead(start, size) for start, size in zip(starts, sizes, strict=False)]
        weights: dict[Tokens, float] = {}
        for rank, chain in enumerate(chains, 1):
            weights.setdefault(chain, 1.0 / rank)
        return likeliest(weights, budget, budget, len(chains)).draft() if any(weights) else Draft.empty()

    def _ahead(self, start: int, count: int) -> Tokens:
        """The reference from ``start`` on, with the known edits made."""
        found: list[int] = []
        while len(found) < count and start < len(self.reference):
            edit = self._edit(start)
            found += edit[1] if edit else self.reference[start : start + 1]
            start += len(edit[0]) if edit else 1
        return tuple(found[:count])

    def _edit(self, start: int) -> tuple[Tokens, Tokens] | None:
        """The known edit of the piece that stands at ``start``."""
        for length in sorted({len(piece) for piece in self.edits}, reverse=True):
            piece = self.reference[start : start + length]
            if piece in self.edits:
                return piece, self.edits[piece]
        return None

    def _under_way(self, replacement: Tokens) -> bool:
        return tuple(self.gap) == replacement[: len(self.gap)]

    def _meet(self) -> None:
        """Go on in the reference where the gap's end stands in it, and remember what the gap replaced."""
        edit = self._edit(self.at)
        if edit and self._under_way(edit[1]):
            if len(self.gap) == len(edit[1]):
                self.at += len(edit[0])
                self.gap.clear()
            return
        agreed, end = max(self._places(), default=((0, False, 0), -1))
        length = agreed[0]
        if length < 2:
            return
        piece, replacement = self.reference[self.at : end - length], tuple(self.gap[: len(self.gap) - length])
        if self.replay and piece and replacement and max(len(piece), len(replacement)) <= SHORT:
            self.edits[piece] = replacement
        self.at = end
        self.gap.clear()

    def _places(self) -> Iterator[tuple[tuple[int, bool, int], int]]:
        """Ends of pieces of the reference that equal the gap's end, with what they are preferred by.

        The longest agreement first, then places ahead of the expected one, then near ones.
        """
        tail = tuple(self.gap[-2 * GRAM :])
        ends = self._ends.get(tail[-1], [])
        near = ends[bisect_left(ends, self.at - BEHIND) : bisect_right(ends, self.at + AHEAD)]
        for end in {*near, *self._grams.get(tail[-GRAM:], ())}:
            length = 1
            while length < min(len(tail), end) and self.reference[end - length - 1] == tail[-length - 1]:
                length += 1
            shift = end - length - self.at
            yield (length, shift >= 0, -abs(shift)), end


class Prediction(Proposer):
    """Drafts what the client predicted (``SamplingParams.prediction``), from where the text stands in it.

    Fixed candidates, so a prediction can be as wrong as it likes. Sequences without one, and those whose text has
    nothing in common with theirs, are decoded plainly. Where nobody said what to expect, it is what an encoder reads:
    much that encoder-decoders are for (repairs, corrections, rewriting) follows its source. Every drafted token is the
    prediction's, or an edit of it that the text has made before: over a request the sum of ``Step.accepted`` is
    OpenAI's accepted_prediction_tokens, and the prediction's other tokens are the rejected ones.
    """

    name = "prediction"
    costless = True

    def __init__(self, config: PredictionConfig | None = None) -> None:
        self.config = config or PredictionConfig()
        self._followers: dict[int, Follower] = {}

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        return [self._guess(c, b) if _reference(c) else Draft.empty() for c, b in zip(contexts, budgets, strict=True)]

    def forget(self, context: Context) -> None:
        self._followers.pop(context.id, None)

    def _guess(self, context: Context, budget: int) -> Draft:
        follower = self._followers.get(context.id)
        if follower is None:
            follower = self._followers[context.id] = Follower(_reference(context), self.config.replay_edits)
        follower.follow(context.tokens[context.prompt_length + follower.seen :])
        return follower.guess(budget) if budget > 0 else Draft.empty()


def _reference(context: Context) -> Tokens:
    return context.prediction or context.source


def build(config: PredictionConfig, workshop: Workshop) -> Prediction:
    """Needs the request's prediction alone."""
    return Prediction(config)


METHOD = Method(PredictionConfig, build, tokens=32)
