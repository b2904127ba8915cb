"""Options that the commands of ``foretoken bench`` share: the peers, and the pair of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken import zoo
from foretoken.cli.grouped import option
from foretoken.cli.options import DRAFT_MODEL, MODEL, PositionalTarget
from foretoken.core.errors import InvalidRequest

PEERS = "transformers,openvino,vllm,llamacpp"
Peers = Annotated[str, typer.Option(help="Comma-separated, or none.")]


@dataclass(frozen=True, kw_only=True)
class BenchmarkModels(PositionalTarget):
    """The models that are measured."""

    model: str | None = option(
        None, "Target: a folder or GGUF file. [the bundled one, widened to 0.7b]", "--target", *MODEL
    )
    draft_model: str | None = option(None, "Draft: a folder or GGUF file. [the bundled one]", "--draft", *DRAFT_MODEL)

    @property
    def target(self) -> Path | None:
        """The target's path, if one is named."""
        return None if self.model is None else Path(self.model)

    @property
    def draft(self) -> Path | None:
        """The draft's path, if one is named."""
        return None if self.draft_model is None else Path(self.draft_model)


def models_or_bundled(
    target: Path | None, draft: Path | None, configs: Sequence[Mapping[str, Any]]
) -> tuple[Path, Path | None]:
    """Returns target and draft, the bundled pair in place of what is not given.

    Args:
        target: The target, if given.
        draft: The draft model, if given.
        configs: The ways to speculate. The draft is None if it was not given and none of them needs one.

    Raises:
        InvalidRequest: A target without a draft model, which a configuration needs.
    """
    from foretoken.bench.entrants import needs_draft
    from foretoken.train.widen.checkpoint import scaled

    if target is not None and draft is None:
        if any(map(needs_draft, configs)):
            raise InvalidRequest(
                "--target was given without --draft; name its draft too, or a method without a draft model, such as "
                """--speculative-config '{"method": "ngram"}'"""
            )
        return target, None
    return target or scaled("0.7b"), draft or zoo.path("draft")
