"""The names of the ways to speculate. Imports nothing heavy, so that a wrong name is refused at once."""

from __future__ import annotations

from foretoken.core.errors import InvalidRequest

METHODS: dict[str, str] = {
    "draft_model": "draft_model",
    "ngram": "lookup",
    "suffix": "suffix",
    "retrieval": "retrieval",
    "recycling": "recycling",
    "prediction": "prediction",
    "medusa": "medusa",
    "blockwise": "blockwise",
    "eagle3": "eagle",
    "eagle": "eagle",
    "early_exit": "early_exit",
    "vocabulary": "vocabulary",
    "mixture": "mixture",
    "remote": "remote",
}
"""By users' names: the module of ``propose`` whose ``METHOD`` it is, imported when it is asked for."""

NONE = "none"


def check_method(name: str) -> None:
    """Raises InvalidRequest for a name that is none of ``METHODS``, nor "none"."""
    if name not in (*METHODS, NONE):
        raise InvalidRequest(f"speculative method {name!r} is not known; known: {', '.join((*METHODS, NONE))}")
