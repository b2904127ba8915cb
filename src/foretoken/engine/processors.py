"""transformers' logits processors as a sampling law."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from foretoken.core.distributions import Law
from foretoken.core.history import History

# Processors whose result for a row depends on neither other rows nor the row's number. Others are passed a whole batch.
ROW_WISE = {
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "ExponentialDecayLengthPenalty",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "MinPLogitsWarper",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopHLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
}
# Processors with a state that changes with every call, which cannot be rolled back after a rejected token.
STATEFUL = ("UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor")


@dataclass(frozen=True)
class ProcessorLaw(Law):
    """transformers' logits processors as a sampling law: each node is processed with its own full row of ids."""

    processors: Any  # the logits processors
    sample: bool  # whether tokens are sampled; if not, decoding is greedy
    prompt: list[int]  # the row of ``input_ids``, padding included, because processors see the padding too
    device: torch.device  # device of ``input_ids``
    row: int = 0  # number of the row, for processors that use it (``prefix_allowed_tokens_fn``)
    batch: int = 1  # number of rows
    record: bool = False  # whether to record scores
    temperature: float = 1.0  # temperature after the processors
    # recorded raw and processed scores by generated tokens; the target's rows overwrite the draft's
    seen: dict[tuple[int, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def greedy(self) -> bool:
        return not self.sample

    @property
    def needs_history(self) -> bool:
        return True

    def best(self, logits: Tensor, histories: Sequence[History]) -> list[int]:
        probs = self.probs(logits, histories)
        best: list[int] = probs.argmax(-1).where(~probs[:, 0].isnan(), -1).tolist()
        return best

    def probs(self, logits: Tensor, histories: Sequence[History]) -> Tensor:
        logits = logits.to(self.device, torch.float32)
        scores = logits
        if self.processors:
            rows = [self._process(logits[i], history) for i, history in enumerate(histories)]
            scores = torch.stack(rows) if rows else logits
        if self.record:
            for i, history in enumerate(histories):
                key = (*history.tokens[history.prompt_length :], *history.path)
                self.seen[key] = (logits[i], scores[i])
        if self.greedy:  # like ``generate``, the argmax even where processors forbid every token
            one_hot = torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
            return one_hot.masked_fill_(scores.isnan().any(-1, keepdim=True), torch.nan)
        return (scores / self.temperature).softmax(-1)

    def with_temperature(self, temperature: float) -> "ProcessorLaw":
        return replace(self, temperature=temperature, record=False)

    def _process(self, logits: Tensor, history: History) -> Tensor:
        """Returns one node's scores [V] after all processors."""
        ids = [*self.prompt, *history.tokens[history.prompt_length :], *history.path]
        rows = 1 if all(type(p).__name__ in ROW_WISE for p in self.processors) else self.batch
        repeated = torch.tensor([ids], device=self.device).repeat(rows, 1)
        scores = self.processors(repeated, logits.repeat(rows, 1))
        processed: Tensor = scores[self.row if rows > 1 else 0]
        return processed
