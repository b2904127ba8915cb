"""One sequence's part of a decode step. A failure in it ends this sequence alone."""

import logging
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import cache, partial

from foretoken.core.distributions import NodeDistributions
from foretoken.core.draft import Draft
from foretoken.core.errors import NoTokenAllowed
from foretoken.core.step import StepOutput, Timings
from foretoken.core.verdict import Verdict
from foretoken.engine.sequence import ComputedTokens, Sequence
from foretoken.models.base import Model, Scores
from foretoken.models.device_drafts import UnreadDraft
from foretoken.verify import DRAWING, Rule, stream_for

NO_VERDICT = Verdict((), -1)  # of sequences that failed
_log = logging.getLogger(__name__)


def readable(drafts: Iterable[Draft], target: Model, proposer: str) -> list[Draft]:
    """Returns the drafts. One with a token outside the target's vocabulary, a proposer's mistake, becomes empty."""
    result = list(drafts)
    for i, draft in enumerate(result):
        if not draft.unread and not target.reads(draft.ids):
            _warn_of_unknown_tokens(proposer, target.vocab_size)
            result[i] = Draft.empty()
    return result


@cache
def _warn_of_unknown_tokens(proposer: str, vocab_size: int) -> None:
    """Logs the warning once."""
    _log.warning(
        "method %r drafted a token outside the target's vocabulary of %d tokens; such drafts are dropped",
        proposer,
        vocab_size,
    )


@dataclass(frozen=True, slots=True)
class VerifiedDraft:
    """A draft and the verdict on it."""

    sequence: Sequence
    budget: int  # number of draft tokens that the proposer was asked for
    draft: Draft
    scores: Scores  # the target's
    verdict: Verdict | None  # the verifier's decision; None if the sequence failed
    computed: ComputedTokens | None = None  # results of the kernels for the step, if they have chosen its tokens

    @staticmethod
    def of(
        sequence: Sequence, budget: int, draft: Draft, scores: Scores, computed: ComputedTokens | None, rule: Rule
    ) -> "VerifiedDraft":
        """Verifies a draft with the verifier that its law and the request's grade require."""
        if isinstance(draft, UnreadDraft):
            draft = draft.read()
            scores = scores.of_nodes(len(draft))
        if computed is not None:
            verdict = Verdict(computed.path, computed.rows[-1].token)
            return VerifiedDraft(sequence, budget, draft, scores, verdict, computed)
        return VerifiedDraft(sequence, budget, draft, scores, _verdict(sequence, draft, scores, rule))

    def emit(self, max_length: int) -> tuple[int, ...]:
        """Returns the tokens that the sequence emits; none if it fails. max_length: The target's context length."""
        if self.verdict is None:
            return ()
        try:
            return self.sequence.emit(self.draft, self.verdict, self.scores, max_length, self.computed)
        except Exception as error:
            self.sequence.fail(error)
            return ()

    def output(self, position: int, tokens: tuple[int, ...], timings: Timings) -> StepOutput:
        """Returns the sequence's output of the step; ``position`` is its number of generated tokens before."""
        context, verdict = self.sequence.context, self.verdict or NO_VERDICT
        ended, budget, alarm = self.sequence.finish_reason, self.budget, self.sequence.alarm
        return StepOutput(context.id, position, self.draft, verdict, tokens, timings, ended, budget, alarm)


def along(draft: Draft, argmax: Many[int]) -> Verdict | None:
    """Returns the verdict of ``verify.walk`` if every draw is an argmax; None if a row that it reaches has none."""
    nodes, ids, parents = [-1], draft.ids, draft.parents  # all with the accepted prefix: duplicates count as one
    while (token := argmax[nodes[0] + 1]) >= 0:
        below = [i for above in nodes for i, parent in enumerate(parents) if parent == above and ids[i] == token]
        if not below:
            return Verdict(draft.path(nodes[0]), token)
        nodes = below
    return None


def _verdict(sequence: Sequence, draft: Draft, scores: Scores, rule: Rule) -> Verdict | None:
    """Returns the verdict on a draft; None if the sequence ends in this step.

    Where the verdict reaches a node at which no token is possible, the accepted tokens are still emitted, the last of
    them as the target's own, and the next step ends the sequence.
    """
    context, argmax = sequence.context, scores.argmax
    if argmax is not None and rule(draft.law, context.exactness) in DRAWING and (verdict := along(draft, argmax)):
        return verdict
    probs = NodeDistributions(context.law, scores.logits, partial(context.history_at, draft), scores.argmax)
    try:
        stream = stream_for(context.exactness, context.streams, context.generated)
        return rule(draft.law, context.exactness)(draft, probs, stream)
    except NoTokenAllowed as end:
        if path := draft.path(end.row - 1):
            return Verdict(path[:-1], draft.ids[path[-1]])
        sequence.fail(probs.refusal(end.row))
    except Exception as error:
        sequence.fail(error)
    return None
