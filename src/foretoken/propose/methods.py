"""Names of the speculative methods. Imports nothing heavy, so that an unknown name is refused at once."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from foretoken.core.errors import InvalidRequest

if TYPE_CHECKING:
    from foretoken.propose.base import Method

METHODS: dict[str, str] = {
    "draft_model": "draft_model",
    "auto": "union:AUTO_METHOD",
    "ngram": "suffix:LOOKUP",
    "suffix": "suffix",
    "retrieval": "retrieval",
    "recycling": "recycling",
    "prediction": "prediction",
    "medusa": "medusa",
    "blockwise": "medusa:BLOCKWISE",
    "eagle3": "eagle",
    "eagle": "eagle",
    "dflash": "dflash",
    "jetspec": "dflash:JETSPEC",
    "dspark": "dflash:DSPARK",
    "assistant": "mtp:ASSISTANT",
    "mtp": "mtp",
    "early_exit": "early_exit",
    "self_quantized": "early_exit:SELF_QUANTIZED",
    "vocabulary": "vocabulary",
    "mixture": "union:MIXTURE",
    "remote": "remote",
}
"""Module of ``propose``, and the method in it other than ``METHOD``, by the name of a built-in method."""

NONE = "none"
ENTRY_POINTS = "foretoken.methods"
"""Group of entry points by which an installed package adds methods: ``name = "package.module:METHOD"``."""

_registered: dict[str, Method] = {}


def register(name: str, method: Method) -> None:
    """Adds a method to this process, so that ``{"method": name}`` builds it. A second call replaces the first.

    Other processes, such as a remote drafting worker, do not see it. A package that adds an entry point to the group
    ``foretoken.methods`` adds its method to every process, the command line included. Raises InvalidRequest if ``name``
    belongs to a built-in method, or is "none".
    """
    if name in (*METHODS, NONE):
        raise InvalidRequest(f"speculative method {name!r} is built in; register yours under another name")
    _registered[name] = method


def check_method(name: str) -> None:
    """Raises InvalidRequest for a name that is neither built in, nor registered, nor an entry point, nor "none"."""
    if name in (*METHODS, NONE, *_registered):
        return
    installed = entry_points(group=ENTRY_POINTS).names
    if name not in installed:
        known = (*METHODS, *_registered, *sorted(installed), NONE)
        raise InvalidRequest(f"speculative method {name!r} is not known; known: {', '.join(known)}")


def find(name: str) -> Method | None:
    """Returns the method of a name that ``check_method`` accepts, None for "none"."""
    if name == NONE:
        return None
    if name in _registered:
        return _registered[name]
    if name in METHODS:
        module, _, attribute = METHODS[name].partition(":")
        builtin: Method = getattr(import_module(f"foretoken.propose.{module}"), attribute or "METHOD")
        return builtin
    (entry,) = entry_points(group=ENTRY_POINTS, name=name)
    installed: Method = entry.load()
    return installed
