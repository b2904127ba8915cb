"""What the commands of ``foretoken bench`` share: the peers, and the pair of models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foretoken.core.errors import InvalidRequest

PEERS = "transformers,openvino,vllm,llamacpp"
Peers = Annotated[str, typer.Option(help="Comma-separated, or none.")]


def models_or_bundled(target: Path | None, draft: Path | None) -> tuple[Path, Path]:
    """Returns target and draft, the bundled pair in place of what is not given. Raises InvalidRequest."""
    from foretoken import zoo
    from foretoken.train.widen.checkpoint import scaled

    if target is not None and draft is None:
        raise InvalidRequest("--target was given without --draft; name its draft too")
    return target or scaled("0.7b"), draft or zoo.path("draft")
