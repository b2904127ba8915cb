"""Components of both runtimes of encoder-decoders: a cache of the encoder's outputs, and the sources of slots."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.models.base import NO_SOURCE, check_source
from foretoken.models.formats.layers import Source
from foretoken.models.runners.base import Runner
from foretoken.models.runners.pass_plan import Part, PassPlan
from foretoken.models.state.pages import SlotCache

_SAMPLE = 1024  # elements of each tensor that the fingerprint of an encoder covers
MAX_SOURCES = 32  # cached outputs, for other completions of a request and for a draft that shares the encoder


class Encoder:
    """Encodes one source at a time, so that its output does not depend on others, and caches outputs.

    Args:
        compute: returns the output for a source, [source, H].
        longest: maximum number of tokens of a source.
        fingerprint: hash of its weights; encoders with equal hashes are treated as the same.
    """

    def __init__(self, compute: Callable[[tuple[int, ...]], Tensor], longest: int, fingerprint: str) -> None:
        self._compute, self.longest, self.fingerprint = compute, longest, fingerprint
        self._cached: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()

    def states(self, source: Sequence[int]) -> Tensor:
        """Returns the encoder's output for a source, [source, H]."""
        key = tuple(source)
        states = self._cached.pop(key, None)
        self._cached[key] = states = self._compute(key) if states is None else states
        while len(self._cached) > MAX_SOURCES:
            self._cached.popitem(last=False)
        return states


def fingerprint(encoder: Source) -> str:
    """Returns a hash of an encoder's weights and sizes."""
    a = encoder.architecture
    sizes = a.stack, a.heads, a.head_dim, a.intermediate, a.activation, a.scale, a.embedding_scale
    digest = hashlib.sha256(repr((sizes, encoder.dtype, encoder.quantize)).encode())
    prefixes = (f"{a.names.base}encoder.", f"{a.names.base}shared.")
    for name in sorted(n for n in encoder.weights if n.startswith(prefixes)):
        values = encoder.weights[name]
        flat = values.flatten()
        digest.update(f"{name} {tuple(values.shape)}".encode())
        digest.update(flat[:: max(1, len(flat) // _SAMPLE)].float().numpy().tobytes())
    return digest.hexdigest()


def encoded(runner: Runner, layers: int, source: Sequence[int]) -> Tensor:
    """Returns the normed states of a source, [source, H], from a runner of the encoder's ``layers`` layers."""
    count = len(source)
    slot, _ = runner.acquire()
    try:
        part = Part(slot, 0, count, count, Draft.empty(), mutual=True)
        plan = PassPlan(list(source), list(range(count)), [part], [], [], count)
        return runner.run(plan, (layers,), logits=False).taps[layers]
    finally:
        runner.release(slot)


class SourceRunner(Runner):
    """A runner whose slots have sources, each of which is encoded before the slot's first pass.

    Attributes:
        encoder: the encoder.
    """

    encoder: Encoder
    _source_pages: SlotCache  # keys and values of sources, with the same slots as the decoder's
    _lengths: dict[int, int]  # of the sources, by slot
    _pending: dict[int, tuple[int, ...]]  # sources that are not encoded yet, by slot

    def _set_sources(self, pages: SlotCache) -> None:
        self._source_pages, self._lengths, self._pending = pages, {}, {}

    def acquire(
        self, tokens: Sequence[int] = (), scope: Hashable = None, adapter: str | None = None
    ) -> tuple[int, int]:
        slot, _ = super().acquire()
        number, _ = self._source_pages.acquire()
        assert number == slot
        return slot, 0

    def attach(self, slot: int, source: Sequence[int]) -> None:
        check_source(source, self.encoder.longest)
        self._pending[slot], self._lengths[slot] = tuple(source), len(source)

    def release(self, slot: int) -> None:
        self._pending.pop(slot, None)
        self._lengths.pop(slot, None)
        self._source_pages.release(slot)
        super().release(slot)

    def enable_prefix_cache(self, max_bytes: int) -> bool:
        return False  # keys and values depend on the source

    def check(self) -> None:
        super().check()
        assert set(self._pending) <= set(self._lengths), "a pending source has no slot"
        self._source_pages.check()

    def nbytes(self) -> int:
        return super().nbytes() + self._source_pages.nbytes()

    def _encode(self, plan: PassPlan) -> None:
        """Encodes the pending sources of a plan's slots. Raises InvalidRequest for a slot without a source."""
        for part in plan.parts:
            if part.slot not in self._lengths:
                raise InvalidRequest(NO_SOURCE)
            if part.slot in self._pending:
                self._remember(part.slot, self.encoder.states(self._pending[part.slot]))
                del self._pending[part.slot]

    @abstractmethod
    def _remember(self, slot: int, states: Tensor) -> None:
        """Keeps the keys and values of a source's states [source, H] for all layers."""
