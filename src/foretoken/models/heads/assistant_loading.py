"""Loads assistants for a target, and checks that they fit it."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.models.base import Model
from foretoken.models.decoder import Decoder
from foretoken.models.families.architecture import Architecture
from foretoken.models.formats.checkpoint import open_weights
from foretoken.models.formats.reader import located
from foretoken.models.heads.assistant import read_assistant
from foretoken.models.heads.assistant_net import AssistantNet
from foretoken.models.heads.files import find_head
from foretoken.models.heads.loading import check_vocabulary, check_width


def load_assistant(target: Model, model: str | Path | None, path: Path | None) -> AssistantNet:
    """Loads an assistant and checks it against the target.

    Args:
        model: folder or hub id of the assistant; None for the target's.
        path: the target's folder, whose embedding the assistant shares.

    Raises:
        InvalidRequest: there is no assistant, or the target does not share its keys and values.
        ModelLoadError: it is damaged, or was made for another target.
    """
    folder = find_head("assistant", model, path)
    if not isinstance(target, Decoder) or target.takes_source or path is None:
        raise InvalidRequest(
            "an assistant shares the embedding and the KV cache of a target on our own runtime, which does not compute "
            "this target; use another method"
        )
    head = read_assistant(folder, target.dtype)
    check_width("assistant", folder, head.target_hidden, target)
    check_vocabulary("assistant", folder, head.architecture.vocab, target)
    return AssistantNet(head, _embedding(path, target.architecture), target)


def _embedding(path: Path, a: Architecture) -> Tensor:
    """Returns the target's embedding [V, H] from its folder."""
    weights = open_weights(path)
    name = f"{located(weights, a.names)[0]}{a.names.embedding}.weight"
    if name not in weights or tuple(weights[name].shape) != (a.vocab, a.hidden):
        raise ModelLoadError(f"{path} has no embedding {name!r} of {a.vocab} x {a.hidden}, which an assistant shares")
    return weights[name]
