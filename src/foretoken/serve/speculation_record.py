"""Statistics of one request's speculation, in vLLM's format."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from foretoken.core.step import StepOutput


@dataclass(slots=True)
class SpeculationRecord:
    """Statistics of one request's speculation, in vLLM's format.

    Steps without a draft are left out. Accepted tokens are draft tokens that were emitted, without those that a stop
    string cuts off an accepted block. Every node of a draft tree counts as drafted.

    Args:
        num_spec_tokens: Configured draft tokens per step, if known. A longer draft raises it.
    """

    num_spec_tokens: int = 0
    _accepted: list[int] = field(default_factory=list)
    _drafted: list[int] = field(default_factory=list)

    def add(self, step: StepOutput) -> None:
        """Counts one step; a step without a draft is left out."""
        if len(step.draft):
            self._accepted.append(step.accepted)
            self._drafted.append(len(step.draft))

    def to_dict(self, detailed: bool = False) -> dict[str, Any]:
        """Returns the object ``metrics.speculative_decoding`` of an answer, with vLLM's names and meanings.

        mean_acceptance_length: float, 1 + num_accepted_draft_tokens / num_spec_steps, the target's own token
          included; 1.0 without steps.
        draft_acceptance_rate: float, num_accepted_draft_tokens / num_draft_tokens; 0.0 without drafts.
        acceptance_histogram: num_spec_tokens + 1 integers; entry j is how many steps accepted exactly j draft tokens.
        acceptance_histogram_by_draft_length: for each draft length k that occurred, as a string, the k + 1 entries of
          that histogram over its steps.
        num_spec_steps: steps that verified a draft, the sum of the histogram.
        num_draft_tokens, num_accepted_draft_tokens: over those steps, without the target's own tokens.
        num_spec_tokens: the longest draft that was configured or seen.
        per_step_accepted, per_step_drafted: where ``detailed``, one integer for each step, in order.
        """
        steps, drafted, accepted = len(self._drafted), sum(self._drafted), sum(self._accepted)
        longest = max(self._drafted, default=0)
        by_length = {k: [0] * (k + 1) for k in sorted(set(self._drafted))}
        for k, j in zip(self._drafted, self._accepted, strict=True):
            by_length[k][j] += 1
        counts = Counter(self._accepted)
        longest = max(self.num_spec_tokens, longest)
        record: dict[str, Any] = {
            "mean_acceptance_length": 1.0 + accepted / steps if steps else 1.0,
            "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
            "acceptance_histogram": [counts[j] for j in range(longest + 1)],
            "acceptance_histogram_by_draft_length": {str(k): row for k, row in by_length.items()},
            "num_spec_steps": steps,
            "num_draft_tokens": drafted,
            "num_accepted_draft_tokens": accepted,
            "num_spec_tokens": longest,
        }
        if detailed:
            record |= {"per_step_accepted": list(self._accepted), "per_step_drafted": list(self._drafted)}
        return record
