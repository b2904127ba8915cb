"""What servers answered to an audit or a plan that is under way, on disk, so that the next run asks for the rest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

from foretoken.core.errors import WriteError
from foretoken.probe.answers import Arrival, ServerAnswer, TokenPlace
from foretoken.probe.counters import DraftCounts

T = TypeVar("T")


class Journal(Generic[T]):
    """Answers by request, so that nothing is asked twice.

    Attributes:
        resumed: Keys of the answers that an earlier run left.

    Args:
        restored: Returns an answer, which is a dataclass, from its JSON.
        file: JSON lines, one for each answer; None keeps them in memory alone. An incomplete last line is ignored.

    Raises:
        WriteError: The file cannot be read or written.
    """

    def __init__(self, restored: Callable[[Mapping[str, Any]], T], file: Path | None = None) -> None:
        self._file = file
        self._answers: dict[str, T] = {}
        self.resumed: frozenset[str] = frozenset()
        if file is not None:
            try:
                lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
                for key, kept in filter(None, (_read(line, restored) for line in lines)):
                    self._answers[key] = kept
                self.resumed = frozenset(self._answers)
                self._out = file.open("a", encoding="utf-8")
            except OSError as error:
                raise WriteError(f"cannot keep answers in {file}: {error.strerror}; choose another --output") from error

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: str) -> T | None:
        """Returns the answer to a request that was made before, in this run or an earlier one."""
        return self._answers.get(key)

    def keep(self, key: str, answer: T) -> None:
        """Keeps an answer."""
        self._answers[key] = answer
        if self._file is not None:
            self._out.write(json.dumps({"key": key, "answer": asdict(answer)}) + "\n")  # type: ignore[call-overload]
            self._out.flush()

    def close(self, finished: bool) -> None:
        """Closes the file, and removes it if the audit is finished."""
        if self._file is not None:
            self._out.close()
            if finished:
                self._file.unlink(missing_ok=True)


def request_key(url: str, tag: str, body: Mapping[str, Any]) -> str:
    """Returns the key of a request. tag: tells apart equal requests."""
    text = json.dumps([url, tag, body], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def restored_answer(given: Mapping[str, Any]) -> ServerAnswer:
    """Returns an answer from its JSON."""
    counts = given["counts"]
    own: dict[str, Any] = {name: tuple(given[name]) for name in ("ids", "prompt_ids", "choices")}
    own["places"] = tuple(filter(None, map(_place, given["places"])))
    own["scored"] = tuple(map(_place, given["scored"]))
    own["arrivals"] = tuple(Arrival(*arrival) for arrival in given["arrivals"])
    own["counts"] = None if counts is None else DraftCounts(**counts | {"by_position": tuple(counts["by_position"])})
    return ServerAnswer(**{**given, **own})


def _read(line: str, restored: Callable[[Mapping[str, Any]], T]) -> tuple[str, T] | None:
    try:
        kept = json.loads(line)
        return str(kept["key"]), restored(kept["answer"])
    except (ValueError, LookupError, TypeError):
        return None


def _place(given: Mapping[str, Any] | None) -> TokenPlace | None:
    if given is None:
        return None
    pairs: Sequence[Sequence[Any]] = given["top"]
    return TokenPlace(given["token"], given["logprob"], tuple((str(name), float(value)) for name, value in pairs))
