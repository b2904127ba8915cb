"""Draft lengths of requests that choose among several methods: each request has that of its method."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foretoken.control.base import Controller
from foretoken.control.limited import Bounded
from foretoken.core.context import Context


@dataclass(frozen=True, slots=True)
class MethodLength:
    """Draft length of one method."""

    max_tokens: int  # largest number of draft tokens of a request
    constant: bool  # every draft has that length, unless the request asks for another one


class PerMethod(Bounded):
    """Gives each request the draft length of its method.

    A request's method, and its draft length if that is constant, are settled when it is queued, so that a later change
    of the default method does not change them.
    """

    def __init__(
        self,
        inner: Controller,  # decides for all requests of a step together
        lengths: Mapping[str, MethodLength],  # draft lengths by method
        method_of: Callable[[Context], str],  # returns the method of a request
        default: Callable[[], str],  # returns the method of new requests that name none
    ) -> None:
        super().__init__(inner)
        self.lengths, self._method_of, self._default = lengths, method_of, default

    def admit(self, context: Context) -> None:
        context.method = self._method_of(context)
        length = self.lengths[context.method]
        if context.depth is None and length.constant:
            context.depth = length.max_tokens

    def limits(self, contexts: Sequence[Context], max_draft_tokens: Sequence[int]) -> Sequence[int]:
        return [self._limit(context, left) for context, left in zip(contexts, max_draft_tokens, strict=True)]

    def describe(self) -> dict[str, Any]:
        described, length = super().describe(), self.lengths[self._default()]
        name = "fixed" if length.constant else described["name"]
        return described | {"name": name, "max_tokens": length.max_tokens}

    @property
    def pause(self) -> str | None:
        return super().pause if self.lengths[self._default()].max_tokens else None

    def _limit(self, context: Context, left: int) -> int:
        max_tokens = self.lengths[self._method_of(context)].max_tokens
        return min(left, max_tokens) if context.depth is None or not max_tokens else left
