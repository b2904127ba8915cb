"""The contract of a model, the same for target and draft.

A model keeps the KV cache of every open sequence: a row for each committed token and, until the next commit, one for
each draft node that was scored. Tokens whose rows are not computed yet are *pending*: the whole prompt after ``open``,
the newest token after ``commit``, more if a draft model was not run for some steps. A forward pass computes the pending
tokens first, so callers never prefill or roll back by themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.core.errors import ENCODER_LENGTH, ContextLengthExceeded, InvalidRequest
from foretoken.models.chains import ChainRequest, ModelChain
from foretoken.models.device_logits import DeviceRows, DeviceTaps, TokenChooser

NO_ENCODER = "this model has no encoder that could read a source; give it the whole text as its prompt"
NO_SOURCE = "this model is an encoder-decoder; give it a text for its encoder"


def check_source(source: Sequence[int], longest: int) -> None:
    """Raises InvalidRequest for a source of more than ``longest`` tokens."""
    if len(source) > longest:
        raise ContextLengthExceeded.of("the prompt", len(source), longest, ENCODER_LENGTH)


@dataclass(eq=False, slots=True)
class Handle:
    """One sequence in one model.

    Attributes:
        slot: the sequence's slot in the KV cache; -1 once it is closed.
        tokens: the committed tokens.
        cached: number of tokens whose rows are in the cache; the rows of ``nodes`` follow them.
        nodes: tokens of the draft nodes whose rows are in the cache, in the order of their rows.
        parents: parent of each of these nodes; -1 for the root.
        argmax_only: whether only the argmax of a row's logits and ``ranks`` are read, so that a model need not return
            the logits.
        ranks: number of the likeliest tokens of each row that are read, the likeliest first; 0 for none.
        unread: returns tokens and parents of ``nodes`` that are still on a device; None for none.
    """

    slot: int
    tokens: list[int]
    cached: int = 0
    nodes: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    argmax_only: bool = False
    ranks: int = 0
    unread: Callable[[], tuple[Sequence[int], Sequence[int]]] | None = None

    @property
    def pending(self) -> list[int]:
        """The committed tokens whose rows are not computed yet."""
        return self.tokens[self.cached :]

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.cached

    def advance(self, tokens: Sequence[int]) -> tuple[int, list[int]]:
        """Appends committed tokens.

        Returns:
            The destination row, and the cache rows to move there in this order; the other draft rows are dropped.
        """
        at = self.cached
        if tokens:
            self.read()
        rows = [at + node for node in self.match(tokens)] if self.nodes else []
        self.cached += len(rows)
        self.tokens.extend(tokens)
        self.rewind()
        return at, rows

    def read(self) -> None:
        """Sets ``nodes`` and ``parents`` if they are still on a device."""
        if self.unread is not None:
            (self.nodes[:], self.parents[:]), self.unread = self.unread(), None

    def rewind(self) -> None:
        """Drops the draft nodes; the next pass computes the newest token's row again."""
        self.unread = None
        self.nodes.clear()
        self.parents.clear()
        self.cached = min(self.cached, len(self.tokens) - 1)

    def truncate(self, length: int) -> None:
        """Drops the tokens from ``length`` (at least 1) on, and any draft. The rows before them stay cached."""
        del self.tokens[length:]
        self.rewind()

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Returns the longest path of cached nodes, from the root down, whose tokens are a prefix of ``tokens``."""
        path: list[int] = []
        at = -1
        for token in tokens:
            below = range(at + 1, len(self.nodes))
            child = next((node for node in below if self.parents[node] == at and self.nodes[node] == token), None)
            if child is None:
                break
            path.append(child)
            at = child
        return path


@dataclass(frozen=True, slots=True)
class LogitRows:
    """Rows of logits in the host's memory, which are a tensor only where one is read: the kernels need their address.

    Attributes:
        values: float32 [rows, width]; the first ``vocab`` values of each row are its logits.
        vocab: size of the vocabulary.
    """

    values: NDArray[np.float32]
    address: int
    vocab: int

    @property
    def tensor(self) -> Tensor:
        return torch.from_numpy(self.values)[:, : self.vocab]

    @property
    def memory(self) -> tuple[int, int, int]:
        return self.address, len(self.values), self.values.shape[1]

    def split(self, counts: Sequence[int]) -> list[LogitRows]:
        """Returns the first ``counts[0]`` rows, the next ``counts[1]`` rows, and so on."""
        if len(counts) == 1:
            return [self]
        ends, stride = list(accumulate(counts)), self.values.strides[0]
        starts = [end - count for end, count in zip(ends, counts, strict=True)]
        return [
            LogitRows(self.values[start:end], self.address + start * stride, self.vocab)
            for start, end in zip(starts, ends, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Scores:
    """The result of one forward pass for one sequence.

    Attributes:
        rows: the logits [rows, V], in the host's memory, or on a device until the host reads them. Row 0 belongs to
            the root (the last committed token) and row i + 1 to draft node i. If earlier nodes were scored before,
            only the new rows, in the same order. [0, V] if ``argmax`` replaces them.
        taps: hidden states [computed, H] by layer index, for every row that this call computed, a prompt's included:
            the pending tokens from position ``first`` on, then the new draft nodes. So the last rows are those of
            ``logits``. Index i is the *input* of layer i, as in transformers' ``hidden_states[i]``; the number of
            layers stands for the normed output.
        first: position of the first computed row in the sequence.
        slot: the sequence's slot in the model's cache, for drafters that read it; -1 if they cannot.
        argmax: the likeliest token of each row, the lowest id on ties, -1 if a logit is not finite; None if there
            are logits.
        ranked: [rows, k], the likeliest tokens of each row, the likeliest first; None if the model does not rank
            tokens.
        late: [rows, 1 + k], waits for ``argmax`` and ``ranked`` if a device still computes them; see ``read``.
    """

    rows: Tensor | LogitRows | DeviceRows
    taps: Mapping[int, Tensor] = field(default_factory=dict)
    first: int = 0
    slot: int = -1
    argmax: Sequence[int] | None = None
    ranked: NDArray[np.int64] | None = None
    late: Callable[[], NDArray[np.int64]] | None = None

    @property
    def has_logits(self) -> bool:
        """Whether there are logits, not their argmax."""
        return self.argmax is None and self.late is None

    def read(self) -> Scores:
        """Returns the scores once the device has computed ``argmax`` and ``ranked``."""
        if self.late is None:
            return self
        tokens = self.late()
        ranked = tokens[:, 1:] if tokens.shape[1] > 1 else None
        return Scores(self.rows, self.taps, self.first, self.slot, tokens[:, 0].tolist(), ranked)

    @property
    def logits(self) -> Tensor:
        """``rows`` as a tensor in the host's memory."""
        return self.rows if isinstance(self.rows, Tensor) else self.rows.tensor

    @property
    def vocab(self) -> int:
        return self.rows.shape[1] if isinstance(self.rows, Tensor) else self.rows.vocab

    @property
    def memory(self) -> tuple[int, int, int]:
        """The address of ``rows``, their number, and the number of elements from one to the next."""
        rows = self.rows
        return (rows.data_ptr(), rows.shape[0], rows.stride(0)) if isinstance(rows, Tensor) else rows.memory

    @property
    def chooser(self) -> TokenChooser | None:
        """Chooses tokens by rows that are on a device; None for those in the host's memory."""
        return self.rows.chooser if isinstance(self.rows, DeviceRows) else None

    def of_nodes(self, count: int) -> Scores:
        """Returns scores without the rows of nodes that a draft turned out not to have."""
        rows, have = self.rows, self.memory[1] if self.argmax is None else len(self.argmax)
        if (extra := have - 1 - count) <= 0:
            return self
        if self.argmax is None:
            rows = rows[: count + 1] if isinstance(rows, Tensor) else rows.split([count + 1, extra])[0]
        if isinstance(self.taps, DeviceTaps):
            taps: Mapping[int, Tensor] = self.taps.split([self.taps.rows - extra])[0]
        else:
            taps = {layer: states[: len(states) - extra] for layer, states in self.taps.items()}
        argmax = None if self.argmax is None else self.argmax[: count + 1]
        ranked = None if self.ranked is None else self.ranked[: count + 1]
        return replace(self, rows=rows, taps=taps, argmax=argmax, ranked=ranked)


@cache
def no_logits(vocab: int) -> Tensor:
    return torch.empty(0, vocab)


class Model(ABC):
    """Computes logits of sequences and their drafts; the engine's only view of a network.

    Attributes:
        batch_invariant: whether a row's logits do not depend, bit for bit, on what else is in its pass.
        chunk_invariant: whether they do not depend, bit for bit, on the chunks of the prefill either.
        has_experts: whether a pass reads more weights the more its tokens differ (mixtures of experts).
        source_length: maximum number of tokens that the encoder reads; 0 for a model without an encoder.
        no_adapters: the reason that the model computes no LoRA adapters, if it computes none.
        quantized: whether its matrices are quantized, so that a head's may be, too.
        adapts_levels: whether ``chains`` grows drafts by what was drafted before: a chain that ends early takes fewer
            passes, and trees may be sampled.
        taps_before_norm: whether the last output before the norm is a tap: one more than the number of layers.
    """

    vocab_size: int
    max_length: int
    num_layers: int
    hidden_size: int
    device: torch.device
    dtype: torch.dtype
    batch_invariant: bool = False
    chunk_invariant: bool = False
    has_experts: bool = False
    source_length: int = 0
    quantized: bool = False
    taps_before_norm: bool = False
    adapts_levels: bool = True
    no_adapters: str = "this model computes no LoRA adapters"

    def take_sizes(self, other: Model) -> None:
        """Copies another model's vocabulary, lengths, sizes, device, dtype and invariance."""
        for name in ("vocab_size", "max_length", "num_layers", "hidden_size", "device", "dtype", "source_length"):
            setattr(self, name, getattr(other, name))
        self.batch_invariant, self.chunk_invariant = other.batch_invariant, other.chunk_invariant

    @property
    def runs_ahead(self) -> bool:
        """Whether ``score`` returns while a device still computes."""
        return False

    @property
    def takes_source(self) -> bool:
        """Whether the model is an encoder-decoder."""
        return self.source_length > 0

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache per token; 0 if unknown."""
        return 0

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's recurrent state, at any length; 0 for a model without one."""
        return 0

    @abstractmethod
    def open(
        self,
        prompt: Sequence[int],
        source: Sequence[int] = (),
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> Handle:
        """Opens a sequence; nothing is computed yet.

        Args:
            prompt: at least one token.
            source: the encoder's input, for a model that has an encoder.
            cache_salt: the prefix cache is shared only between sequences of the same salt.
            adapter: name of a LoRA adapter that computes all rows of the sequence, one of ``adapters``; None for none.

        Raises:
            InvalidRequest: the prompt is empty, the source does not fit the model, or the adapter is not loaded.
        """

    @abstractmethod
    def score(self, handles: Sequence[Handle], drafts: Sequence[Draft], taps: Sequence[int] = ()) -> list[Scores]:
        """Computes logits in one pass over all pending tokens and all draft nodes that are not scored yet.

        A draft whose first nodes are already cached grows on them (a draft model's own chain or tree); any other draft
        replaces them. Drafts may differ between sequences, and may be empty.

        Args:
            handles: the sequences.
            drafts: a draft for each sequence.
            taps: layers whose hidden states are returned; see ``Scores.taps``.
        """

    @abstractmethod
    def commit(self, handles: Sequence[Handle], tokens: Sequence[Sequence[int]]) -> None:
        """Appends tokens to each sequence. Cached nodes of these tokens are kept, the others are dropped.

        Appending no tokens abandons the step: the next pass computes the newest token's row again.
        """

    @abstractmethod
    def close(self, handle: Handle) -> None:
        """Closes a sequence and frees its slot. Closing twice does nothing."""

    def enable_prefix_cache(self, max_bytes: int) -> bool:
        """Enables prefix caching within ``max_bytes`` bytes of KV cache, running sequences included.

        A prompt then reuses the rows of its common prefix with an earlier one of the same ``cache_salt``.

        Returns:
            Whether the model supports prefix caching; if not, nothing changes.
        """
        return False

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the loaded LoRA adapters."""
        return ()

    def read_adapter(self, folder: Path) -> Any:
        """Reads a LoRA adapter (2106.09685) for ``add_adapter``. Passes may run in another thread meanwhile.

        Args:
            folder: the adapter in PEFT's format.

        Raises:
            InvalidRequest: the model computes no adapters.
            ModelLoadError: the adapter cannot be read, or does not fit the model.
        """
        raise InvalidRequest(f"{self.no_adapters}; merge the adapter into the model with PEFT's merge_and_unload")

    def add_adapter(self, name: str, adapter: Any) -> None:
        """Adds an adapter between two passes.

        Args:
            name: its name.
            adapter: result of ``read_adapter``.

        Raises:
            InvalidRequest: there is an adapter of this name.
        """
        raise NotImplementedError

    def remove_adapter(self, name: str) -> None:
        """Removes an adapter that no open sequence uses. Its name must not be used again, because prefix caches are
        keyed by it.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Raises AssertionError if the bookkeeping of slots and rows is inconsistent."""
        return

    def reads(self, tokens: Sequence[int]) -> bool:
        """Returns whether the model has an embedding for every token."""
        return not tokens or (min(tokens) >= 0 and max(tokens) < self.vocab_size)

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Raises InvalidRequest for a token without an embedding."""
        if not self.reads(tokens):
            unknown = next(token for token in tokens if not self.reads([token]))
            raise InvalidRequest(
                f"token {unknown} is outside the model's vocabulary of {self.vocab_size} tokens; ids from 0 to "
                f"{self.vocab_size - 1} are expected"
            )

    def admit(self, prompt: Sequence[int], source: Sequence[int]) -> None:
        """Raises InvalidRequest for a prompt or source that the model could never open."""
        self.check_tokens(prompt)
        self.check_tokens(source)
        if len(prompt) >= self.max_length:
            raise ContextLengthExceeded.of("the prompt", len(prompt), self.max_length)
        if bool(source) != self.takes_source:
            raise InvalidRequest(NO_ENCODER if source else NO_SOURCE)
        check_source(source, self.source_length)

    @property
    def drafts_chains(self) -> bool:
        """Whether ``chains`` may be called."""
        return False

    def chains(self, handles: Sequence[Handle], requests: Sequence[ChainRequest], vocab: int) -> Sequence[ModelChain]:
        """Drafts a chain for each sequence in one call, after its pending tokens.

        The rows of its tokens are cached, as ``score`` of the chain would cache them. Only the last token of a chain
        that did not end early has none.

        Args:
            handles: sequences of this model; their earlier drafts are dropped.
            requests: their chains. The ends have the same bounds.
            vocab: size of the target's vocabulary. Tokens that either model lacks are not drafted.

        Raises:
            InvalidRequest: a chain may reach beyond ``max_length``.
        """
        raise NotImplementedError(f"{type(self).__name__} drafts level by level; see drafts_chains")

    def share(self, other: Model) -> bool:
        """Shares a component that both models have in common, so that ``other`` alone computes it.

        Returns:
            Whether there is such a component.
        """
        return False

    def unembed(self, hidden: Tensor) -> Tensor:
        """Applies the vocabulary head alone, for draft heads that share it.

        Args:
            hidden: normed hidden states [rows, H].

        Returns:
            Logits, float32 [rows, V].

        Raises:
            InvalidRequest: the model does not share its vocabulary head.
        """
        raise InvalidRequest(f"{type(self).__name__} does not share its vocabulary head; use heads that have one")


def growing(handle: Handle, draft: Draft) -> int:
    """Returns the number of cached nodes of ``draft``, 0 if the host has not read it.

    If it does not grow on the cached nodes, these are dropped.
    """
    if draft.unread or not draft.limit:
        handle.rewind()
        return 0
    handle.read()
    if not (count := len(handle.nodes)):
        return 0
    grows = tuple(handle.nodes) == draft.ids[:count] and tuple(handle.parents) == draft.parents[:count]
    if not grows or (count == len(draft) and not handle.pending):
        handle.rewind()
        return 0
    return count
