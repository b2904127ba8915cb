"""Loads heads for a target: finds them, checks that they fit, and measures which hidden states they read."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.models.base import Model
from foretoken.models.decoder import Decoder
from foretoken.models.formats.checkpoint import resolve
from foretoken.models.formats.memory import give_back
from foretoken.models.formats.quantize import DEFAULT_GROUP, GroupedWeights, Quantizer
from foretoken.models.heads.assistant import AssistantNet, read_assistant
from foretoken.models.heads.block import BlockHead, read_block
from foretoken.models.heads.block_net import BlockNet
from foretoken.models.heads.eagle import EagleHead, EagleNet, default_taps, read_eagle
from foretoken.models.heads.feature_net import DraftNet
from foretoken.models.heads.files import ends_of, find_head
from foretoken.models.heads.mtp import check_mtp_fits, has_mtp, hidden_states_of, read_mtp, target_embedding
from foretoken.models.heads.mtp_net import MtpNet, MtpStack
from foretoken.models.heads.taps import MtpStates, TapConvention, measure_states, measure_taps
from foretoken.models.heads.weights import TargetHead
from foretoken.models.runners.native.build import kind_bits
from foretoken.models.runners.native.runner import NativeRunner

_log = logging.getLogger(__name__)


NetT = TypeVar("NetT", bound=DraftNet)
_OTHER_TARGET = "heads only fit the model that they were trained on"


@dataclass(frozen=True, slots=True)
class LoadedHead(Generic[NetT]):
    """A head that is ready to draft."""

    net: NetT  # the network
    taps: tuple[int, ...]  # indices of the inputs of the tapped layers of the target
    # the measured meaning of an EAGLE head's ids in config.json; None if config.json states it
    convention: TapConvention | None = None
    states: MtpStates | None = None  # the hidden states that MTP layers read; None for other heads


def load_eagle(
    target: Model, tokenizer: Any, model: str | Path | None, path: Path | None, window: int | None = None
) -> LoadedHead[EagleNet]:
    """Loads an EAGLE head and checks it against the target.

    Args:
        model: folder or hub id of the head; None for the target's.
        window: number of tokens that attention sees at most; None for the head's own window.

    Raises:
        InvalidRequest: ``model`` is None, and the target has no EAGLE head.
        ModelLoadError: the head is damaged, or was made for another target.
    """
    folder = find_head("eagle3", model, path)
    head = read_eagle(folder)
    taps = head.taps or default_taps(target.num_layers)
    _check_fits("EAGLE head", head, folder, taps if head.version == 3 else (), target)
    net = EagleNet(head, *_inputs("EAGLE head", head, folder, path, target), head_quantizer(target), window)
    head = net.head  # without its matrices
    give_back(head.hidden)
    if head.version == 1:
        return LoadedHead(net, (target.num_layers,))
    if head.exact:
        return LoadedHead(net, taps)
    convention = measure_taps(net, target, tokenizer, taps)
    _log.info("%s: %s", folder, convention)
    return LoadedHead(net, convention.taps, convention)


def load_block(
    role: str, target: Model, model: str | Path | None, path: Path | None, window: int | None = None
) -> LoadedHead[BlockNet]:
    """Loads a DFlash, JetSpec or DSpark head and checks it against the target.

    Args:
        role: "dflash", "jetspec" or "dspark", which the head must be.
        model: folder or hub id of the head; None for the target's.
        window: see ``load_eagle``.

    Raises:
        InvalidRequest: ``model`` is None, and the target has no such head.
        ModelLoadError: the head is damaged, of the other kind, or was made for another target.
    """
    folder = find_head(role, model, path)
    head = read_block(folder)
    if head.method != role:
        raise ModelLoadError(f'the head in {folder} is a {head.method} head; draft with {{"method": "{head.method}"}}')
    _check_fits(f"{role} head", head, folder, head.taps, target)
    net = BlockNet(head, *_inputs(f"{role} head", head, folder, path, target), head_quantizer(target), window)
    head = net.head  # without its matrices
    give_back(head.hidden)
    return LoadedHead(net, head.taps)


def head_quantizer(target: Model) -> Quantizer | None:
    """Returns the quantizer of a head's matrices, for ``target`` on the compiled kernels; None beside float32.

    Measured on Zen 5: beside the bundled target in bfloat16, int8 left acceptance as it was, and a draft took a fifth
    less time; four bits cost 2 to 4 % of the tokens per pass. Beside SmolLM2 in four bits, a head in four bits lost
    nothing (2.29 tokens per pass of three drafted), and decoding was a tenth faster than with int8.
    """
    runner = target.runner if isinstance(target, Decoder) else None
    bits = min(map(kind_bits, runner.kinds)) if isinstance(runner, NativeRunner) else 32
    if bits > 16:
        return None
    return Quantizer(4, DEFAULT_GROUP) if bits <= 4 else Quantizer(8)


def check_width(what: str, folder: Path, hidden: int, target: Model) -> None:
    """Raises ModelLoadError for heads of another hidden size."""
    if hidden != target.hidden_size:
        raise ModelLoadError(
            f"the {what} in {folder} was made for a target with hidden size {hidden}, this one has "
            f"{target.hidden_size}; {_OTHER_TARGET}"
        )


def check_vocabulary(what: str, folder: Path, vocab: int, target: Model) -> None:
    """Raises ModelLoadError for heads of another vocabulary."""
    if vocab != target.vocab_size:
        raise ModelLoadError(
            f"the {what} in {folder} was made for a vocabulary of {vocab}, this target has {target.vocab_size}; "
            f"{_OTHER_TARGET}"
        )


def _check_fits(what: str, head: EagleHead | BlockHead, folder: Path, taps: Sequence[int], target: Model) -> None:
    """Raises ModelLoadError for heads of another hidden size, vocabulary or number of layers."""
    check_width(what, folder, head.target_hidden, target)
    check_vocabulary(what, folder, head.vocab, target)
    if not all(0 <= i <= target.num_layers for i in taps):
        raise ModelLoadError(
            f"the {what} in {folder} reads the layers {list(taps)}, this target has {target.num_layers}; "
            f"{_OTHER_TARGET}"
        )


def _inputs(
    what: str, head: EagleHead | BlockHead, folder: Path, path: Path | None, target: Model
) -> tuple[Tensor, torch.dtype, torch.device, int, TargetHead]:
    """Returns embedding, dtype, device, maximum length and vocabulary head of a head's network."""
    embedding = _embedding(what, head, folder, path, target.dtype)
    return embedding, target.dtype, target.device, target.max_length, TargetHead(target)


def _embedding(what: str, head: EagleHead | BlockHead, folder: Path, target: Path | None, dtype: torch.dtype) -> Tensor:
    """Returns the head's embedding [V, H] in ``dtype``; without one the target's, read from its checkpoint."""
    if (embedding := head.tensors.get("embed_tokens.weight")) is not None:
        return embedding.to(dtype)
    weights, name = ends_of(target)[:2] if target is not None else ({}, "")
    groups = weights.grouped(name) if isinstance(weights, GroupedWeights) and name in weights else None
    shared = weights.get(name) if groups is None else groups.dequantize(dtype)  # in parts
    if shared is None or tuple(shared.shape) != (head.vocab, head.hidden):
        raise ModelLoadError(
            f"the {what} in {folder} has no embedding and cannot share this target's; it needs embed_tokens.weight "
            f"of {head.vocab} x {head.hidden}"
        )
    return shared.to(dtype)


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
    model: str | Path | None,  # folder or hub id of the layers; None for those in the target's checkpoint or beside it
    path: Path | None,
    normed: bool | None = None,  # whether they read the target's hidden state after the final norm; None to measure it
    chained_normed: bool | None = None,  # whether they read their own output after the last norm; None to measure it
    window: int | None = None,  # see ``load_eagle``
) -> LoadedHead[MtpNet | MtpStack]:
    """Loads MTP layers and checks them against the target.

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
    embedding = target_embedding(path, target.dtype)
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
    return LoadedHead(net, (target.num_layers + (not states.normed),), states=states)


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
    embedding = target_embedding(path, target.dtype)
    check_vocabulary("embedding", path, embedding.shape[0], target)
    return AssistantNet(head, embedding, target)
