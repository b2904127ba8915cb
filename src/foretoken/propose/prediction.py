"""Predicted outputs (OpenAI): drafts from a reference text that the client expects the output to follow, with edits."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.propose.base import BuildContext, Method, Proposer
from foretoken.propose.tree import candidate_tree

Tokens = tuple[int, ...]

GRAM = 4  # tokens that must agree to be taken for a position anywhere in the reference
AHEAD, BEHIND = 128, 16  # distance from the expected position within which two tokens are enough
MAX_EDIT = 8  # tokens; an edit up to this length may recur, such as a rename, and is replayed
MAX_GAP = 64  # tokens away from the reference after which nothing is drafted until it is met again


@dataclass(frozen=True, slots=True)
class PredictionConfig:
    """Options of following the reference."""

    # where the output replaced a few tokens of the reference, draft the same replacement at later occurrences
    replay_edits: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.replay_edits, bool):
            raise InvalidRequest(f"replay_edits must be true or false, got {self.replay_edits!r}")


@dataclass(slots=True)
class ReferencePosition:
    """Position of an output in its reference."""

    reference: Tokens
    replay: bool = True  # see ``PredictionConfig.replay_edits``
    at: int = 0  # index of the expected token of the reference, or of the one expected when the output diverged
    # output tokens since the output diverged; empty while it follows the reference
    gap: list[int] = field(default_factory=list)
    # pieces of the reference and the output's latest replacement of each
    edits: dict[Tokens, Tokens] = field(default_factory=dict)
    seen: int = 0  # number of output tokens processed
    _ends: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    _grams: dict[Tokens, list[int]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        for end in range(1, len(self.reference) + 1):
            self._ends[self.reference[end - 1]].append(end)
            if end >= GRAM:
                self._grams[self.reference[end - GRAM : end]].append(end)

    def follow(self, tokens: Sequence[int]) -> None:
        """Processes the next output tokens."""
        self.seen += len(tokens)
        for token in tokens:
            if not self.gap and self.at < len(self.reference) and self.reference[self.at] == token:
                if edit := self._edit(self.at):
                    del self.edits[edit[0]]  # the output kept it this time
                self.at += 1
            else:
                self.gap.append(token)
                self._rejoin()

    def draft(self, budget: int) -> Draft:
        """Returns the draft. After a divergence the draft holds several ways in which the output may rejoin."""
        if not self.gap:
            chains = [self._continuation(self.at, budget)]
        elif (edit := self._edit(self.at)) and self._in_progress(edit[1]):
            remainder = edit[1][len(self.gap) :]
            chains = [(*remainder, *self._continuation(self.at + len(edit[0]), budget))[:budget]]
        elif len(self.gap) > MAX_GAP:
            chains = []
        else:
            # Replaced one for one; a token of the gap occurs further on; one token replaced by all; an insertion.
            rejoined = min((end for _, end in self._candidates() if end > self.at), default=self.at)
            starts = dict.fromkeys((self.at + len(self.gap), rejoined, self.at + 1, self.at))
            sizes = (budget - 2 * (budget // 4), budget // 4, budget // 4)
            chains = [self._continuation(start, size) for start, size in zip(starts, sizes, strict=False)]
        weights: dict[Tokens, float] = {}
        for rank, chain in enumerate(chains, 1):
            weights.setdefault(chain, 1.0 / rank)
        return candidate_tree(weights, budget, budget, len(chains)).draft() if any(weights) else Draft.empty()

    def _continuation(self, start: int, count: int) -> Tokens:
        """Returns the reference from ``start`` on, with known edits applied."""
        tokens: list[int] = []
        while len(tokens) < count and start < len(self.reference):
            edit = self._edit(start)
            tokens += edit[1] if edit else self.reference[start : start + 1]
            start += len(edit[0]) if edit else 1
        return tuple(tokens[:count])

    def _edit(self, start: int) -> tuple[Tokens, Tokens] | None:
        """Returns the known edit of the piece that begins at ``start``."""
        for length in sorted({len(piece) for piece in self.edits}, reverse=True):
            piece = self.reference[start : start + length]
            if piece in self.edits:
                return piece, self.edits[piece]
        return None

    def _in_progress(self, replacement: Tokens) -> bool:
        """Returns whether the gap is a prefix of ``replacement``."""
        return tuple(self.gap) == replacement[: len(self.gap)]

    def _rejoin(self) -> None:
        """Resumes at the position in the reference that matches the gap's end, and records what the gap replaced."""
        edit = self._edit(self.at)
        if edit and self._in_progress(edit[1]):
            if len(self.gap) == len(edit[1]):
                self.at += len(edit[0])
                self.gap.clear()
            return
        agreed, end = max(self._candidates(), default=((0, False, 0), -1))
        length = agreed[0]
        if length < 2:
            return
        piece, replacement = self.reference[self.at : end - length], tuple(self.gap[: len(self.gap) - length])
        if self.replay and piece and replacement and max(len(piece), len(replacement)) <= MAX_EDIT:
            self.edits[piece] = replacement
        self.at = end
        self.gap.clear()

    def _candidates(self) -> Iterator[tuple[tuple[int, bool, int], int]]:
        """Yields end positions of pieces of the reference that equal the gap's end, with their preference.

        The longest agreement comes first, then positions ahead of the expected one, then near ones.
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
    """Drafts the client's prediction (``SamplingParams.prediction``) from the output's position in it.

    Drafts are fixed candidates, so a wrong prediction costs only speed. Sequences without a prediction, and those whose
    output has nothing in common with theirs, are decoded plainly. In an encoder-decoder the source stands in for a
    missing prediction: repairs, corrections and rewriting follow their source. Every draft token comes from the
    prediction or repeats an edit of it: over a request the sum of ``StepOutput.accepted`` is OpenAI's
    accepted_prediction_tokens, and the prediction's other tokens are the rejected ones.
    """

    name = "prediction"
    costless = True

    def __init__(self, config: PredictionConfig | None = None) -> None:
        self.config = config or PredictionConfig()
        self._followers: dict[int, ReferencePosition] = {}

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        return [self._draft(c, b) if _reference(c) else Draft.empty() for c, b in zip(contexts, budgets, strict=True)]

    def forget(self, context: Context) -> None:
        self._followers.pop(context.id, None)

    def _draft(self, context: Context, budget: int) -> Draft:
        follower = self._followers.get(context.id)
        if follower is None:
            follower = self._followers[context.id] = ReferencePosition(_reference(context), self.config.replay_edits)
        follower.follow(context.tokens[context.prompt_length + follower.seen :])
        return follower.draft(budget) if budget > 0 else Draft.empty()


def _reference(context: Context) -> Tokens:
    return context.prediction or context.source


def build(config: PredictionConfig, build_context: BuildContext) -> Prediction:
    return Prediction(config)


METHOD = Method(PredictionConfig, build, tokens=32)
