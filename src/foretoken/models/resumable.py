"""A model whose closed sequences can be resumed, and whose passes can be cancelled."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile

from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.models.base import Handle, Model, Scores


class ModelWrapper(Model):
    """Forwards everything to ``inner``, for models that change a part of it."""

    def __init__(self, inner: Model) -> None:
        self.inner = inner
        self.take_sizes(inner)
        self.taps_before_norm = inner.taps_before_norm

    def open(
        self,
        prompt: Sequence[int],
        source: Sequence[int] = (),
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> Handle:
        return self.inner.open(prompt, source, cache_salt, adapter)

    def close(self, handle: Handle) -> None:
        self.inner.close(handle)

    def score(self, handles: Sequence[Handle], drafts: Sequence[Draft], taps: Sequence[int] = ()) -> list[Scores]:
        return self.inner.score(handles, drafts, taps)

    def commit(self, handles: Sequence[Handle], tokens: Sequence[Sequence[int]]) -> None:
        self.inner.commit(handles, tokens)

    def admit(self, prompt: Sequence[int], source: Sequence[int]) -> None:
        self.inner.admit(prompt, source)

    @property
    def kv_bytes_per_token(self) -> int:
        return self.inner.kv_bytes_per_token

    @property
    def state_bytes(self) -> int:
        return self.inner.state_bytes

    @property
    def adapters(self) -> tuple[str, ...]:
        return self.inner.adapters

    def enable_prefix_cache(self, max_bytes: int) -> bool:
        return self.inner.enable_prefix_cache(max_bytes)

    def check(self) -> None:
        self.inner.check()

    def unembed(self, hidden: Tensor) -> Tensor:
        return self.inner.unembed(hidden)


class Resumable(ModelWrapper):
    """Wraps ``inner``: sequences that are closed inside ``parked`` keep their rows until they are resumed or released.

    A sequence that is opened with the same source, ``cache_salt`` and adapter takes over the rows of the parked
    sequence with the longest common prefix. So a drafter that ran ahead on tokens which were then rejected can close
    its sequence and open it again: only the rows that differ are computed. A row does not depend on the pass that
    computes it.

    Args:
        inner: the model to wrap.
        before: called before every pass. An exception that it raises cancels the pass.
    """

    def __init__(self, inner: Model, before: Callable[[], None] = lambda: None) -> None:
        super().__init__(inner)
        self.before = before
        # source, cache_salt and adapter by slot, for open and parked sequences
        self._scopes: dict[int, tuple[tuple[int, ...], str | None, str | None]] = {}
        self._parked: list[tuple[int, Handle]] = []
        self._key: int | None = None

    @contextmanager
    def parked(self, key: int) -> Iterator[None]:
        """Context manager: sequences that are closed inside are parked under ``key``."""
        self._key = key
        try:
            yield
        finally:
            self._key = None

    def release(self, key: int) -> None:
        released = [handle for name, handle in self._parked if name == key]
        self._parked = [(name, handle) for name, handle in self._parked if name != key]
        for handle in released:
            self.close(handle)

    def open(
        self,
        prompt: Sequence[int],
        source: Sequence[int] = (),
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> Handle:
        scope = tuple(source), cache_salt, adapter
        candidates = [(i, h) for i, (_, h) in enumerate(self._parked) if self._scopes[h.slot] == scope]
        shared, index = max(((_common_prefix(h.tokens, prompt), i) for i, h in candidates), default=(0, 0))
        if not shared:
            handle = self.inner.open(prompt, source, cache_salt, adapter)
            self._scopes[handle.slot] = scope
            return handle
        _, handle = self._parked.pop(index)
        handle.truncate(shared)
        if shared < len(prompt):
            self.inner.commit([handle], [prompt[shared:]])
        return handle

    def close(self, handle: Handle) -> None:
        if handle.slot < 0 or any(handle is other for _, other in self._parked):
            return
        if self._key is None:
            del self._scopes[handle.slot]
            self.inner.close(handle)
        else:
            self._parked.append((self._key, handle))

    def score(self, handles: Sequence[Handle], drafts: Sequence[Draft], taps: Sequence[int] = ()) -> list[Scores]:
        self.before()
        return super().score(handles, drafts, taps)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
