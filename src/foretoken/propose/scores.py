"""Scores of a draft's next token: estimates of its acceptance that are known before it is sampled.

The acceptance model calibrates a score, and the draft policy decides at which acceptance a chain ends. A score sees the
draft's distribution q at the position, and possibly its hidden state, but never the token that is sampled. The end of a
draft is then a stopping time, and verification stays exact (non-anticipation).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.core.checks import check_keys, number
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.models.base import Model
from foretoken.models.chains import DraftStop, ScoredRows
from foretoken.models.formats.checkpoint import load_config, open_weights, resolve

MODEL_TYPE = "foretoken_acceptance"
EXTRA = 3  # number of features beside the hidden state


def features(hidden: Tensor, rows: Tensor, greedy: bool | Tensor) -> Tensor:
    """Returns the head's input: float32 [N, H + 3].

    It holds the hidden states, the square root of the entropy, the largest probability, and whether drafts are greedy.

    Args:
        hidden: [N, H], hidden states.
        rows: [N, V], draft distributions; of greedy drafts, those at temperature 1.
        greedy: Whether the drafts are greedy, one or [N].
    """
    entropy = torch.special.entr(rows).sum(-1, keepdim=True)
    kind = torch.as_tensor(greedy, dtype=entropy.dtype, device=entropy.device).view(-1, 1).expand_as(entropy)
    return torch.cat([part.float() for part in (hidden, entropy.sqrt(), rows.amax(-1, keepdim=True), kind)], dim=-1)


@dataclass(frozen=True, slots=True)
class AcceptanceHead:
    """sigmoid(down silu(up x + bias) + offset) (SpecDec++, arXiv 2405.19715), see ``foretoken train acceptance``.
    up [U, H + 3], bias [U], down [1, U], offset [1], all float32.
    """

    up: Tensor
    bias: Tensor
    down: Tensor
    offset: Tensor

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states that the head was trained for."""
        return int(self.up.shape[1]) - EXTRA

    @staticmethod
    def load(path: Path, device: torch.device) -> "AcceptanceHead":
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

    def score(self, rows: ScoredRows) -> Tensor:
        """Returns the acceptance probability of each row's next token."""
        if rows.hidden is None:
            raise TypeError("the acceptance head needs the draft's hidden states; ask for them with the pass")
        return self.chances(features(rows.hidden, rows.probs, rows.greedy))


def margin(rows: Tensor) -> Tensor:
    """Returns 1 - q2 / q1 of each row [..., V], where q1 and q2 are its largest probabilities."""
    if rows.shape[-1] < 2:
        return rows.new_ones(rows.shape[:-1])
    first, second = rows.topk(2).values.double().unbind(-1)
    return torch.where(first > 0.0, 1.0 - second / first, 0.0)


def entropy_bound(rows: Tensor, coefficient: float) -> Tensor:
    """Returns 1 - sqrt(coefficient H(q)) of each row q [..., V], at least 0: a lower bound of the acceptance (AdaEDL,
    arXiv 2410.18351).
    """
    return (1.0 - (coefficient * torch.special.entr(rows).sum(-1).double()).sqrt()).clamp(min=0.0)


_KEYS = {"entropy": ("threshold", "coefficient"), "margin": ("threshold",), "learned": ("threshold", "model")}
_THRESHOLD, _COEFFICIENT, _REJECTION = 0.1, 0.2, 0.9  # the coefficient is the paper's


def check_stop(value: Any) -> None:
    """Raises InvalidRequest where ``make_stop`` could not read ``value``."""
    if value is not None:
        _read(value)


def make_stop(value: str | Mapping[str, Any] | None, model: Model) -> DraftStop | None:
    """Returns the stop that ``value`` names, None for None.

    Args:
        value: A score's name, or {"rule": name} with its own keys.

    Raises:
        InvalidRequest: The name or one of its keys is unknown, or a value is out of range.
        ModelLoadError: The acceptance head cannot be loaded.
    """
    if value is None:
        return None
    name, keys = _read(value)
    threshold = keys.get("threshold", _THRESHOLD)
    if name == "entropy":
        coefficient = keys.get("coefficient", _COEFFICIENT)
        return DraftStop(lambda rows: entropy_bound(rows.probs, coefficient), threshold, each=True)
    if name == "margin":
        return DraftStop(lambda rows: margin(rows.probs), threshold)
    head = AcceptanceHead.load(resolve(keys["model"]), model.device)
    if head.hidden_size != model.hidden_size:
        raise InvalidRequest(
            f"the acceptance head {keys['model']} reads hidden states of {head.hidden_size} and this draft's have "
            f"{model.hidden_size}; train one for this draft with foretoken train acceptance"
        )
    return DraftStop(head.score, 1.0 - keys.get("threshold", _REJECTION), hidden=True)


def _read(value: Any) -> tuple[str, dict[str, Any]]:
    keys = dict(value) if isinstance(value, Mapping) else {"rule": value}
    name = keys.pop("rule", None)
    if not isinstance(name, str) or name not in _KEYS:
        raise InvalidRequest(
            f'draft_stop must be None, the name of a score ({", ".join(_KEYS)}) or {{"rule": one of these, ...}}, '
            f"got {value!r}"
        )
    check_keys("draft_stop", keys, list(_KEYS[name]), note=f" (rule {name!r})")
    number(f"threshold of the {name} stop", keys.get("threshold", _THRESHOLD), 0.0, 1.0)
    number(f"coefficient of the {name} stop", keys.get("coefficient", _COEFFICIENT), 0.0)
    if name == "learned" and (not isinstance(keys.get("model"), str | Path) or not str(keys["model"])):
        raise InvalidRequest(
            'the learned stop needs "model", the folder of a head; make one with foretoken train acceptance'
        )
    return name, keys
