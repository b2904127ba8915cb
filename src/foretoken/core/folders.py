"""The folder of files that are kept between runs. It imports no other package, so that a wheel's build can use it."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Returns the cache folder: $FORETOKEN_CACHE, else $XDG_CACHE_HOME/foretoken, else ~/.cache/foretoken."""
    if chosen := os.environ.get("FORETOKEN_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "foretoken"
