"""The plain and the speculative side of a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foretoken.core.errors import ForetokenError
from foretoken.probe.answers import Failed, Refused, ServerAnswer
from foretoken.probe.client import EndpointClient, Patience
from foretoken.probe.dialects import DIALECTS, Dialect, ServerKind, detect
from foretoken.probe.journal import Journal, restored_answer
from foretoken.probe.side import Side


@dataclass(frozen=True, slots=True)
class ServerPair:
    """A server with speculation, and the same model without it.

    Attributes:
        url: The server that speculates.
        model: The model's name there.
        baseline: A server of the same model without speculation; None if ``url`` can switch it off for a request.
        kind: What kind of server ``url`` is.
        key: Its API key.
        baseline_key: That of the baseline; None for the same.
        patience: Time limits and retries.
    """

    url: str
    model: str
    baseline: str | None = None
    kind: ServerKind = ServerKind.AUTO
    key: str | None = None
    baseline_key: str | None = None
    patience: Patience = field(default_factory=Patience)

    def sides(self, journal: Journal[ServerAnswer] | None = None) -> list[Side]:
        """Returns the plain side, if there is one, and the speculative side.

        Args:
            journal: Keeps the answers.
        """
        kept = Journal(restored_answer) if journal is None else journal
        client = EndpointClient(self.url, self.key, self.patience, kept)
        dialect = self._dialect(client)
        speculative = Side("speculative", client, self.model, dialect)
        if self.baseline is not None:
            other = EndpointClient(self.baseline, self.baseline_key or self.key, self.patience, kept)
            own = self._dialect(other)
            return [Side("plain", other, self.model, own, own.plain or {}), speculative]
        if dialect.plain is None:
            return [speculative]
        alone = EndpointClient(self.url, self.key, self.patience, kept)  # counts by itself
        return [Side("plain", alone, self.model, dialect, dialect.plain), speculative]

    def _dialect(self, client: EndpointClient) -> Dialect:
        return detect(client) if self.kind is ServerKind.AUTO else DIALECTS[self.kind]


def why_unusable(side: Side, reply: Refused | Failed) -> str:
    """Returns why a side gave no text. Raises ForetokenError if the user can mend that."""
    if isinstance(reply, Refused) and reply.why[:3] in ("401", "403", "404"):
        raise ForetokenError(f"{side.client.url} refuses {side.model!r} ({reply.why}); see --model and --api-key")
    return f"the {side.name} side, {side.client.url}, gave no text: {reply.why}"


def switched(side: Side, fields: Mapping[str, Any], name: str) -> Side:
    """Returns the side with other fields that switch, under another name."""
    return Side(name, side.client, side.model, side.dialect, fields, side.abilities)
