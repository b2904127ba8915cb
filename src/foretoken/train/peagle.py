"""P-EAGLE heads (2602.01469): EAGLE-3 heads that predict all positions in one pass.

A mask token with a learned feature stands for each token that is not drafted yet. A deeper position is trained at fewer
places of a window, which keeps the cost of many positions small.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.core.checks import integer, number
from foretoken.models.heads.mask_token import MASK_KEYS
from foretoken.train.fused import FusedConfig, FusedHead, FusedLayer, UnrolledLayer
from foretoken.train.lessons import EVALUATED, Drafted, Lesson, Teacher, chosen_mask_token


@dataclass(frozen=True)
class PEagleConfig(FusedConfig):
    """Size and training of the head, see also ``FusedConfig``.

    Args:
        layers: Number of decoder layers. A head that predicts all positions at once needs more than EAGLE-3's one.
        depths: Predicted positions.
        retention: Share of a depth's places that the next depth is trained at too.
        mask_token: The token that stands for those not drafted yet, None for the target's rarest.
    """

    layers: int = 3
    depths: int = 8
    retention: float = 0.7
    mask_token: int | None = None

    def __post_init__(self) -> None:
        FusedConfig.__post_init__(self)
        for name in ("layers", "depths"):
            integer(name, getattr(self, name), 1)
        number("retention", self.retention, 1e-6, 1)
        integer("mask_token", self.mask_token, 0, optional=True)


class PEagleHead(FusedHead):
    """A P-EAGLE head. Its state_dict is the checkpoint, under vLLM's names.

    Row i at depth 0 is that of EAGLE-3: it takes token i + 1 and the target's feature at row i, and proposes token
    i + 2. The chain of root i has a row of the mask token at each depth j after it, which sees the rows of depth 0 up
    to i and its own chain, and proposes token i + 2 + j.
    """

    def __init__(self, config: PEagleConfig, teacher: Teacher, vocabulary: Tensor, mask_token: int) -> None:
        super().__init__(config, config.depths, teacher, vocabulary)
        self.retention, self.mask_token = config.retention, mask_token
        shape = teacher.config
        self.stack = [FusedLayer(config, shape), *(UnrolledLayer(config, shape) for _ in range(config.layers - 1))]
        self.layers = nn.ModuleList(self.stack)
        self.mask_hidden = nn.Parameter(torch.randn(3 * teacher.hidden))
        self._roots: list[Tensor] | None = None
        self._generator = torch.Generator().manual_seed(0)
        self._start_from(teacher)

    @classmethod
    def made(cls, config: PEagleConfig, teacher: Teacher, counts: Tensor) -> PEagleHead:
        """Returns a head that proposes the most frequent tokens by ``counts`` [V]."""
        token = chosen_mask_token(config.mask_token, teacher, counts)
        return cls(config, teacher, config.tokens(teacher, counts), token)

    def begin(self, progress: float, step: int, length: int) -> None:
        """Chooses the roots whose chains the next step trains, by depth; they depend on ``step`` alone."""
        rows = length - self.depths
        order = torch.randperm(rows, generator=self._generator.manual_seed(step))
        counts = [max(1, round(rows * self.retention**depth)) for depth in range(1, self.depths)]
        device = self.fc.weight.device
        self._roots = [own.to(device) for own in (torch.arange(rows), *(order[:count] for count in counts))]

    def forward(self, lesson: Lesson) -> list[Tensor]:
        return self.drafted(lesson).logits

    def drafted(self, lesson: Lesson) -> Drafted:
        batch, rows = lesson.ids.shape[0], lesson.ids.shape[1] - self.depths
        roots = self.roots(rows)
        masked, mask_feature = lesson.embeddings[self.mask_token], self.fc(self.mask_hidden)
        seen: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in self.stack]
        logits = []
        for depth, own in enumerate(roots):
            if depth:
                embedded, hidden = (x.expand(batch, len(own), -1) for x in (masked, mask_feature))
            else:
                embedded, hidden = lesson.embedded()[:, 1 : 1 + rows], self.fc(lesson.tapped(self.taps)[:, :rows])
            for layer, (keys, values) in zip(self.stack, seen, strict=True):
                hidden = layer(embedded, hidden, depth, keys, values, own if depth else None)
            logits.append(self.lm_head(self.norm(hidden if depth else hidden[:, own])))
        return Drafted(logits, roots=roots)

    def roots(self, rows: int) -> list[Tensor]:
        """Returns the roots of the chains that reach each depth."""
        if self.training and self._roots is not None:
            return self._roots
        return [torch.arange(0, rows, EVALUATED, device=self.fc.weight.device)] * self.depths

    def start(self, tensors: Mapping[str, Tensor]) -> None:
        """Loads an earlier head, or an EAGLE-3 head, which has one layer and no feature of the mask token."""
        named = {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
        super().start({**self.state_dict(), **named})

    def describe(self, teacher: Teacher) -> dict[str, Any]:
        return super().describe(teacher) | dict.fromkeys(MASK_KEYS, self.mask_token)
