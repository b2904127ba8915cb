"""Models whose use a test can observe."""

from typing import Any

from foretoken.models.base import Handle
from foretoken.models.toy import ToyModel


class TrackedToy(ToyModel):
    """A toy that knows which of its sequences are open."""

    def __init__(self, *args: Any, **keys: Any) -> None:
        super().__init__(*args, **keys)
        self.open_slots: set[int] = set()

    def open(self, *given: Any, **named: Any) -> Handle:
        handle = super().open(*given, **named)
        self.open_slots.add(handle.slot)
        return handle

    def close(self, handle: Handle) -> None:
        self.open_slots.discard(handle.slot)
        super().close(handle)
