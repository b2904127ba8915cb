"""The editing workload: the prompt holds a function, the output is the same function with a rename and a fix.

The bundled target completes code and does not follow instructions, so the output is forced: in the target's rows, the
next token of the edited text is made the most probable. Passes, caches and verification cost the same, and no proposer
knows the output.
"""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.models.base import Handle, Model, Scores
from foretoken.models.resumable import ModelWrapper


@dataclass(frozen=True)
class Edit:
    """Python code, a name to change throughout, and a bug with its fix."""

    source: str
    rename: tuple[str, str]
    fix: tuple[str, str]

    @property
    def edited(self) -> str:
        old, new = self.rename
        return re.sub(rf"\b{old}\b", new, self.source.replace(*self.fix))

    @property
    def prompt(self) -> str:
        old, new = self.rename
        return f"{self.source}\n\n# The same function with {old} renamed to {new} and the bug fixed:\n\n"


_ROWS = tomllib.loads(Path(__file__).with_name("edits.toml").read_text(encoding="utf-8"))["edit"]
EDITS = tuple(Edit(row["source"], tuple(row["rename"]), tuple(row["fix"])) for row in _ROWS)


class EditingTask(NamedTuple):
    """Token ids of the prompt, of the client's prediction (the original code) and of the output."""

    prompt: list[int]
    reference: list[int]
    output: list[int]


def editing_tasks(tokenizer: Any) -> list[EditingTask]:
    """Returns ``EDITS`` as token ids of a tokenizer."""

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    return [EditingTask(ids(edit.prompt), ids(edit.source), ids(edit.edited)) for edit in EDITS]


class ForcedOutput(ModelWrapper):
    """A target whose greedy output can be forced.

    Attributes:
        output: Tokens that follow every prompt; None leaves the rows as they are.
        prompt_length: Tokens of the prompt.
    """

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.output: Sequence[int] | None = None
        self.prompt_length = 0

    def score(self, handles: Sequence[Handle], drafts: Sequence[Draft], taps: Sequence[int] = ()) -> list[Scores]:
        """See ``Model``."""
        for handle in handles:
            handle.argmax_only = handle.argmax_only and self.output is None  # the logits are changed below
        scores = super().score(handles, drafts, taps)
        if self.output is not None:
            for handle, draft, score in zip(handles, drafts, scores, strict=True):
                self._force(len(handle.tokens) - self.prompt_length, draft, score.logits)
        return scores

    def _force(self, generated: int, draft: Draft, logits: Tensor) -> None:
        assert self.output is not None and logits.shape[0] == len(draft) + 1
        for row, depth in enumerate((0, *draft.depths)):
            if generated + depth < len(self.output):
                logits[row, self.output[generated + depth]] = logits[row].max() + 1.0
