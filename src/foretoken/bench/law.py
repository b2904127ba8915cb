"""Do drawn texts have the target's law? Their surprise must be the target's entropy, up to chance.

For a token x drawn from p the mean of -log p(x) - H(p) is 0 and its variance that of -log p under p, whatever came
before. So summed over all drawn tokens the difference over its standard error is a standard normal, if the law is the
target's; texts that are too likely, or not likely enough, show as a large value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from foretoken.bench.race import Course, Heats, Row
from foretoken.core.draft import Draft
from foretoken.models.base import Model


@dataclass(frozen=True)
class Surprise:
    """Sums over tokens, in nats. excess: of -log p(x) - H(p); variance: of -log p under p."""

    tokens: int = 0
    excess: float = 0.0
    variance: float = 0.0

    @property
    def z(self) -> float:
        """Standard errors from the target's own law."""
        return self.excess / self.variance**0.5 if self.variance else 0.0

    def __add__(self, other: Surprise) -> Surprise:
        return Surprise(
            self.tokens + other.tokens, self.excess + other.excess, self.variance + other.variance
        )  # fmt: skip


@torch.inference_mode()
def surprise(model: Model, prompt: Sequence[int], text: Sequence[int], temperature: float) -> Surprise:
    """Of ``text`` [n] after ``prompt`` under ``model`` at ``temperature``, in one pass."""
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
    return Surprise(len(text), float((drawn - entropy).sum()), float(variance.sum()))


def judged(rows: Sequence[Row], heats: Heats, courses: Sequence[Course], load: Callable[[], Model]) -> list[Row]:
    """The rows that drew, plain and at their best depth, with the law of what they drew. ``load`` gives the target."""
    groups = {course.temperature: course.groups for course in courses}
    wanted = {
        key: row for row in rows if row.best and row.temperature > 0
        for key in [(row.system, row.method, row.num_speculative_tokens, row.temperature)]
    }  # fmt: skip
    if not wanted:
        return list(rows)
    model = load()
    found: dict[Row, Row] = {}
    for (entrant, temperature), heat in heats.items():
        row = wanted.get((entrant.system, entrant.method, entrant.depth, temperature))
        if row is None:
            continue
        total = Surprise()
        for answers in heat:
            for group, answer in zip(groups[temperature], answers, strict=True):
                for prompt, text in zip(group, answer.tokens, strict=True):
                    total += surprise(model, prompt, text, temperature)
        found[row] = replace(row, law_z=total.z, law_excess=total.excess / max(1, total.tokens))
    return [found.get(row, row) for row in rows]
