"""Names of the speculative methods. Imports nothing heavy, so that an unknown name is refused at once."""

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
"""Module of ``propose`` that holds the ``METHOD``, by the method's name. Imported on use."""

NONE = "none"


def check_method(name: str) -> None:
    """Raises InvalidRequest for a name that is neither in ``METHODS`` nor "none"."""
    if name not in (*METHODS, NONE):
        raise InvalidRequest(f"speculative method {name!r} is not known; known: {', '.join((*METHODS, NONE))}")
