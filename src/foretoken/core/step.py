"""Output of one decode step, which statistics, streams, controllers and benchmarks read, and acceptance by position."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from foretoken.core.draft import Draft
from foretoken.core.verdict import Verdict


@dataclass(slots=True)
class PositionCounts:
    """Steps by draft position. Entry i of both lists belongs to position i."""

    # number of steps that drafted a token at the position, an expected number where steps are expected
    drafted: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)  # number of those steps that accepted it

    def add(self, drafted: int, accepted: int) -> None:
        """Counts one step with drafts at ``drafted`` positions, of which the first ``accepted`` were accepted."""
        self._extend(drafted)
        for position in range(drafted):
            self.drafted[position] += 1
        for position in range(accepted):
            self.accepted[position] += 1

    def merge(self, other: "PositionCounts") -> None:
        self._extend(len(other.drafted))
        for position, (drafted, accepted) in enumerate(zip(other.drafted, other.accepted, strict=True)):
            self.drafted[position] += drafted
            self.accepted[position] += accepted

    @property
    def rates(self) -> tuple[float, ...]:
        """Accepted over drafted by position, 0 where nothing was drafted."""
        return tuple(a / d if d else 0.0 for a, d in zip(self.accepted, self.drafted, strict=True))

    def _extend(self, length: int) -> None:
        missing = length - len(self.drafted)
        if missing > 0:
            self.drafted += [0] * missing
            self.accepted += [0] * missing


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of one step, shared by all its sequences."""

    propose: float  # time of drafting
    score: float  # time of the target's forward pass
    verify: float  # time of sampling distributions and verification
    commit: float  # time of committing tokens to the KV cache
    batch: int  # number of sequences that emitted tokens
    prompt_rows: int = 0  # number of prompt tokens computed in the step beside the one row that each sequence needs
    missed_tokens: int = 0  # number of tokens of drafting sequences that the proposer had not processed before the step

    @property
    def total(self) -> float:
        return self.propose + self.score + self.verify + self.commit


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Output of one sequence in one step."""

    sequence: int  # identifier of the sequence
    position: int  # number of tokens that the sequence had generated before the step
    draft: Draft  # the draft that was verified
    verdict: Verdict  # the verifier's decision
    tokens: tuple[int, ...]  # emitted tokens: the accepted path and the target's token, cut at EOS, stop or max_tokens
    timings: Timings
    # ``"stop"``, ``"length"``, ``"abort"``, ``"error"``, one of ``acceptance_run.KINDS``, or None if it is unfinished
    finish_reason: str | None = None
    budget: int = 0  # number of draft tokens that the proposer was asked for
    # kind of an improbable run of acceptance that became long in this step, one of ``acceptance_run.KINDS``
    alarm: str | None = None

    @property
    def levels(self) -> int:
        """Passes of the draft model, or draft tokens that were asked for if the draft does not say."""
        return self.budget if self.budget == 0 or self.draft.levels is None else self.draft.levels

    @property
    def accepted(self) -> int:
        """Number of draft tokens that were emitted."""
        return min(len(self.verdict.path), len(self.tokens))

    @property
    def rejected(self) -> tuple[int, ...]:
        """The longest rejected path below the last accepted node; empty if nothing was rejected."""
        path, draft = self.verdict.path, self.draft
        if self.accepted < len(path):
            return ()  # the sequence ended inside the accepted path
        at = path[-1] if path else -1
        below = [node for node in range(len(draft)) if node > at and (at < 0 or at in draft.path(node))]
        if not below:
            return ()
        deepest = max(below, key=lambda node: draft.depths[node])
        return draft.path(deepest)[len(path) :]


def is_decode_only(steps: Sequence[StepOutput]) -> bool:
    """Returns whether a step had no prefill, so that its time is that of decoding alone."""
    return not (steps and steps[0].timings.prompt_rows) and min([step.position for step in steps], default=1) > 0
