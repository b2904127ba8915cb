"""Checkpoints of blockwise heads (1811.03115, section 5).

hidden_i = x + down(relu(up x)), followed by the target's vocabulary head, where x is the target's normed last state. As
in Medusa, head i predicts the token i + 2 positions after x's row.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from foretoken.core.errors import ModelLoadError
from foretoken.models.heads.dialects import Written
from foretoken.models.heads.files import MAX_HEADS, check_shapes, number, open_head

MODEL_TYPE = "foretoken_blockwise"


@dataclass(frozen=True, slots=True, eq=False)
class Feedforward:
    """One head: up [I, H] with bias [I], down [H, I] with bias [H]."""

    up: Tensor
    up_bias: Tensor
    down: Tensor
    down_bias: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class BlockwiseHeads:
    """The heads of one checkpoint."""

    hidden: int
    heads: tuple[Feedforward, ...]

    @property
    def depth(self) -> int:
        return len(self.heads)


def read_blockwise(path: Path) -> BlockwiseHeads:
    """Reads the checkpoint in ``path``. Raises ModelLoadError if it is incomplete or inconsistent."""
    config, weights = open_head(path)
    if config.get("model_type") != MODEL_TYPE:
        raise ModelLoadError(f"{path} has model_type {config.get('model_type')!r}; blockwise heads have {MODEL_TYPE!r}")
    hidden, inner = number(config, path, "hidden_size"), number(config, path, "intermediate_size")
    count = number(config, path, "num_heads", high=MAX_HEADS)
    parts = {"up.weight": (inner, hidden), "up.bias": (inner,), "down.weight": (hidden, inner), "down.bias": (hidden,)}
    check_shapes(path, weights, {f"heads.{i}.{part}": shape for i in range(count) for part, shape in parts.items()})
    return BlockwiseHeads(
        hidden, tuple(Feedforward(*(weights[f"heads.{i}.{part}"] for part in parts)) for i in range(count))
    )


def write_blockwise(heads: BlockwiseHeads) -> Written:
    """Returns config.json and tensors of a checkpoint."""
    tensors: dict[str, Tensor] = {}
    for i, head in enumerate(heads.heads):
        tensors |= {
            f"heads.{i}.up.weight": head.up,
            f"heads.{i}.up.bias": head.up_bias,
            f"heads.{i}.down.weight": head.down,
            f"heads.{i}.down.bias": head.down_bias,
        }
    inner = heads.heads[0].up.shape[0]
    sizes = {"hidden_size": heads.hidden, "intermediate_size": inner, "num_heads": heads.depth}
    return {"model_type": MODEL_TYPE, **sizes}, tensors
