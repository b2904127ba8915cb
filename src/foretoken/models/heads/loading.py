"""From a folder of heads to what drafts with a given target: checked against it, and its taps read rightly."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from foretoken.core.errors import ModelLoadError
from foretoken.models.base import Model
from foretoken.models.checkpoint import open_weights
from foretoken.models.heads.eagle import EagleHead, default_taps, read_eagle
from foretoken.models.heads.eagle_net import EagleNet
from foretoken.models.heads.files import find_head
from foretoken.models.heads.taps import Reading, choose_reading

_EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight", "model.decoder.embed_tokens.weight")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedEagle:
    """An EAGLE head ready to draft. taps: the target's layers it reads; reading: what their ids were found to mean."""

    net: EagleNet
    taps: tuple[int, ...]
    reading: Reading | None = None


def load_eagle(target: Model, tokenizer: Any, model: str | Path | None, path: Path | None) -> LoadedEagle:
    """The head ``model``, or the one that comes with the target in ``path``, checked against the target.

    Raises InvalidRequest when there is none, ModelLoadError for one that is damaged or made for another target.
    """
    folder = find_head("eagle3", model, path)
    head = read_eagle(folder)
    _check(head, folder, target)
    net = EagleNet(head, _embedding(head, folder, path), target.dtype, target.device, target.max_length, target.unembed)
    if head.version == 1:
        return LoadedEagle(net, (target.num_layers,))
    taps = head.taps or default_taps(target.num_layers)
    if head.exact:
        return LoadedEagle(net, taps)
    reading = choose_reading(net, target, tokenizer, taps)
    _log.info("%s: %s", folder, reading)
    return LoadedEagle(net, reading.taps, reading)


def check_width(what: str, folder: Path, hidden: int, target: Model) -> None:
    """Raises ModelLoadError for heads made for another width."""
    if hidden != target.hidden_size:
        raise ModelLoadError(
            f"the {what} in {folder} was made for a target with hidden size {hidden}, this one has "
            f"{target.hidden_size}; heads fit the model they were trained on alone"
        )


def check_vocabulary(what: str, folder: Path, vocab: int, target: Model) -> None:
    """Raises ModelLoadError for heads made for another vocabulary."""
    if vocab != target.vocab_size:
        raise ModelLoadError(
            f"the {what} in {folder} was made for a vocabulary of {vocab}, this target has {target.vocab_size}; "
            "heads fit the model they were trained on alone"
        )


def _check(head: EagleHead, folder: Path, target: Model) -> None:
    check_width("EAGLE head", folder, head.target_hidden, target)
    check_vocabulary("EAGLE head", folder, head.vocab, target)
    taps = head.taps or default_taps(target.num_layers)
    if head.version == 3 and not all(0 <= i <= target.num_layers for i in taps):
        raise ModelLoadError(
            f"the EAGLE head in {folder} reads the layers {list(taps)}, this target has {target.num_layers}; "
            "heads fit the model they were trained on alone"
        )


def _embedding(head: EagleHead, folder: Path, target: Path | None) -> Tensor:
    """The head's own embedding [V, H], else the target's, read where it lies."""
    if (own := head.tensors.get("embed_tokens.weight")) is not None:
        return own
    weights = open_weights(target) if target is not None else {}
    name = next((name for name in _EMBEDDINGS if name in weights), None)
    if name is None or tuple(weights[name].shape) != (head.vocab, head.hidden):
        raise ModelLoadError(
            f"the EAGLE head in {folder} has no embedding and cannot share this target's; it needs embed_tokens.weight "
            f"of {head.vocab} x {head.hidden}"
        )
    return weights[name]
