"""The proposer that drafts in an ``LLM``, inside of what bounds its drafts."""

from typing import Any

from foretoken import LLM
from foretoken.propose.union import Union


def drafter(llm: LLM, method: str | None = None) -> Any:
    """Returns the proposer of a method, by default of the first; of a union with a model, the model's."""
    proposer: Any = llm.proposer_of(method or llm.methods[0])
    if isinstance(proposer, Union):
        source = proposer.model or proposer.sources[0]
        return source.proposer
    return proposer
