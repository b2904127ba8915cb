"""Options of ``foretoken plan`` that all plans read, whatever they are for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken import zoo
from foretoken.bench.workloads import prompts_or_functions
from foretoken.cli.files import json_object
from foretoken.cli.grouped import option
from foretoken.cli.options import DRAFT_MODEL, Dtype, PositionalTarget, TargetFormats, TopP


@dataclass(frozen=True, kw_only=True)
class CandidateOptions(PositionalTarget):
    """The target, and the ways to speculate."""

    draft_model: list[str] | None = option(
        None, "A draft model (repeatable). [that of the bundled target]", *DRAFT_MODEL
    )
    heads: list[str] | None = option(None, "EAGLE, Medusa or blockwise heads (repeatable). [likewise]")
    speculative_config: list[str] | None = option(None, "Another way to speculate (repeatable).", metavar="JSON")

    def models(self, bundled: Sequence[str]) -> tuple[str, Sequence[str], Sequence[str]]:
        """Returns target, drafts and heads: those given, or the bundled ones with heads of the roles ``bundled``."""
        drafts, heads = self.draft_model or [], self.heads or []
        if self.model is not None:
            return self.model, drafts, heads
        roles = {each.role for each in zoo.list_models()}
        result = [str(zoo.path(role)) for role in bundled if role in roles]
        return str(zoo.path("target")), drafts or [str(zoo.path("draft"))], heads or result

    @property
    def configs(self) -> list[dict[str, Any]]:
        """Further ways to speculate. Raises InvalidRequest."""
        return [json_object("--speculative-config", text) for text in self.speculative_config or []]


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """The texts that the target writes, and how often steps are timed."""

    prompts: Path | None = option(
        None, 'JSON lines with a "prompt" each, and the target\'s "completion" if known. [our functions]'
    )
    count: int = option(16, "Prompts to take from the start.", min=1)
    max_tokens: int = option(64, "Tokens for each prompt.", min=8)
    temperature: list[float] | None = option(None, "Repeatable. [0 and 1]", min=0.0)
    top_p: TopP = 1.0
    batch: list[int] | None = option(None, "Sequences at once (repeatable). [1]", min=1)
    turns: int = option(24, "Timed steps of every candidate.", min=3)

    @property
    def temperatures(self) -> tuple[float, ...]:
        """All temperatures, each once."""
        return tuple(dict.fromkeys(self.temperature or (0.0, 1.0)))

    @property
    def batches(self) -> tuple[int, ...]:
        """All numbers of sequences at once, each once."""
        return tuple(dict.fromkeys(self.batch or (1,)))

    def texts(self) -> list[str]:
        """Returns the prompts. Raises InvalidRequest."""
        return prompts_or_functions(self.prompts, self.count)

    def source(self, number: int) -> str:
        """Returns the source of ``number`` prompts."""
        return f"{number} of {self.prompts.name if self.prompts is not None else 'our own functions'}"


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions(TargetFormats):
    """Formats of the target's weights, KV cache and activations."""

    dtype: Dtype = "auto"
