"""Which part of a proposer drafts for a sequence."""

from __future__ import annotations

from enum import Enum


class DraftPart(Enum):
    """Parts of a proposer, of which the controller chooses one for each sequence.

    Attributes:
        ALL: Everything that drafts.
        MODEL: Its model alone, a chain as long as the budget.
        FREE: No model, only what drafts from text and tables.
    """

    ALL = "all"
    MODEL = "model"
    FREE = "free"
