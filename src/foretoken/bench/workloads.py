"""What is raced on: our own Python functions to complete, or prompts from a file."""

from __future__ import annotations

import json
from pathlib import Path

from foretoken.core.errors import InvalidRequest

# None ends with a line break: the next line's break and indentation are often one token.
FUNCTIONS: tuple[str, ...] = (
    '''def read_settings(path, defaults=None):
    """Read ``key = value`` lines from the file at path into a dictionary.

    Blank lines and lines that start with ``#`` are skipped.  Keys that the
    file does not name take their value from defaults.
    """''',
    '''class RingBuffer:
    """A fixed number of slots; the newest item overwrites the oldest."""

    def __init__(self, size):
        if size < 1:
            raise ValueError("size must be at least 1")
        self._size = size
        self._items = []
        self._next = 0

    def append(self, item):
        """Store item, dropping the oldest one when the buffer is full."""''',
    '''import os


def find_files(root, suffix):
    """Return a sorted list of all files below root whose name ends with suffix.

    Directories whose name starts with a dot are not entered.
    """
    found = []
    for dirpath, dirnames, filenames in os.walk(root):''',
    '''def parse_version(text):
    """Parse a version such as "3.11.7" into a tuple of integers.

    Raise ValueError if a part is not a number or there are none.
    """
    parts = text.strip().split(".")''',
    '''import threading


class Counter:
    """A counter that many threads may increment."""

    def __init__(self, start=0):
        self._lock = threading.Lock()
        self._value = start

    def increment(self, amount=1):
        """Add amount and return the new value."""''',
    '''def wrap_words(text, width=70):
    """Break text into lines of at most width characters, between words.

    A word longer than width gets a line of its own.  Return the list of lines.
    """
    lines = []
    current = []
    length = 0
    for word in text.split():''',
    '''import socket


def wait_for_port(host, port, timeout=10.0):
    """Return True once a TCP connection to (host, port) succeeds.

    Return False if that has not happened within timeout seconds.
    """''',
    '''def merge_sorted(left, right, key=None):
    """Merge two sorted lists into one sorted list.

    Items that compare equal keep their order, those of left first.
    """
    if key is None:
        key = lambda item: item
    result = []
    i = j = 0''',
)


def load_prompts(path: Path, count: int | None = None) -> list[str]:
    """The ``prompt`` fields of a JSON-lines file, at most ``count`` of them, in the order of the file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InvalidRequest(f"cannot read the prompts {path}: {error.strerror}; expected a JSON-lines file") from error
    prompts: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompts.append(str(json.loads(line)["prompt"]))
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(
                f'{path}, line {number}: expected one JSON object a line with a "prompt", got {line[:60]!r}'
            ) from error
    if not prompts:
        raise InvalidRequest(f"{path} holds no prompts; expected one JSON object a line")
    return prompts[:count]
