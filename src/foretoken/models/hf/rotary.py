"""Fixed frequencies for rotary embeddings that transformers changes from pass to pass.

transformers chooses the factors of LongRoPE, and the base of dynamic NTK scaling, in every pass from the longest
sequence of the batch. A sequence's output would then depend on the batch, and cached keys would be rotated with other
frequencies than later queries. As in vLLM, the configured maximum length chooses the frequencies once.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LONGROPE = "longrope"
_log = logging.getLogger(__name__)


class FixedRope:
    """Keeps the rotary frequencies of a module the same in every pass.

    LongRoPE takes its long factors if ``max_length`` exceeds the original maximum length, and its short factors
    otherwise. Dynamic NTK scaling keeps its original frequencies: they change only beyond ``max_position_embeddings``,
    and no sequence is longer. Between passes the module is unchanged, because its owner may run it too.

    Args:
        module: the transformers module.
        max_length: length of the longest sequence that will be served.
    """

    def __init__(self, module: Any, max_length: int) -> None:
        self._embeddings: list[tuple[Any, dict[str, Tensor]]] = []
        for part in module.modules():
            tables = _tables(part, max_length)
            if tables:
                self._embeddings.append((part, tables))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context manager: passes inside use the fixed frequencies."""
        before = [(part, part.rope_type, {name: getattr(part, name) for name in t}) for part, t in self._embeddings]
        try:
            for part, tables in self._embeddings:
                part.rope_type = _settled(part.rope_type)
                for name, table in tables.items():
                    setattr(part, name, table.to(getattr(part, name).device))
            yield
        finally:
            for part, rope_type, buffers in before:
                part.rope_type = rope_type
                for name, buffer in buffers.items():
                    setattr(part, name, buffer)


def longrope_length(settings: Any) -> int:
    """Returns the original maximum length in LongRoPE's ``rope_parameters``; 0 for any other kind."""
    if not isinstance(settings, Mapping):
        return 0
    if settings.get("rope_type") == LONGROPE:
        return int(settings["original_max_position_embeddings"])
    return max(map(longrope_length, settings.values()), default=0)


def _changes(rope_type: object) -> bool:
    """Returns whether transformers changes the frequencies from pass to pass."""
    return isinstance(rope_type, str) and (rope_type == LONGROPE or "dynamic" in rope_type)


def _settled(rope_type: Any) -> Any:
    """Returns ``rope_type`` with "default" in place of the kinds for which transformers changes the frequencies."""
    if isinstance(rope_type, dict):
        return {layer_type: _settled(kind) for layer_type, kind in rope_type.items()}
    return "default" if _changes(rope_type) else rope_type


def _tables(part: Any, max_length: int) -> dict[str, Tensor]:
    """Returns the frequencies to use by the names of their buffers; empty for a part whose frequencies never change."""
    rope_type = getattr(part, "rope_type", None)
    kinds = rope_type if isinstance(rope_type, dict) else {None: rope_type}
    tables = {}
    for layer_type, kind in kinds.items():
        prefix = f"{layer_type}_" if layer_type else ""
        if _changes(kind) and hasattr(part, f"{prefix}original_inv_freq"):
            tables[f"{prefix}inv_freq"] = _table(part, kind, layer_type, prefix, max_length)
    return tables


def _table(part: Any, kind: object, layer_type: str | None, prefix: str, max_length: int) -> Tensor:
    original: Tensor = getattr(part, f"{prefix}original_inv_freq")
    settings = part.config.rope_parameters
    short = longrope_length(settings[layer_type] if layer_type else settings)
    if kind != LONGROPE or max_length <= short:
        return original
    _log.info(
        "LongRoPE uses its long factors for all sequences, because the maximum length %d exceeds %d; "
        "set max_model_len to at most %d to use the short factors",
        *(max_length, short, short),
    )
    table, _ = ROPE_INIT_FUNCTIONS[LONGROPE](part.config, original.device, seq_len=max_length, layer_type=layer_type)
    return table
