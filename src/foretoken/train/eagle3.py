"""EAGLE-3 heads (2503.01840): one decoder layer on fused hidden states, trained by unrolling its own outputs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from foretoken.core.checks import integer, number
from foretoken.train.fused import FusedConfig, FusedHead, FusedLayer
from foretoken.train.lessons import Lesson, Teacher


@dataclass(frozen=True)
class Eagle3Config(FusedConfig):
    """Size and training of the head, see also ``FusedConfig``.

    Args:
        depths: Unrolled steps in training.
        single_share: First share of the run, in which only one step is unrolled. It costs a third.
    """

    depths: int = 4
    single_share: float = 0.6

    def __post_init__(self) -> None:
        FusedConfig.__post_init__(self)
        integer("depths", self.depths, 1)
        number("single_share", self.single_share, 0, 1)


class Eagle3Head(FusedHead):
    """An EAGLE-3 head. Its state_dict is the checkpoint, under SafeAILab's names.

    Row i takes the embedding of token i + 1 and the feature at row i, and proposes token i + 2. At depth 0 the
    feature is the target's. At depth j it is the head's own output at row i - 1 of depth j - 1.
    """

    def __init__(self, config: Eagle3Config, teacher: Teacher, vocabulary: Tensor) -> None:
        super().__init__(config, config.depths, teacher, vocabulary)
        self.single_share, self._unrolled = config.single_share, config.depths
        self.midlayer = FusedLayer(config, teacher.config)
        self.stack = (self.midlayer,)
        self._start_from(teacher)

    @classmethod
    def made(cls, config: Eagle3Config, teacher: Teacher, counts: Tensor) -> Eagle3Head:
        """Returns a head that proposes the most frequent tokens by ``counts`` [V]."""
        return cls(config, teacher, config.tokens(teacher, counts))

    def begin(self, progress: float, step: int, length: int) -> None:
        self._unrolled = 1 if progress < self.single_share else self.depths

    def forward(self, lesson: Lesson) -> list[Tensor]:
        roots = lesson.ids.shape[1] - self.depths
        hidden = self.fc(lesson.tapped(self.taps)[:, :roots])
        embedded = lesson.embedded()
        keys: list[Tensor] = []
        values: list[Tensor] = []
        logits = []
        for depth in range(self._unrolled if self.training else self.depths):
            hidden = self.midlayer(embedded[:, 1 + depth : 1 + depth + roots], hidden, depth, keys, values)
            logits.append(self.lm_head(self.norm(hidden)))
        return logits
