"""Ends a draft by a head on its hidden states (SpecDec++, arXiv 2405.19715), see ``foretoken train acceptance``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.core.checks import number
from foretoken.core.context import Context
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.models.base import Model
from foretoken.models.formats.checkpoint import load_config, open_weights, resolve
from foretoken.propose.stopping.base import Gate, Stop, StopRule

MODEL_TYPE = "foretoken_acceptance"
EXTRA = 3  # number of features beside the hidden state


@dataclass(frozen=True, slots=True)
class LearnedConfig:
    """The draft ends where 1 - prod a_i exceeds ``threshold``; a_i is the head's acceptance probability at position i.

    Attributes:
        model: The head's folder.
        threshold: Between 0 and 1.
    """

    model: str | Path = ""
    threshold: float = 0.9

    def __post_init__(self) -> None:
        if not isinstance(self.model, str | Path) or not str(self.model):
            raise InvalidRequest(
                'the learned stop needs "model", the folder of a head; make one with foretoken train acceptance'
            )
        number("threshold of the learned stop", self.threshold, 0.0, 1.0)


def features(hidden: Tensor, rows: Tensor, greedy: bool) -> Tensor:
    """Returns the head's input: float32 [N, H + 3].

    It holds the hidden states, the square root of the entropy, the largest probability, and whether drafts are greedy.

    Args:
        hidden: [N, H], hidden states.
        rows: [N, V], draft distributions; of greedy drafts, those at temperature 1.
        greedy: Whether the drafts are greedy.
    """
    entropy = torch.special.entr(rows).sum(-1, keepdim=True)
    kind = torch.full_like(entropy, float(greedy))
    return torch.cat([part.float() for part in (hidden, entropy.sqrt(), rows.amax(-1, keepdim=True), kind)], dim=-1)


@dataclass(frozen=True, slots=True)
class AcceptanceHead:
    """sigmoid(down silu(up x + bias) + offset). up [U, H + 3], bias [U], down [1, U], offset [1], all float32."""

    up: Tensor
    bias: Tensor
    down: Tensor
    offset: Tensor

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states that the head was trained for."""
        return int(self.up.shape[1]) - EXTRA

    @staticmethod
    def load(path: Path, device: torch.device) -> AcceptanceHead:
        """Returns the head of a folder. Raises ModelLoadError where it holds none, or a damaged one."""
        config = load_config(path)
        hidden, units = config.get("hidden_size"), config.get("intermediate_size")
        if config.get("model_type") != MODEL_TYPE or not isinstance(hidden, int) or not isinstance(units, int):
            raise ModelLoadError(
                f"{path} is no acceptance head: config.json must have model_type {MODEL_TYPE!r}, hidden_size and "
                "intermediate_size; make one with foretoken train acceptance"
            )
        shapes = {
            "up.weight": (units, hidden + EXTRA),
            "up.bias": (units,),
            "down.weight": (1, units),
            "down.bias": (1,),
        }
        weights = open_weights(path)
        for name, shape in shapes.items():
            if weights.shapes.get(name) != shape:
                raise ModelLoadError(f"{path} lacks a tensor {name!r} of shape {shape}; is the checkpoint complete?")
        return AcceptanceHead(*(weights[name].to(device, torch.float32) for name in shapes))

    def chances(self, x: Tensor) -> Tensor:
        """Returns the acceptance probability [N] of features ``x`` [N, H + 3]."""
        return F.linear(F.silu(F.linear(x, self.up, self.bias)), self.down, self.offset).sigmoid()[:, 0]


@dataclass(slots=True)
class _LearnedDraft:
    head: AcceptanceHead
    threshold: float
    greedy: bool
    survival: float = 1.0

    def stops(self, row: Tensor, hidden: Tensor | None) -> bool:
        if hidden is None:
            raise TypeError("the learned stop needs the draft's hidden states; ask for them with the pass")
        self.survival *= float(self.head.chances(features(hidden[None], row[None], self.greedy)))
        return 1.0 - self.survival > self.threshold


class LearnedStop(Stop):
    """Ends drafts by ``head`` alone."""

    hidden = True

    def __init__(self, head: AcceptanceHead, config: LearnedConfig) -> None:
        self.head, self.config = head, config

    def begin(self, context: Context) -> Gate:
        return _LearnedDraft(self.head, self.config.threshold, context.law.greedy)


def build(config: LearnedConfig, model: Model) -> LearnedStop:
    """Returns the rule. Raises InvalidRequest where the head was trained for hidden states of another width."""
    head = AcceptanceHead.load(resolve(config.model), model.device)
    if head.hidden_size != model.hidden_size:
        raise InvalidRequest(
            f"the acceptance head {config.model} reads hidden states of {head.hidden_size} and this draft's have "
            f"{model.hidden_size}; train one for this draft with foretoken train acceptance"
        )
    return LearnedStop(head, config)


RULE = StopRule(LearnedConfig, build)
