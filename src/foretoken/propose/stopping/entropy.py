"""Ends a draft where its distribution has high entropy (AdaEDL, arXiv 2410.18351)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.checks import number
from foretoken.core.context import Context
from foretoken.models.base import Model
from foretoken.propose.stopping.base import Gate, Stop, StopRule


@dataclass(frozen=True, slots=True)
class EntropyConfig:
    """The draft ends where 1 - sqrt(coefficient H(q)), a lower bound of its acceptance rate, is below ``threshold``.

    Attributes:
        threshold: Between 0 and 1.
        coefficient: Factor of the entropy H, which is in nats; the default is the paper's.
    """

    threshold: float = 0.1
    coefficient: float = 0.2

    def __post_init__(self) -> None:
        number("threshold of the entropy stop", self.threshold, 0.0, 1.0)
        number("coefficient of the entropy stop", self.coefficient, 0.0)


class EntropyStop(Stop):
    """Each position is decided by itself, so one gate serves all drafts."""

    def __init__(self, config: EntropyConfig) -> None:
        self.config = config

    def begin(self, context: Context) -> Gate:
        return self

    def stops(self, row: Tensor, hidden: Tensor | None) -> bool:
        """Returns whether the draft ends here, see ``Gate``."""
        entropy = float(torch.special.entr(row).sum())
        return 1.0 - math.sqrt(self.config.coefficient * entropy) < self.config.threshold


def build(config: EntropyConfig, model: Model) -> EntropyStop:
    """Returns the rule; it does not depend on the model."""
    return EntropyStop(config)


RULE = StopRule(EntropyConfig, build)
