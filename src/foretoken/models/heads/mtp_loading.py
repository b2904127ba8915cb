"""Loads MTP layers for a target: finds them, checks that they fit, and measures which hidden states they read."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.core.errors import ModelLoadError
from foretoken.models.base import Model
from foretoken.models.formats.checkpoint import resolve
from foretoken.models.heads.files import find_head
from foretoken.models.heads.loading import check_vocabulary, check_width, head_quantizer
from foretoken.models.heads.mtp import check_mtp_fits, has_mtp, hidden_states_of, mtp_embedding, read_mtp
from foretoken.models.heads.mtp_net import MtpNet
from foretoken.models.heads.mtp_stack import MtpStack
from foretoken.models.heads.mtp_states import MtpStates, measure_states
from foretoken.models.heads.weights import TargetHead

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedMtp:
    """MTP layers that are ready to draft.

    Attributes:
        net: the network.
        taps: the tapped layer of the target.
        states: the hidden states that are read.
    """

    net: MtpNet | MtpStack
    taps: tuple[int, ...]
    states: MtpStates


def find_mtp(model: str | Path | None, target: Path | None) -> Path:
    """Returns the folder of the MTP layers to use: ``model``, or the target's.

    Raises:
        InvalidRequest: ``model`` is None, and the target has none.
        ModelLoadError: ``model`` is not found.
    """
    if model is not None:
        return resolve(model)
    if target is not None and has_mtp(target):
        return target
    return find_head("mtp", None, target)


def load_mtp(
    target: Model,
    tokenizer: Any,
    model: str | Path | None,
    path: Path | None,
    normed: bool | None = None,
    chained_normed: bool | None = None,
    window: int | None = None,
) -> LoadedMtp:
    """Loads MTP layers and checks them against the target.

    Args:
        tokenizer: the target's tokenizer, or None.
        model: folder or hub id of the layers; None for those in the target's checkpoint or beside it.
        normed: whether they read the target's hidden state after the final norm; None to measure it.
        chained_normed: whether they read their own output after the last norm; None to measure it.
        window: see ``load_eagle``.

    Raises:
        InvalidRequest: ``model`` is None, and the target has no MTP layers.
        ModelLoadError: the layers are damaged, or were made for another target.
    """
    folder = find_mtp(model, path)
    check_mtp_fits(folder, target.dtype, target.device)
    layers = read_mtp(folder, target.dtype, head_quantizer(target))
    check_width("MTP layer", folder, layers[0].architecture.hidden, target)
    if path is None:
        raise ModelLoadError("MTP layers share the target's embedding, which is read from its folder; name it")
    embedding = mtp_embedding(path, target.dtype)
    check_vocabulary("embedding", path, embedding.shape[0], target)
    nets = [
        MtpNet(layer, embedding, TargetHead(target), target.dtype, target.device, target.max_length, window=window)
        for layer in layers
    ]
    net = nets[0] if len(nets) == 1 else MtpStack(nets)
    stated = hidden_states_of(folder)
    normed = stated.get("normed") if normed is None else normed
    chained_normed = stated.get("chained_normed") if chained_normed is None else chained_normed
    states = measure_states(net, target, tokenizer, normed, chained_normed)
    _log.info("%s: %s", folder, states)
    net.normed = states.chained_normed
    return LoadedMtp(net, (target.num_layers + (not states.normed),), states)
