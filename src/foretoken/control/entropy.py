"""Stop where the draft does not know how to go on (AdaEDL, 2410.18351): by the entropy of its law alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.control.stops import Gate, Rule, Stop
from foretoken.core.checks import number
from foretoken.core.context import Context
from foretoken.models.base import Model


@dataclass(frozen=True, slots=True)
class EntropyConfig:
    """The draft ends where 1 - sqrt(coefficient H(q)), an estimate of its acceptance, is under ``threshold``.

    H in nats. coefficient: from the paper, which bounds the acceptance from below with it.
    """

    threshold: float = 0.1
    coefficient: float = 0.2

    def __post_init__(self) -> None:
        number("threshold of the entropy stop", self.threshold, 0.0, 1.0)
        number("coefficient of the entropy stop", self.coefficient, 0.0)


class EntropyStop(Stop):
    """Every place is judged by itself, so one gate serves all drafts."""

    def __init__(self, config: EntropyConfig) -> None:
        self.config = config

    def begin(self, context: Context) -> Gate:
        return self

    def stops(self, row: Tensor, hidden: Tensor | None) -> bool:
        """See ``Gate``."""
        entropy = float(torch.special.entr(row).sum())
        return 1.0 - math.sqrt(self.config.coefficient * entropy) < self.config.threshold


def build(config: EntropyConfig, model: Model) -> EntropyStop:
    """Whatever the model."""
    return EntropyStop(config)


RULE = Rule(EntropyConfig, build)
