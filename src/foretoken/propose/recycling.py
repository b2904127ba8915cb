"""Token recycling (2408.08696): drafts the tokens that the target ranked highest after the same token before.

Every row of target logits ranks the successors of its token. They are kept in a table [V, top_k] for all requests of
one ``cache_salt``, and a draft is a tree read from it: 2 MB for 65,536 tokens, and no model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count, pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor

from foretoken.core.artifacts import TABLE, Destination
from foretoken.core.checks import integer
from foretoken.core.context import Context
from foretoken.core.draft import Draft, log_scores
from foretoken.core.errors import ModelLoadError, WriteError
from foretoken.core.files import atomic_file
from foretoken.core.native import sampling as native
from foretoken.core.step import StepOutput
from foretoken.params import MAX_SPECULATIVE_TOKENS
from foretoken.propose.base import BuildContext, Method, Needs, Observation, Proposer

_NONE = -1  # no successor known
_TENSOR = "successors"  # the tensor's name in a saved table
_TABLES_BYTES = 1 << 28  # bound on all tables together


@dataclass(frozen=True, slots=True)
class RecyclingConfig:
    """Size of the table and of the draft tree."""

    top_k: int = 8  # successors kept for each token
    num_steps: int = 8  # maximum depth of a draft

    def __post_init__(self) -> None:
        integer("top_k", self.top_k, 1, MAX_SPECULATIVE_TOKENS)
        integer("num_steps", self.num_steps, 1)


class RankAcceptance:
    """Rate at which the successor of each rank came true, over every emitted token: no observation is censored.

    Starts from a power law with the weight of ``_PRIOR`` tokens, and decays, so that it follows the text.

    Attributes:
        hits: float64 [width], how often the successor of each rank came true. Always the same array.
        trials: Number of tokens.
    """

    _PRIOR, _MEMORY = 32.0, 2000.0

    def __init__(self, width: int) -> None:
        prior = 0.5 / np.arange(1.0, width + 1.0) ** 1.5
        self.hits = prior * self._PRIOR
        self.trials = self._PRIOR

    def add(self, rank: int | None) -> None:
        """Counts one emitted token. ``rank`` is its rank in the row of the token before it, None if absent."""
        if self.trials >= self._MEMORY:
            self.hits *= 0.5
            self.trials *= 0.5
        self.trials += 1.0
        if rank is not None:
            self.hits[rank] += 1.0

    @property
    def order(self) -> list[tuple[int, float]]:
        """Pairs (rank, probability), the likeliest first."""
        rates = self.hits / self.trials
        return [(int(rank), float(rates[rank])) for rank in np.argsort(-rates, kind="stable")]


@dataclass(eq=False, slots=True)
class Successors:
    """Table and rates of the requests of one ``cache_salt``."""

    table: NDArray[np.int32]  # int32 [V, top_k], successors of each token, the likeliest first
    ranks: dict[bool, RankAcceptance]  # acceptance by rank, for greedy requests (True) and for sampled ones (False)
    compiled: dict[bool, native.SuccessorTable]  # both as the kernels read them, likewise

    @staticmethod
    def new(vocab_size: int, top_k: int, start: NDArray[np.int32] | None) -> "Successors":
        """Returns a table that starts from ``start`` [V, k], or an empty one."""
        table = np.full((vocab_size, top_k), _NONE, dtype=np.int32)
        if start is not None:
            width = min(top_k, start.shape[1])
            table[:, :width] = start[:, :width]
        ranks = {greedy: RankAcceptance(top_k) for greedy in (True, False)}
        compiled = {greedy: native.SuccessorTable.of(table, each.hits) for greedy, each in ranks.items()}
        return Successors(table, ranks, compiled)

    def add_prompt(self, prompt: Sequence[int]) -> None:
        """Adds the successions within a prompt, whose rows have no logits, for tokens without an entry."""
        text = np.asarray(prompt)
        unknown = self.table[text[:-1], 0] == _NONE
        self.table[text[:-1][unknown], 0] = text[1:][unknown]

    def learn(self, context: Context, step: StepOutput, rows: Sequence[list[int]]) -> None:
        """Updates the rates, then the table, from one step.

        A row of the emitted text replaces the entry, with the emitted token in front. A row of a rejected node belongs
        to a text that was not written, so it only fills empty entries (measured: 1.80 tokens a pass at temperature 0,
        and 1.64 if it replaced entries too).
        rows: The likeliest tokens at the root and at every node of the draft.
        """
        ranks = self.ranks[context.law.greedy]
        text = context.tokens[-1 - len(step.tokens) :]
        for (token, successor), node in zip(pairwise(text), (-1, *step.verdict.path), strict=False):
            known = self.table[token].tolist()
            ranks.add(known.index(successor) if successor in known else None)
            row = [successor, *(other for other in rows[node + 1] if other != successor)]
            self._write(token, row)
        for token, row in zip(step.draft.ids, rows[1:], strict=True):
            if self.table[token, -1] == _NONE:
                self._write(token, row)

    def _write(self, token: int, row: Sequence[int]) -> None:
        width = min(len(row), self.table.shape[1])
        self.table[token, :width] = row[:width]


class Recycling(Proposer):
    """Drafts the nodes whose ranks most often came true, as fixed candidates, parents before children.

    A node's weight is the product of its ranks' rates from the root down. The ``budget`` heaviest nodes are the best
    tree for these rates (E[accepted] is the sum of the weights). Each ``cache_salt`` has a table and rates of its own,
    rates separately for greedy and for sampled requests. The least recently used tables are dropped when all of them
    would exceed 256 MiB.
    """

    name = "recycling"
    costless = True
    learns = True

    def __init__(
        self, vocab_size: int, config: RecyclingConfig | None = None, table: NDArray[np.int32] | None = None
    ) -> None:
        """Creates empty tables, or tables that start from ``table`` [V, k]."""
        self.config = config or RecyclingConfig()
        self.needs = Needs(live_steps=True, ranks=self.config.top_k)
        top_k = self.config.top_k
        max_tables = max(1, _TABLES_BYTES // (4 * vocab_size * top_k))
        self.successors = lru_cache(max_tables)(lambda cache_salt: Successors.new(vocab_size, top_k, table))
        self._seen: set[int] = set()

    @property
    def table(self) -> NDArray[np.int32]:
        """The table of requests without a ``cache_salt``."""
        return self.successors(None).table

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        return [self._draft(c, b) if b > 0 else Draft.empty() for c, b in zip(contexts, budgets, strict=True)]

    def observe(self, contexts: Sequence[Context], observations: Sequence[Observation]) -> None:
        for context, observation in zip(contexts, observations, strict=True):
            scores, width = observation.scores, self.config.top_k
            likeliest = top(scores.logits, width) if scores.ranked is None else scores.ranked[:, :width].tolist()
            self.successors(context.cache_salt).learn(context, observation.step, likeliest)

    def forget(self, context: Context) -> None:
        self._seen.discard(context.id)

    def save(self, path: Path) -> None:
        """Writes ``table`` as safetensors, for "model" of a later configuration. An earlier table is replaced.

        Raises:
            InvalidRequest: ``path`` is something else than a table.
            WriteError: The file cannot be written.
        """
        try:
            with atomic_file(path, Destination.checked(path, TABLE, force=True).check) as partial:
                save_file({_TENSOR: self.table}, partial)
        except (OSError, SafetensorError) as error:
            raise WriteError(f"cannot write {path}: {error}; free some space or choose another folder") from error

    def _draft(self, context: Context, budget: int) -> Draft:
        successors = self.successors(context.cache_salt)
        if context.id not in self._seen:
            self._seen.add(context.id)
            successors.add_prompt([*context.source, *context.tokens])
        root, greedy, depth = context.tokens[-1], context.law.greedy, self.config.num_steps
        ranks = successors.ranks[greedy]
        if kernels := native.kernels():
            tokens, parents, weights = kernels.tree(successors.compiled[greedy], ranks.trials, root, budget, depth)
        else:
            tokens, parents, weights = self._tree(successors.table, root, budget, ranks.order)
        if not tokens:
            return Draft.empty()
        return Draft.tree(tokens, parents, log_scores(weights))

    def _tree(
        self, table: NDArray[np.int32], root: int, budget: int, rates: Sequence[tuple[int, float]]
    ) -> tuple[list[int], list[int], list[float]]:
        """Grows the tree best first: a node that is taken offers its next sibling and its first child."""
        tokens: list[int] = []
        parents: list[int] = []
        weights: list[float] = []
        serial = count()  # on equal weights the older offer first
        heap: list[tuple[float, int, int, int, list[int], int, float]] = []

        def offer(parent: int, depth: int, row: list[int], place: int, base: float) -> None:
            for at in range(place, len(rates)):
                rank, rate = rates[at]
                if row[rank] != _NONE:
                    heappush(heap, (-base * rate, next(serial), parent, depth, row, at, base))
                    return

        offer(-1, 1, table[root].tolist(), 0, 1.0)
        while heap and len(tokens) < budget:
            negative, _, parent, depth, row, place, base = heappop(heap)
            token = row[rates[place][0]]
            tokens.append(token)
            parents.append(parent)
            weights.append(-negative)
            offer(parent, depth, row, place + 1, base)
            if depth < self.config.num_steps:
                offer(len(tokens) - 1, depth + 1, table[token].tolist(), 0, -negative)
        return tokens, parents, weights


def top(logits: Tensor, k: int) -> list[list[int]]:
    """Returns the ids of the ``k`` largest logits of each row [V], largest first: min(k, V) for each row."""
    if kernels := native.for_rows(logits):
        return kernels.largest(logits, k).tolist()
    ids: list[list[int]] = logits.topk(min(k, logits.shape[1])).indices.tolist()
    return ids


def load_table(path: Path, vocab_size: int) -> NDArray[np.int32]:
    """Returns a saved table [V, k]. Raises ModelLoadError if it is none, or of another vocabulary."""
    expected = f"expected a table of token recycling, {_TENSOR!r} [{vocab_size}, k] with ids below {vocab_size}"
    try:
        table = load_file(path)[_TENSOR]
    except (OSError, SafetensorError, KeyError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}; {expected}") from error
    fits = table.ndim == 2 and table.shape[0] == vocab_size and table.dtype == np.int32 and table.size
    if not fits or table.min() < _NONE or table.max() >= vocab_size:
        raise ModelLoadError(f"{path} holds {table.dtype} {list(table.shape)} of another vocabulary; {expected}")
    return table


def build(config: RecyclingConfig, build_context: BuildContext) -> Recycling:
    size = build_context.target.vocab_size
    table = None if build_context.model is None else load_table(Path(build_context.model), size)
    return Recycling(size, config, table)


METHOD = Method(RecyclingConfig, build, tokens=8, drafts_trees=True)
