"""The interface of runners: a runner holds the weights and the KV cache, and computes forward passes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from foretoken.core.errors import InvalidRequest
from foretoken.models.base import NO_ENCODER, LogitRows
from foretoken.models.chains import ChainRequest, DraftVocabulary, ModelChain
from foretoken.models.device_logits import DeviceRows
from foretoken.models.families.architecture import Architecture
from foretoken.models.families.layers import NO_NORMS, BranchFactors
from foretoken.models.formats.lora.tensors import AdapterLayer
from foretoken.models.runners.pass_plan import Part, PassPlan
from foretoken.models.state.pages import SlotCache

Move = tuple[int, int, Sequence[int]]
"""A slot, the first destination row, and the rows that move there; see ``Runner.move``."""


def injecting(architecture: Architecture) -> Architecture:
    """Returns the architecture of ``Runner.injector``: the residual stream stays the features throughout."""
    a = architecture
    stack = (replace(layer, mlp=None, experts=None, norms=NO_NORMS, window=1) for layer in a.stack)
    return replace(a, stack=tuple(stack), factors=BranchFactors(0.0, 0.0, 0.0))


@dataclass(frozen=True, slots=True)
class Pass:
    """The result of a forward pass."""

    rows: Tensor | LogitRows | DeviceRows | None  # logits, float32 [outputs, V]; None if they were not requested
    # hidden states [rows, H] of all rows by layer; index i is the input of layer i, the number of layers stands for the
    # normed output, and one more for the output before the norm
    taps: Mapping[int, Tensor] = field(default_factory=dict)
    argmax: Sequence[int] | None = None  # the argmax of each output's logits, if the plan allows it to replace them
    # [outputs, ranks], the likeliest tokens of each output, if the plan requests them
    ranked: NDArray[np.int64] | None = None
    # int64 [outputs, 1 + ranks], waits for both, if a device still computes them
    late: Callable[[], NDArray[np.int64]] | None = None

    @property
    def logits(self) -> Tensor | None:
        return self.rows if self.rows is None or isinstance(self.rows, Tensor) else self.rows.tensor


@dataclass(slots=True)
class DeeperLayer:
    """A layer that drafts one level on the states of the layer before it (2412.19437, section 2.2)."""

    runner: "Runner"  # computes the layer
    parts: Sequence[Part]  # its new rows of each sequence, which has one row fewer than in the layer before
    # [1, H] for each sequence, the state of the layer before at the row before the new ones; None for zeros. The draft
    # replaces it by the state at that layer's last row, if it computes any.
    carried: list[Tensor | None]

    def only(self, numbers: Sequence[int]) -> "DeeperLayer":
        """Returns the layer for some of the sequences."""
        return DeeperLayer(self.runner, [self.parts[i] for i in numbers], [self.carried[i] for i in numbers])


@dataclass(frozen=True, slots=True)
class Injected:
    """Rows whose keys and values are written before a draft."""

    runner: "Runner"  # ``Runner.injector`` of the runner that drafts
    plan: PassPlan


class Runner(ABC):
    """Slots of cache rows, and forward passes over them."""

    batch_invariant: bool  # see ``Model``
    chunk_invariant: bool  # see ``Model``
    joint_rows: int  # a sequence with more pending rows than this is prefilled by itself
    pass_rows: int  # approximate maximum of rows of a pass that several sequences share
    computes_chains: bool = False  # whether ``chains`` may be called
    adapts_levels: bool = True  # see ``Model``
    runs_ahead: bool = False  # see ``Model``
    takes_unread: bool = False  # whether plans may have drafts that are still on the device
    # whether passes compute ``weights.Entry.fusion``, and take a target's states in the place of features
    fuses: bool = False
    not_compiled: str = "the kernels run on CPUs"  # the reason that the compiled kernels do not compute the model
    _pages: SlotCache  # the KV cache

    @property
    @abstractmethod
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache per token."""

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's recurrent state, at any length; 0 for none."""
        return 0

    def acquire(
        self, tokens: Sequence[int] = (), scope: Hashable = None, adapter: str | None = None
    ) -> tuple[int, int]:
        """Takes the lowest free slot. Returns the slot, and the number of leading tokens whose rows it already holds.

        Args:
            tokens: the prompt, for the prefix cache.
            scope: rows are shared only between prompts of the same scope and adapter.
            adapter: the adapter of the sequence, one of ``adapters``; None for none.
        """
        return self._pages.acquire(tokens, scope)

    def attach(self, slot: int, source: Sequence[int]) -> None:
        """Sets the encoder's input of a slot, before its first pass.

        Raises InvalidRequest if the model has no encoder, or the source is too long for it.
        """
        raise InvalidRequest(NO_ENCODER)

    @property
    def adapters(self) -> tuple[str, ...]:
        return ()

    def pack_adapter(self, layers: Sequence[AdapterLayer]) -> Any:
        """Returns an adapter for ``add_adapter``. Passes may run in another thread meanwhile.

        Raises InvalidRequest if the runner computes no adapters.
        layers: its matrices by layer.
        """
        raise InvalidRequest(
            "LoRA adapters are computed by the compiled kernels alone, and torch operators compute this model "
            f"({self.not_compiled}); merge the adapter into the model with PEFT's merge_and_unload"
        )

    def add_adapter(self, name: str, adapter: Any) -> None:
        """Adds a packed adapter under a name that was never used before."""
        raise NotImplementedError

    def remove_adapter(self, name: str) -> None:
        """Removes an adapter that no slot has."""
        raise NotImplementedError

    def release(self, slot: int) -> None:
        """Frees a slot. Its rows stay available to the prefix cache only."""
        self._pages.release(slot)

    def publish(self, slot: int, tokens: Sequence[int], rows: int) -> None:
        """Makes the slot's first ``rows`` rows shareable: the final rows of the first of ``tokens``."""
        self._pages.publish(slot, tokens, rows)

    def enable_prefix_cache(self, max_bytes: int) -> bool:
        """Enables prefix caching within ``max_bytes`` bytes of KV cache. Returns whether the runner supports it."""
        return self._pages.enable_prefix_cache(max_bytes)

    def check(self) -> None:
        """Raises AssertionError if the bookkeeping of slots and rows is inconsistent."""
        self._pages.check()

    def resume(self, slot: int, rows: int) -> int:
        """Prepares a slot for a pass that follows its first ``rows`` rows.

        Returns the number of these rows that the pass can follow; it computes the others again, to the same bits.
        """
        return self._pages.resume(slot, rows)

    @abstractmethod
    def move(self, slot: int, destination: int, sources: Sequence[int]) -> None:
        """Moves rows ``sources`` (ascending) to ``destination`` onward, in order: the accepted path of a draft tree."""

    def move_all(self, moves: Sequence[Move]) -> None:
        """Moves rows of several slots; see ``move``, whose arguments are those of a move."""
        for slot, destination, sources in moves:
            self.move(slot, destination, sources)

    def nbytes(self) -> int:
        return self._pages.nbytes()

    def adopt(self, other: "Runner") -> None:
        """Takes over the slots of another runner of this architecture, which is not used any more."""
        self._pages = other._pages

    def first(self, architecture: Architecture, norm: Tensor | None) -> Self:
        """Returns a runner of the first ``architecture.layers`` layers and the same head.

        It shares the weights and has separate slots.

        Args:
            architecture: sizes of the first layers.
            norm: weight of the norm before the head, float32 [H]; None for the model's.
        """
        raise NotImplementedError

    def injector(self) -> Self:
        """Returns a runner that writes keys and values of features to the same slots, with the same weights.

        Every layer computes them from the features themselves, without a norm, as in DFlash (2602.06036). Its passes
        have neither logits nor taps.
        """
        raise NotImplementedError

    def borrow_head(self, lender: "Runner") -> bool:
        """Takes another runner's vocabulary head in the place of its own. Returns whether it can."""
        return False

    @abstractmethod
    def unembed(self, hidden: Tensor) -> Tensor:
        """Applies the vocabulary head alone to normed states [rows, H]. Returns logits, float32 [rows, V]."""

    @abstractmethod
    def run(self, plan: PassPlan, taps: Sequence[int], logits: bool) -> Pass:
        """Computes every row of the plan and writes its keys and values.

        Args:
            plan: the rows.
            taps: layers whose hidden states are returned; see ``Pass.taps``.
            logits: whether logits are computed. A pass without ``logits`` and ``taps`` is a chunk of one prompt, whose
                cut depends on that sequence alone.
        """

    def chains(
        self,
        plan: PassPlan,  # rows without drafts, the last of each sequence an output
        requests: Sequence[ChainRequest],  # the chain of each sequence; their ends have the same bounds
        vocabulary: DraftVocabulary,  # the tokens that may be drafted
        state: int | None = None,  # the tap that is the features of the next row, in a model that takes features
        # whether the outputs of each sequence are all levels of its chain, so that no other pass follows
        foreseen: bool = False,
        # layers that draft a level each, the last one also those behind; their new rows are computed, too
        deeper: Sequence[DeeperLayer] = (),
        injected: Injected | None = None,  # rows that those of the plan see
    ) -> Sequence[ModelChain]:
        """Computes every row of the plan, and the chains behind it."""
        raise NotImplementedError
