"""Stored responses, in memory of bounded size."""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foretoken.serve.chat_schema import References, StoredContent
from foretoken.serve.errors import ApiError, invalid


@dataclass(frozen=True)
class StoredResponse:
    """A response and its input, in JSON."""

    response: bytes  # the response
    inputs: bytes  # the list of its input items, without those of earlier responses
    outputs: bytes  # the list of its output items
    previous: str | None  # identifier of the response that it continues
    owner: str | None  # digest of the API key that may read it
    items: tuple[str, ...] = field(default=())  # identifiers of its input and output items

    @property
    def size(self) -> int:
        """Bytes that it is counted with."""
        return len(self.response) + len(self.inputs) + len(self.outputs)

    @classmethod
    def of(cls, response: Mapping[str, Any], inputs: Sequence[Any], owner: str | None) -> "StoredResponse":
        outputs = response["output"]
        return cls(
            response=json.dumps(response).encode(),
            inputs=json.dumps(inputs).encode(),
            outputs=json.dumps(outputs).encode(),
            previous=response["previous_response_id"],
            owner=owner,
            items=tuple(item["id"] for item in (*inputs, *outputs)),
        )


class ResponseStore:
    """Stores the most recently used responses, within both limits. None is no limit."""

    def __init__(self, count: int | None, size: int | None) -> None:
        self.enabled = count is not None or size is not None
        self._count, self._size = count, size
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()  # the most recently used last
        self._response_of: dict[str, str] = {}  # the response of every item
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._responses)

    def add(self, identifier: str, stored: StoredResponse) -> None:
        """Stores a response, and forgets the least recently used ones that no longer fit."""
        if not self.enabled:
            return
        self._responses[identifier] = stored
        self._bytes += stored.size
        self._response_of.update(dict.fromkeys(stored.items, identifier))
        count, size = self._count, self._size
        while self._responses and (
            (count is not None and len(self._responses) > count) or (size is not None and self._bytes > size)
        ):
            self._forget(next(iter(self._responses)))

    def get(self, identifier: str, owner: str | None) -> StoredResponse:
        """Returns a response. Raises a 404 for one that is not stored, or belongs to another key."""
        stored = self._responses.get(identifier)
        if stored is None or stored.owner != owner:
            raise ApiError(404, f"no response {identifier!r} is stored here{self._why}", code="response_not_found")
        self._responses.move_to_end(identifier)
        return stored

    def delete(self, identifier: str, owner: str | None) -> None:
        """Forgets a response. Raises as ``get`` does."""
        self.get(identifier, owner)
        self._forget(identifier)

    def find(self, references: References, owner: str | None) -> StoredContent:
        """Returns the content of references. Raises a 400 for one that is not stored, or belongs to another key."""
        conversation: list[bytes] = []
        identifier = references.response
        while identifier is not None:
            stored = self._responses.get(identifier)
            if stored is None or stored.owner != owner:
                message = f"the previous response {identifier!r} is not stored here{self._why}"
                raise invalid(message, "previous_response_id", "previous_response_not_found")
            self._responses.move_to_end(identifier)  # those before it too, so that they are forgotten after it
            conversation = [stored.inputs, stored.outputs, *conversation]
            identifier = stored.previous
        return StoredContent(tuple(conversation), {name: self._item(name, owner) for name in references.items})

    @property
    def _why(self) -> str:
        if self.enabled:
            return "; it may have been deleted, or forgotten for lack of memory. Send its items in input instead"
        return ": this server stores none (--response-store). Send the items of the conversation in input instead"

    def _item(self, identifier: str, owner: str | None) -> bytes:
        stored = self._responses.get(self._response_of.get(identifier, ""))
        if stored is None or stored.owner != owner:
            raise invalid(f"the item {identifier!r} is not stored here{self._why}", "input", "item_not_found")
        items = [*json.loads(stored.inputs), *json.loads(stored.outputs)]
        return json.dumps(next(item for item in items if item["id"] == identifier)).encode()

    def _forget(self, identifier: str) -> None:
        stored = self._responses.pop(identifier)
        self._bytes -= stored.size
        for item in stored.items:
            if self._response_of.get(item) == identifier:
                del self._response_of[item]
