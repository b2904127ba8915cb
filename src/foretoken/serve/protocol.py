"""uvicorn's HTTP protocol, with bounded headers."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from foretoken.serve.errors import ApiError
from foretoken.serve.limits import MAX_HEADERS
from foretoken.serve.request_ids import HEADER, new_request_id


class HttpProtocol(H11Protocol):
    """Closes connections whose request head does not arrive in time, and answers malformed requests as OpenAI does.

    It uses h11 because httptools buffers a header line of any length, while h11 refuses one that exceeds
    ``h11_max_incomplete_event_size``.
    """

    head_seconds = 20.0

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the timer of the request head."""
        super().connection_made(transport)
        self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timer."""
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Starts the timer for the next request. It also runs while the rest of an unread body arrives."""
        self._wait_for_request()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Answers a malformed request. Called while an h11.RemoteProtocolError is handled."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # an answer has begun
            return
        answer = _refusal(sys.exception())
        body = json.dumps(answer.body()).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
        headers[HEADER] = new_request_id()
        events = (h11.Response(status_code=answer.status, headers=list(headers.items())), h11.Data(data=body))
        for event in (*events, h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _wait_for_request(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(self.head_seconds, self._give_up, self.cycle)

    def _give_up(self, last: Any) -> None:
        if self.cycle is last:
            self.transport.close()


def _refusal(error: BaseException | None) -> ApiError:
    if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431:
        message = f"the request's headers are larger than the {MAX_HEADERS} bytes that this server takes"
        return ApiError(431, message, code="headers_too_large")
    return ApiError(400, f"this is not an HTTP request: {error}")
