"""The residual stream of a wider hybrid mixture of experts.

It differs from the rotated stream of a Llama (``widen.units``) in three respects.

Norms. The MTP layer normalizes the output of the last norm once more, so a norm's weight cannot move into the matrices
that read it. Each dimension of the narrow stream therefore maps to separate wide dimensions: the rows of Q have
disjoint supports, and a norm's weight is repeated along them.

Experts. They are copied in groups, and the router must choose within one group what it chose before. The stream gets
one more dimension per group, a mark: 0 in the group of the row's token, c in all others. Embeddings write it and no
layer changes it. The routers subtract a large multiple of it, so that experts of other groups lose, and the scores
within the group stay equal to the bit. The experts that are read so depend on the tokens, as in a large model.

Scale. The marks have the same sum of squares in every row, (groups - 1) c^2. With the stream scaled by s, a norm
divides by sqrt((s^2 |x|^2 + (groups - 1) c^2) / h' + eps), which is s sqrt(h/h') sqrt(|x|^2 / h + eps) if
(groups - 1) c^2 = (s^2 - h'/h) h eps. So eps stays, also that of the norms of heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_MAX_RMS = 100.0  # of a row of the narrow stream; up to it, other groups lose by more than this many nats


@dataclass(frozen=True)
class MarkedStream:
    """The wide residual stream.

    Attributes:
        owner: The narrow dimension of each wide one, int64 [h' - added].
        values: Its factor, float64 [h' - added].
        narrow: h.
        groups: Groups of experts. Several groups add one dimension each.
        eps: Of the norms.
    """

    owner: Tensor
    values: Tensor
    narrow: int
    groups: int
    eps: float

    @staticmethod
    def random(narrow: int, wide: int, groups: int, eps: float, generator: torch.Generator) -> MarkedStream:
        """Returns a random stream."""
        carried = wide - (groups if groups > 1 else 0)
        owner = torch.randperm(carried, generator=generator) % narrow
        values = torch.randn(carried, dtype=torch.float64, generator=generator)
        squares = torch.zeros(narrow, dtype=torch.float64).index_add_(0, owner, values**2)
        return MarkedStream(owner, values / squares.sqrt()[owner], narrow, groups, eps)

    @property
    def added(self) -> int:
        """Number of added dimensions, which are the last ones."""
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
        """s: a power of two if dimensions are added."""
        minimum = math.sqrt(self.ratio)
        return 2.0 ** math.ceil(math.log2(1.05 * minimum)) if self.added else minimum

    @property
    def mark(self) -> float:
        """c."""
        return math.sqrt((self.scale**2 - self.ratio) * self.narrow * self.eps / (self.groups - 1))

    @property
    def penalty(self) -> float:
        """The multiple of the marks that the routers subtract."""
        normed_mark = self.mark * math.sqrt(self.ratio) / (self.scale * _MAX_RMS)
        return 2.0 ** math.ceil(math.log2(_MAX_RMS / normed_mark))

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

    def reads(self, weight: Tensor, norm: Tensor | None = None) -> Tensor:
        """Widens a matrix [n, h] after a norm, whose weight stays in the norm."""
        return self.spread(weight) / math.sqrt(self.ratio)

    def writes(self, weight: Tensor) -> Tensor:
        """Widens a matrix [h, n] that writes to the stream."""
        return self.scale * self.spread(weight.T).T

    def norm(self, weight: Tensor, last: bool = False) -> Tensor:
        """Repeats a norm's weight [h]. ``last``: another norm reads its output, so that the marks become 0."""
        return torch.cat([weight.double()[self.owner], torch.full((self.added,), -1.0 if last else 0.0)])
