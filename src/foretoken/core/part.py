"""The part of a proposer that drafts for a sequence."""

from __future__ import annotations

from enum import Enum


class DraftPart(Enum):
    """Parts of a proposer, of which the controller chooses one for each sequence.

    Attributes:
        ALL: The model and the model-free proposers.
        MODEL: Its model alone, a chain as long as the budget.
        FREE: The model-free proposers alone.
    """

    ALL = "all"
    MODEL = "model"
    FREE = "free"
