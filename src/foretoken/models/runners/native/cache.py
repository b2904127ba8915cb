"""Keeps packed weights on disk, so that the second start of a model maps a file instead of packing again.

One file for each combination of checkpoint, scheme, processor and version of the code, in a folder that only its owner
may read. The least recently used files are deleted beyond a bound.
"""

import atexit
import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from foretoken.core.checks import parse_size
from foretoken.core.errors import InvalidRequest
from foretoken.core.files import cache_folder
from foretoken.core.native import build, cpu
from foretoken.models.runners.native.weight_image import DamagedImage, OpenImage, WeightImage, open_image

BOUND = "FORETOKEN_WEIGHT_CACHE"  # bytes, such as "20GiB"; "0" disables the cache
DEFAULT_BOUND = "32GiB"
MIN_BYTES = 2**28  # smaller models are packed in less than a second
_SUFFIX = ".weights"
_WRITER = "weight cache"  # name of threads that write
_ABANDONED = 3600  # seconds after which an unfinished file is deleted
_ENDS = 2**20  # bytes at each end of a checkpoint's files that are part of the key
_CODE = Path(__file__).parents[2]  # foretoken/models
_kept: list[Callable[[], None]] = []  # functions that write packed weights
_log = logging.getLogger(__name__)


class WeightCache:
    """The file of one model's packed weights.

    Args:
        files: the files of the checkpoint.
        settings: other properties that the packed weights depend on, as JSON.
    """

    def __init__(self, files: tuple[Path, ...], settings: Mapping[str, Any]) -> None:
        level = cpu.chosen()
        processor = None if level is None else level.name
        identity = [[_identity(file) for file in files], settings, _code(), processor, torch.__version__]
        key = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:32]
        self.path = cache_folder() / "weights" / f"{key}{_SUFFIX}"

    @staticmethod
    def of(weights: object, settings: Mapping[str, Any]) -> "WeightCache | None":
        """Returns the cache for the tensors of a checkpoint; None if they are in no files, or in small ones."""
        files: Sequence[Path] = getattr(weights, "files", ())
        if not bound() or sum(file.stat().st_size for file in files) < MIN_BYTES:
            return None
        return WeightCache(tuple(files), settings)

    def open(self) -> OpenImage | None:
        """Returns the packed weights; None without a file. A damaged file is deleted."""
        try:
            if hasattr(os, "geteuid") and self.path.stat().st_uid != os.geteuid():
                return None
            image = open_image(self.path)
            os.utime(self.path)
        except DamagedImage as reason:
            _log.warning("the packed weights in %s are damaged (%s) and are packed again", self.path, reason)
            with suppress(OSError):
                self.path.unlink()
            return None
        except OSError:
            return None
        return image

    def keep(self, image: WeightImage, memory: object) -> None:
        """Schedules packed weights for ``write_kept``, or for exit, unless they are too large.

        Args:
            image: the packed weights.
            memory: owner of their memory; if it was freed by then, nothing is written.
        """
        limit = bound()
        if image.nbytes <= limit:
            _kept.append(partial(self._write, image, limit, weakref.ref(memory)))

    def _write(self, image: WeightImage, limit: int, memory: Callable[[], object]) -> None:
        folder, unfinished, held = self.path.parent, None, memory()
        if held is None:
            return
        try:
            if sys.platform == "linux":  # threads have priorities there: requests go first
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if shutil.disk_usage(folder).free < 2 * image.nbytes:
                _log.info("the disk has too little space to keep packed weights in %s", folder)
                return
            number, name = tempfile.mkstemp(".partial", dir=folder)  # only its owner may read it
            unfinished = Path(name)
            with open(number, "wb") as file:
                image.write(file)
            unfinished.replace(self.path)
            evict(folder, limit, self.path)
        except OSError as error:
            _log.warning("packed weights cannot be kept in %s (%s)", folder, error.strerror or error)
        finally:
            if unfinished is not None:
                unfinished.unlink(missing_ok=True)


def write_kept() -> None:
    """Writes packed weights in threads of low priority. Call it when a model is ready and has been timed."""
    while _kept:
        threading.Thread(target=_kept.pop(), name=_WRITER).start()


@atexit.register
def _write_rest() -> None:
    while _kept:
        _kept.pop()()


def wait() -> None:
    write_kept()
    for thread in threading.enumerate():
        if thread.name == _WRITER:
            thread.join()


def bound() -> int:
    """Returns the maximum total size of the files. Raises InvalidRequest if the variable is no size."""
    text = os.environ.get(BOUND) or DEFAULT_BOUND
    size = parse_size(text)
    if size is None:
        raise InvalidRequest(f"{BOUND} must be a size such as 20GiB, or 0, got {text!r}")
    return size


def evict(folder: Path, limit: int, newest: Path) -> None:
    """Deletes the least recently used files until the others have at most ``limit`` bytes, and abandoned ones."""
    used = 0
    for file, status in sorted(_listed(folder), key=lambda item: item[1].st_mtime, reverse=True):
        if file.suffix == _SUFFIX:
            used += status.st_size
        abandoned = file.suffix == ".partial" and time.time() - status.st_mtime > _ABANDONED
        if abandoned or (file.suffix == _SUFFIX and used > limit and file != newest):
            file.unlink(missing_ok=True)


def _listed(folder: Path) -> list[tuple[Path, os.stat_result]]:
    files = []
    for file in folder.iterdir():
        try:
            files.append((file, file.stat()))
        except FileNotFoundError:  # another process deleted it
            continue
    return files


def _identity(file: Path) -> list[Any]:
    """Returns the identity of a file: path, size, time of change, and a hash of its ends."""
    real = file.resolve()
    status = real.stat()
    with real.open("rb") as content:
        digest = hashlib.sha256(content.read(_ENDS))
        content.seek(max(0, status.st_size - _ENDS))
        digest.update(content.read(_ENDS))
    return [str(real), status.st_size, status.st_mtime_ns, digest.hexdigest()]


@cache
def _code() -> str:
    """Returns a hash of all code that reads or packs weights: any change of it makes new files."""
    sources = sorted(
        file for file in _CODE.rglob("*") if file.suffix in (".py", ".cpp", ".hpp") and "__pycache__" not in file.parts
    )
    return hashlib.sha256(
        b"\0".join(file.read_bytes() for file in (*sources, *sorted(build.SHARED.glob("*"))))
    ).hexdigest()
