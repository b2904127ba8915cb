"""Sampling bias of a system: whether sampled texts follow the target's distribution.

For a token x sampled from p, -log p(x) - H(p) has mean 0 given the past, and the variance of -log p under p. Summed
over all sampled tokens and divided by its standard error, it is approximately standard normal if the texts follow the
target's distribution. Texts that are too likely, or not likely enough, have a large value.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch

from foretoken.bench.peers.registry import OURS
from foretoken.bench.race import RaceAnswers, RaceRow, RaceTask
from foretoken.core.draft import Draft
from foretoken.models.base import Model


@dataclass(frozen=True)
class SamplingBias:
    """Sums over tokens, in nats. excess: of -log p(x) - H(p); variance: of -log p under p."""

    tokens: int = 0
    excess: float = 0.0
    variance: float = 0.0

    @property
    def z(self) -> float:
        """The excess in standard errors."""
        return self.excess / self.variance**0.5 if self.variance else 0.0

    def __add__(self, other: "SamplingBias") -> "SamplingBias":
        return SamplingBias(self.tokens + other.tokens, self.excess + other.excess, self.variance + other.variance)


@torch.inference_mode()
def sampling_bias(model: Model, prompt: Sequence[int], text: Sequence[int], temperature: float) -> SamplingBias:
    """Returns the sums of ``text`` [n] after ``prompt`` under ``model`` at ``temperature``, from one pass."""
    handle = model.open(prompt)
    try:
        logits = model.score([handle], [Draft.chain(list(text[:-1]))])[0].logits  # [n, V]
    finally:
        model.close(handle)
    logs = (logits.double() / temperature).log_softmax(-1)
    probs = logs.exp()
    entropy = -(probs * logs).sum(-1)
    drawn = -logs.gather(1, torch.tensor(list(text), device=logs.device).unsqueeze(1)).squeeze(1)
    variance = (probs * logs.square()).sum(-1) - entropy.square()
    return SamplingBias(len(text), float((drawn - entropy).sum()), float(variance.sum()))


def with_sampling_bias(
    rows: Sequence[RaceRow], race_answers: RaceAnswers, tasks: Sequence[RaceTask], load: Callable[[], Model]
) -> list[RaceRow]:
    """Adds the sampling bias to the rows that sampled, plain and at their best depth.

    Systems that quantize to four bits in their own way have another target, and are skipped. ``load`` returns ours.
    """
    groups = {task.temperature: task.groups for task in tasks}
    weights = {row.weights.lower() for row in rows if row.system == OURS.name}
    sampled = {
        key: row
        for row in rows
        if row.best and row.temperature > 0 and _same_target(row, weights)
        for key in [(row.system, row.method, row.num_speculative_tokens, row.temperature)]
    }
    if not sampled:
        return list(rows)
    model = load()
    updated: dict[RaceRow, RaceRow] = {}
    for (entrant, temperature), repeats in race_answers.items():
        row = sampled.get((entrant.system, entrant.method, entrant.depth, temperature))
        if row is None:
            continue
        total = SamplingBias()
        for answers in repeats:
            for group, answer in zip(groups[temperature], answers, strict=True):
                for prompt, text in zip(group, answer.tokens, strict=True):
                    total += sampling_bias(model, prompt, text, temperature)
        updated[row] = replace(row, sampling_bias_z=total.z, sampling_bias_nats=total.excess / max(1, total.tokens))
    return [updated.get(row, row) for row in rows]


def _same_target(row: RaceRow, weights: Collection[str]) -> bool:
    """Returns whether a row's texts come from the target of our own rows, which have these weights."""
    return row.system == OURS.name or (row.weights.lower() in weights and not row.weights.startswith("int4"))
