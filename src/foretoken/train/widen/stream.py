"""The residual stream of a wider hybrid mixture of experts.

Three things differ from a Llama (``widen.tensors``).

Norms. The MTP layer normalizes the output of the last norm once more, so a norm's weight cannot move into the matrices
that read it. Each number of the narrow stream therefore goes to wide numbers of its own: the rows of Q have disjoint
supports, and a norm's weight is repeated along them.

Experts. They are copied in groups, and the router must choose within one group what it chose before. One further number
per group is added to the stream: 0 in the group of the row's token, c in all others. Embeddings write it and no layer
changes it. The routers subtract a great multiple of it, so that the others lose, and those of the own group keep their
scores to the bit. Which experts are read so depends on the tokens, as in a large model.

Scale. The added numbers have the same squares in every row, (groups - 1) c^2. With the stream scaled by s, a norm
divides by sqrt((s^2 |x|^2 + (groups - 1) c^2) / h' + eps), which is s sqrt(h/h') sqrt(|x|^2 / h + eps) if
(groups - 1) c^2 = (s^2 - h'/h) h eps. So eps stays, also that of the norms of heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_GREATEST_RMS = 100.0  # of a row of the narrow stream, up to which other groups lose by more than this many nats


@dataclass(frozen=True)
class WideStream:
    """The wide residual stream.

    Attributes:
        owner: The narrow number of each wide one, int64 [h' - added].
        values: Its factor, float64 [h' - added].
        narrow: h.
        groups: Groups of experts; as many numbers are added if they are several.
        eps: Of the norms.
    """

    owner: Tensor
    values: Tensor
    narrow: int
    groups: int
    eps: float

    @staticmethod
    def drawn(narrow: int, wide: int, groups: int, eps: float, generator: torch.Generator) -> WideStream:
        """Returns a random one."""
        carried = wide - (groups if groups > 1 else 0)
        owner = torch.randperm(carried, generator=generator) % narrow
        values = torch.randn(carried, dtype=torch.float64, generator=generator)
        squares = torch.zeros(narrow, dtype=torch.float64).index_add_(0, owner, values**2)
        return WideStream(owner, values / squares.sqrt()[owner], narrow, groups, eps)

    @property
    def added(self) -> int:
        """Added numbers, which are the last ones."""
        return self.groups if self.groups > 1 else 0

    @property
    def wide(self) -> int:
        """h'."""
        return len(self.owner) + self.added

    @property
    def ratio(self) -> float:
        """h' / h."""
        return self.wide / self.narrow

    @property
    def scale(self) -> float:
        """s: a power of two if numbers are added."""
        least = math.sqrt(self.ratio)
        return 2.0 ** math.ceil(math.log2(1.05 * least)) if self.added else least

    @property
    def mark(self) -> float:
        """c."""
        return math.sqrt((self.scale**2 - self.ratio) * self.narrow * self.eps / (self.groups - 1))

    @property
    def penalty(self) -> float:
        """The multiple of the added numbers that the routers subtract."""
        of_normed = self.mark * math.sqrt(self.ratio) / (self.scale * _GREATEST_RMS)
        return 2.0 ** math.ceil(math.log2(_GREATEST_RMS / of_normed))

    def spread(self, weight: Tensor) -> Tensor:
        """Returns [n, h] as [n, h'] whose product with x Q is that of ``weight`` with x."""
        carried = weight.double()[..., self.owner] * self.values
        return F.pad(carried, (0, self.added))

    def embedding(self, weight: Tensor, group: Tensor) -> Tensor:
        """Returns embeddings [V, h'] of tokens whose experts' groups are ``group`` [V]."""
        out = self.scale * self.spread(weight)
        if self.added:
            out[:, -self.added :] = self.mark
            out[torch.arange(len(out)), out.shape[1] - self.added + group] = 0.0
        return out

    def reads(self, weight: Tensor) -> Tensor:
        """Widens a matrix [n, h] behind a norm."""
        return self.spread(weight) / math.sqrt(self.ratio)

    def writes(self, weight: Tensor) -> Tensor:
        """Widens a matrix [h, n] that writes to the stream."""
        return self.scale * self.spread(weight.T).T

    def norm(self, weight: Tensor, last: bool = False) -> Tensor:
        """Repeats a norm's weight [h]. ``last``: whether its output is read by another norm, which is told nothing."""
        return torch.cat([weight.double()[self.owner], torch.full((self.added,), -1.0 if last else 0.0)])
