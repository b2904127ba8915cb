"""Parses, validates and tokenizes large bodies in separate processes.

Each of these steps holds the GIL, which would delay every running stream. One process holds the tokenizer and forks a
process for each body, with limits on its CPU time and memory and a lower priority than the server. The memory of a body
is freed with its process. POSIX only.
"""

import asyncio
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from pydantic import ValidationError

from foretoken.core.forking import ForkServer, allow_seconds, ask, first_received, fork_for_each, limit_memory, nicely
from foretoken.serve.chat_schema import References, StoredContent
from foretoken.serve.errors import ApiError, Overloaded, as_api_error, invalid
from foretoken.serve.json_body import parse_json, validation_error
from foretoken.serve.preparation import PreparedRequest, RequestPreparer, StoredContentNeeded
from foretoken.serve.request_state import collect_unknown_fields
from foretoken.serve.schema import Body

_log = logging.getLogger(__name__)

LARGE_BODY = 2**16  # bytes
_MAX_WAITING = 64  # bodies


@dataclass(frozen=True, slots=True)
class SideProcessLimits:
    """Limits of one body."""

    cpu_seconds: float = 20.0  # processor time
    seconds: float = 120.0  # time for which the server waits
    memory_bytes: int = 2**30  # memory in addition to the tokenizer


class SideProcess:
    """Prepares each large body in a new process. The first process is started on first use, or by ``start``."""

    def __init__(self, preparer: RequestPreparer, limits: SideProcessLimits | None = None) -> None:
        self._limits = limits or SideProcessLimits()
        preparer = replace(preparer, settings=replace(preparer.settings, api_keys=(), key_file=None))
        self.process = ForkServer(__name__, lambda: (preparer, self._limits))
        self._threads = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4), "foretoken-large-bodies")
        self._waiting, self._broken = 0, False

    def start(self) -> None:
        """Starts the process without waiting for it."""
        self._threads.submit(self._started)

    async def prepare(
        self, kind: type[Body], body: bytes, earlier: StoredContent | None = None
    ) -> PreparedRequest[Any] | None:
        """Returns the result of ``RequestPreparer.prepare``; None if no process can be started.

        Raises:
            ApiError: The body is invalid; the error is the one that the server itself would raise.
            StoredContentNeeded: See ``RequestPreparer.prepare``.
            Overloaded: Too many large bodies wait.
        """
        if self._waiting >= _MAX_WAITING:
            raise Overloaded(f"{_MAX_WAITING} large requests wait to be read; try again later")
        self._waiting += 1
        try:
            result = await asyncio.get_running_loop().run_in_executor(
                self._threads, self._answer, (kind, body, earlier)
            )
        finally:
            self._waiting -= 1
        if isinstance(result, ApiError):
            raise result
        if isinstance(result, References):
            raise StoredContentNeeded(result)
        return result

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.process.close()

    def _started(self) -> bool:
        """Returns whether the process runs and can be forked."""
        if not self._broken and self._reply(None) is None:
            self._broken = True
            _log.warning("no process for large requests can be started; they will delay others")
        return not self._broken

    def _answer(self, question: Any) -> PreparedRequest[Any] | References | ApiError | None:
        process = self.process.pid
        reply = None if self._broken else self._reply(question)
        if reply is None and not self._started():
            return None
        if reply is None and process not in (None, self.process.pid):  # the old process had died
            reply = self._reply(question)
        if reply is None:
            seconds, mib = self._limits.cpu_seconds, self._limits.memory_bytes >> 20
            return invalid(f"the body takes more than {seconds:g} s or {mib} MiB to read; make the request smaller")
        return reply if isinstance(reply, PreparedRequest | References) else ApiError(**reply)

    def _reply(self, question: Any) -> Any:
        try:
            return ask(self.process.fork(), question, self._limits.seconds, pickled=True)
        except Exception as error:  # some tokenizers cannot be pickled
            _log.debug("the process for large requests failed", exc_info=error)
            return None


# in the forked processes


def main(descriptor: int) -> None:
    """Receives the preparer, then forks for every body until the other end is closed."""
    received = first_received(descriptor)
    if received is None:
        return
    connection, (preparer, limits) = received
    limit_memory(limits.memory_bytes)
    fork_for_each(connection, lambda connection: _serve(connection, preparer, limits))


def _serve(connection: Connection, preparer: RequestPreparer, limits: SideProcessLimits) -> None:
    question = connection.recv()
    if question is None:
        connection.send({})
        return
    allow_seconds(limits.cpu_seconds)
    nicely(lambda: connection.send(_result(preparer, *question)))


def _result(preparer: RequestPreparer, kind: type[Body], body: bytes, earlier: StoredContent | None) -> Any:
    """Returns the request, its references, or the fields of an ApiError, which cannot be pickled."""
    unknown: list[str] = []
    collect_unknown_fields(None if preparer.settings.strict else unknown)
    try:
        prepared = preparer.tokenized_bad_words(preparer.prepare(_validated(kind, body), earlier))
        return replace(prepared, unknown=tuple(unknown))
    except StoredContentNeeded as needed:
        return needed.references
    except Exception as error:
        refusal = as_api_error(error)
        return {name: getattr(refusal, name) for name in ApiError.__dataclass_fields__}


def _validated(kind: type[Body], body: bytes) -> Body:
    """Returns the body as FastAPI validates it. Raises ApiError."""
    value = parse_json(body)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
        located = [{**detail, "loc": ("body", *detail["loc"])} for detail in details]
        raise validation_error(located, value) from error


if __name__ == "__main__":
    main(int(sys.argv[1]))
