"""The one contract for target and draft alike.

A model keeps, for every open sequence, the keys and values of its committed tokens and, until the next
commit, those of the draft nodes it has scored. Tokens whose rows are not computed yet are *pending*: the whole
prompt after ``open``, the newest token after ``commit``, more when a draft model sat a few rounds out. A pass
always computes what is pending first, so nobody has to prefill, catch up or roll back by hand.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest

NO_ENCODER = "this model has no encoder that could read a source; give it the whole text as its prompt"


@dataclass(eq=False, slots=True)
class Handle:
    """One sequence's place in one model. ``cached`` rows hold ``tokens[:cached]``; ``nodes`` follow them.

    ``nodes`` and ``parents`` are the draft nodes whose rows are in the cache, in the order of their rows.
    """

    slot: int
    tokens: list[int]
    cached: int = 0
    nodes: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    @property
    def pending(self) -> list[int]:
        return self.tokens[self.cached :]

    def advance(self, tokens: Sequence[int]) -> tuple[int, list[int]]:
        """Append committed tokens. -> the cache row from which on the rows listed are to be kept, in order"""
        at = self.cached
        rows = [at + node for node in self.match(tokens)]
        self.cached += len(rows)
        self.tokens.extend(tokens)
        self.rewind()
        return at, rows

    def rewind(self) -> None:
        """Forget an abandoned round: no draft nodes, and the newest token's row to be computed again."""
        self.nodes.clear()
        self.parents.clear()
        self.cached = min(self.cached, len(self.tokens) - 1)

    def truncate(self, length: int) -> None:
        """Forget the tokens from ``length`` (at least 1) on, and any draft; the rows before them stay cached."""
        del self.tokens[length:]
        self.rewind()

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The cached nodes that spell the longest prefix of ``tokens``, from the root down."""
        path: list[int] = []
        at = -1
        for token in tokens:
            child = next(
                (i for i, (t, p) in enumerate(zip(self.nodes, self.parents, strict=True)) if p == at and t == token),
                None,
            )
            if child is None:
                break
            path.append(child)
            at = child
        return path


@dataclass(frozen=True, slots=True)
class Scores:
    """What one pass says about one sequence.

    logits: [rows, V]. Row 0 is at the root (the last committed token) and row i + 1 at draft node i, except
    when earlier nodes were scored before: then only the rows that are new, in the same order.
    taps: hidden states by layer index, [computed, H]: every row that this call computed, a prompt's included, which
    are the pending tokens from position ``first`` of the sequence on and then the new draft nodes. So the last rows
    are those of ``logits``. Index i is the *input* of layer i, as in transformers' ``hidden_states[i]``; the number
    of layers is the normed output.
    """

    logits: Tensor
    taps: dict[int, Tensor] = field(default_factory=dict)
    first: int = 0


class Model(ABC):
    """Scores sequences and their drafts; the engine's only view of a network.

    ``rows_independent`` says whether a row's logits are bit-equal whatever shares its pass, ``cuts_freely`` whether
    they are so, too, wherever a prompt is cut into passes, ``source_length`` how much of a text an
    encoder reads beside it, in tokens; 0 is no encoder.
    """

    vocab_size: int
    max_length: int
    num_layers: int
    hidden_size: int
    device: torch.device
    dtype: torch.dtype
    rows_independent: bool = False
    cuts_freely: bool = False
    source_length: int = 0

    @property
    def takes_source(self) -> bool:
        """Whether it is an encoder-decoder."""
        return self.source_length > 0

    @property
    def row_bytes(self) -> int:
        """Bytes that the keys and values of one token take, 0 where nobody knows."""
        return 0

    @abstractmethod
    def open(self, prompt: Sequence[int], source: Sequence[int] = (), cache_salt: str | None = None) -> Handle:
        """Give a sequence a place; nothing is computed yet. ``prompt`` has at least one token.

        source: what the encoder is to read, of a model that has one. Raises InvalidRequest where it does not fit.
        cache_salt: cached rows are shared only between sequences of the same salt.
        """

    @abstractmethod
    def score(self, handles: Sequence[Handle], drafts: Sequence[Draft], taps: Sequence[int] = ()) -> list[Scores]:
        """One pass over everything pending and every draft node not yet scored.

        A draft whose first nodes are those already cached grows on them (a draft model's own chain or tree);
        any other draft replaces them. Each sequence may have another draft, or the empty one.
        """

    @abstractmethod
    def commit(self, handles: Sequence[Handle], tokens: Sequence[Sequence[int]]) -> None:
        """Append tokens to each sequence; cached nodes that spell them are kept, the others dropped.

        Appending nothing abandons the round: the next pass computes the newest token's row again.
        """

    @abstractmethod
    def close(self, handle: Handle) -> None:
        """Give the place back. Closing twice does nothing."""

    def keep(self, limit: int) -> bool:
        """Hold at most ``limit`` bytes of keys and values, and within them those of closed sequences, so that a prompt
        that begins as one of the same ``cache_salt`` finds its first rows computed. -> whether this model can; if not,
        nothing changes
        """
        return False

    def check(self) -> None:
        """Raises AssertionError where places and rows do not add up."""
        return

    def admit(self, prompt: Sequence[int], source: Sequence[int]) -> None:
        """Raises InvalidRequest for what could never be opened."""
        if len(prompt) >= self.max_length:
            raise InvalidRequest(
                f"the prompt has {len(prompt)} tokens and the model was opened with room for {self.max_length}, prompt "
                "and output together; shorten it or raise max_model_len"
            )
        if bool(source) != self.takes_source:
            raise InvalidRequest(
                NO_ENCODER if source else "this model is an encoder-decoder; give it a text for its encoder"
            )

        if len(source) > self.source_length:
            raise InvalidRequest(
                f"the prompt has {len(source)} tokens and the encoder reads at most {self.source_length}; shorten it"
            )

    def share(self, other: Model) -> bool:
        """Let a part that both have in common be computed once, by ``other``. -> whether there is one"""
        return False

    def unembed(self, hidden: Tensor) -> Tensor:
        """The vocabulary head alone, for heads that share it: normed states [rows, H] -> float32 [rows, V]."""
        raise InvalidRequest(f"{type(self).__name__} does not share its vocabulary head; take heads with their own")


def growing(handle: Handle, draft: Draft) -> int:
    """How many nodes of ``draft`` are in the cache already; a draft that does not grow on them starts over."""
    count = len(handle.nodes)
    grows = tuple(handle.nodes) == draft.ids[:count] and tuple(handle.parents) == draft.parents[:count]
    if not grows or (count == len(draft) and not handle.pending):
        handle.rewind()
        return 0
    return count
