"""Reads EAGLE checkpoints (1, 2: 2401.15077, 2406.16858; 3: 2503.01840) of any format into one form.

Tensors are named as in vLLM and speculators (``layers.0.*``), settings as in EAGLE's own config.json. The formats
differ in the name of the first layer (``midlayer.*`` in EAGLE, SpecForge and SGLang), in the structure of config.json,
and in the meaning of explicit ids of tapped layers: see ``taps.py``.

On our runtime a head is a decoder layer on features, with a separate KV cache.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from foretoken.core.errors import ModelLoadError
from foretoken.core.schema import parse
from foretoken.models.families.architecture import Architecture, supports
from foretoken.models.formats.quantize import Quantizer
from foretoken.models.formats.weights import Ends, Entry, NormWeight
from foretoken.models.heads.feature_net import FeatureNet, MaskRow
from foretoken.models.heads.files import (
    MAX_HEADS,
    TAPS_KEY,
    HeadCheckpointConfig,
    HeadSections,
    LayeredHead,
    check_dimensions,
    check_shapes,
    check_target_ids,
    layer_settings,
    layer_shapes,
    mask_token,
    number,
    open_head,
)
from foretoken.models.heads.weights import HeadProduct, layer_weights, norm_weight, without_matrices
from foretoken.models.runners.choose import build_runner
from foretoken.models.runners.pass_plan import TapRows

MASK = "mask_hidden"
_IDS = "eagle_aux_hidden_state_layer_ids"
_Taps = Annotated[list[Annotated[int, Field(ge=0, le=10_000)]], Field(max_length=64)]
# One format counts the outputs of layers, so the first layer's input is -1.
_LayerIds = Annotated[list[Annotated[int, Field(ge=-1, le=10_000)]], Field(max_length=64)]


class EagleSections(HeadSections):
    """The sections of config.json that EAGLE's formats nest."""

    model: dict[str, Any] | None = None
    eagle_config: dict[str, Any] | None = None


class EagleCheckpointConfig(HeadCheckpointConfig):
    """The fields of EAGLE heads."""

    foretoken_taps: _Taps | None = None
    eagle_aux_hidden_state_layer_ids: _LayerIds | None = None
    norm_before_residual: bool | None = None
    norm_before_fc: bool | None = None
    fc_norm: bool | None = None
    norm_output: bool | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class EagleHead(LayeredHead):
    """The EAGLE head of one checkpoint. Tensors have their names in vLLM, with ``layers.0`` for ``midlayer``."""

    version: int  # 3, or 1 for EAGLE-1 and 2
    layers: int  # number of layers
    taps: tuple[int, ...] | None = None  # ids of the tapped layers in config.json; None for the default
    exact: bool = True  # whether the ids are certain to be indices of layer *inputs*
    norm_before_residual: bool = False  # as in vLLM
    norm_before_fc: bool = False  # as in vLLM
    fc_norm: bool = False  # as in vLLM
    norm_output: bool = False  # as in vLLM
    window: int | None = None  # length of the attention window; None for none
    # placeholder of tokens that are not yet drafted, in heads that predict all positions at once (P-EAGLE), which also
    # have the tensor ``mask_hidden``; None for other heads
    mask_token: int | None = None
    path: Path | None = None  # folder of the checkpoint; None for a head that was made in memory


def default_taps(layers: int) -> tuple[int, int, int]:
    """Returns the default taps for a target of ``layers`` layers: inputs of a low, a middle and a high layer."""
    return 2, layers // 2, layers - 3


def read_eagle(path: Path) -> EagleHead:
    """Reads the checkpoint in ``path``."""
    config, weights = open_head(path)
    flat = _flat(config, path)
    tensors = {name.replace("midlayer.", "layers.0."): weights[name] for name in weights}
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    if "fc.weight" not in tensors or "layers.0.self_attn.q_proj.weight" not in tensors:
        raise ModelLoadError(f"{path} is not an EAGLE head: it lacks fc.weight or its layer; is it the right folder?")
    if MASK in tensors:
        tensors[MASK] = tensors[MASK].flatten()  # stored with one or two dimensions of 1 before it
    check_dimensions(path, tensors, {"fc.weight": 2, "t2d": 1})
    version = 3 if "layers.0.hidden_norm.weight" in tensors else 1
    head = _sized(flat, tensors, version, path)
    check_shapes(path, tensors, _shapes(head))
    _check_values(head, path)
    return head


def _flat(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Returns all settings on one level. speculators nests the layer's, vLLM's own wrapper nests under "model"."""
    parse(EagleSections, config, str(path / "config.json"))
    kind = config.get("speculators_model_type")
    if kind not in (None, "eagle3", "peagle"):
        raise ModelLoadError(f"{path} holds a speculator of the kind {kind!r}; EAGLE-3 and P-EAGLE heads are read here")
    inner = config.get("transformer_layer_config") or config.get("model") or {}
    flat = {**inner, **{k: v for k, v in config.items() if v is not None and k not in ("model_type", "model")}}
    flat = {**(config.get("eagle_config") or {}), **flat}
    if kind is not None:
        flat.setdefault("norm_before_residual", True)  # as in vLLM
    if kind == "peagle":
        flat.setdefault("pard_token", flat.get("mask_token_id"))  # as in vLLM
    parse(EagleCheckpointConfig, flat, str(path / "config.json"))
    return flat


def _sized(flat: dict[str, Any], tensors: dict[str, Tensor], version: int, path: Path) -> EagleHead:
    layer = layer_settings(flat, path)
    layers = number(flat, path, "num_hidden_layers", default=1, high=MAX_HEADS)
    vocab = number(flat, path, "vocab_size")
    if not supports({**layer, "model_type": "llama", "vocab_size": vocab, "num_hidden_layers": layers}):
        raise ModelLoadError(f"the layer in {path} has an activation or rotary scaling that is not computed here")
    named = flat.get(TAPS_KEY) or flat.get(_IDS)
    taps = tuple(named) if named and version == 3 else None
    inputs = int(tensors["fc.weight"].shape[-1])
    per_tap = inputs // (len(taps) if taps else 3)  # EAGLE-1's features are as wide as the head
    if "t2d" in tensors:
        vocab = int(tensors["t2d"].shape[0])  # SpecForge and EAGLE agree on this tensor, even if config.json differs
    return EagleHead(
        version=version,
        layer=layer,
        layers=layers,
        target_hidden=int(flat["hidden_size"] if version == 1 else flat.get("target_hidden_size") or per_tap),
        vocab=vocab,
        draft_vocab=number(flat, path, "draft_vocab_size", default=vocab) if version == 3 else vocab,
        tensors=tensors,
        path=path,
        taps=taps,
        exact=taps is None or TAPS_KEY in flat,
        window=_window(flat, layers, path),
        mask_token=mask_token(flat, vocab, path) if MASK in tensors and version == 3 else None,
        **{key: bool(flat.get(key)) for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")},
    )


def _window(flat: Mapping[str, Any], layers: int, path: Path) -> int | None:
    """Returns the length of the attention window, which ``layer_types`` of all layers state.

    Other engines ignore the types of a list that was copied from the target.
    """
    kinds = flat.get("layer_types") or []
    sliding = [kind == "sliding_attention" for kind in kinds]
    if len(kinds) != layers or not any(sliding) or flat.get("use_sliding_window") is False:
        return None
    if not all(sliding):
        raise ModelLoadError(f"{path} has layers with and without an attention window, which are not computed here")
    return number(flat, path, "sliding_window")


def _shapes(head: EagleHead) -> dict[str, tuple[int, ...]]:
    h, v3 = head.hidden, head.version == 3
    shapes: dict[str, tuple[int, ...]] = {}
    count = len(head.taps) if head.taps else 3
    shapes["fc.weight"] = (h, count * head.target_hidden) if v3 else (h, 2 * h)
    for i in range(head.layers):
        at, inputs = f"layers.{i}.", 2 * h if v3 and i == 0 else h
        if v3 or i:
            shapes[at + "input_layernorm.weight"] = (h,)
        if v3 and i == 0:
            shapes[at + "hidden_norm.weight"] = (h,)
        shapes |= layer_shapes(at, head.layer, head.tensors, inputs)
    if v3:
        shapes |= {"norm.weight": (h,), "lm_head.weight": (head.draft_vocab, h)}
        if head.draft_vocab != head.vocab:
            shapes["d2t"] = (head.draft_vocab,)
        if head.mask_token is not None:
            shapes[MASK] = (count * head.target_hidden,)
        if head.norm_before_fc:
            shapes["input_norm.weight"] = (count * head.target_hidden,)
        if head.fc_norm:
            shapes |= {f"fc_norm.{i}.weight": (head.target_hidden,) for i in range(count)}
    if "embed_tokens.weight" in head.tensors:
        shapes["embed_tokens.weight"] = (head.vocab, h)
    return shapes


def _check_values(head: EagleHead, path: Path) -> None:
    expected = {*_shapes(head), *(f"layers.{i}.self_attn.{p}_proj.bias" for i in range(head.layers) for p in "qkv")}
    odd = sorted(name for name in head.tensors if name.startswith("layers.") and name not in expected)
    if odd:
        raise ModelLoadError(f"{path} has the tensor {odd[0]!r}, of an architecture that is not computed here")
    check_target_ids(path, head.ids(), head.vocab)


class EagleNet(FeatureNet):
    """The network of an EAGLE head."""

    def __init__(
        self,
        head: EagleHead,
        embedding: Tensor,  # the head's own or the target's, [V, H]
        dtype: torch.dtype,
        device: torch.device,
        max_length: int,  # maximum length of a sequence in tokens, drafts included
        unembed: Callable[[Tensor], Tensor] | None = None,  # the target's vocabulary head, for heads without their own
        quantizer: Quantizer | None = None,  # quantizes the matrices; None leaves them in ``dtype``
        window: int | None = None,  # number of tokens that attention sees at most; None for the head's own window
    ) -> None:
        self.head, self.joined, self.dtype, self.device = head, head.version == 3, dtype, device
        fc, bias = head.tensors["fc.weight"].to(device, dtype), head.tensors.get("fc.bias")
        self._fc = HeadProduct(fc, bias, device, dtype)
        names = self._norm_names()
        self._norms = [[head.tensors[f"{name}.weight"].to(device, torch.float32) for name in group] for group in names]
        self._embedding, self._unembed_target, self._quantizer = embedding.to(dtype), unembed, quantizer
        self._window = window
        vocabulary = head.tensors.get("lm_head.weight", torch.zeros(1, head.hidden))  # zeros: unused
        config = {**head.layer, "model_type": "llama", "vocab_size": vocabulary.shape[0]}
        config |= {"num_hidden_layers": head.layers, "max_position_embeddings": max_length}
        architecture = Architecture.of(config).windowed(head.window).windowed(window)
        self._eps = architecture.eps
        state = head.layers if head.norm_output else head.layers + 1
        layers = [layer_weights(head.tensors, i, dtype, quantizer) for i in range(head.layers)]
        quantized = vocabulary.to(dtype) if quantizer is None else quantizer(vocabulary)
        norm = norm_weight(head.tensors, "norm") if self.joined or head.norm_output else None
        ends = Ends(self._embedding, norm, quantized)
        entry = Entry(self.joined, norm_weight(head.tensors, "layers.0.hidden_norm"), head.norm_before_residual)
        if self.joined:
            norms = [[NormWeight(norm) for norm in group] for group in self._norms]
            layers_read = fc.shape[1] // head.target_hidden
            entry = replace(entry, fusion=fc, fusion_bias=bias, fused_layers=layers_read, state_norms=norms)
        else:
            entry = replace(entry, fusion=fc, fusion_bias=bias, fused_layers=2, fuses_embedding=True)
        runner = build_runner(architecture, layers, ends, dtype, device, entry)
        borrowed = None if unembed is None or "lm_head.weight" in head.tensors else (unembed, state)
        super().__init__(runner, state, head.vocab, max_length, borrowed)
        self._draft_from(head.ids(), chained=self.joined or runner.fuses)
        self.head = replace(head, tensors=without_matrices(head.tensors))

    @property
    def embedding(self) -> Tensor:
        return self._embedding

    def like(self, head: EagleHead) -> "EagleNet":
        """Returns the network of another version of the head, on the same device and in the same dtype."""
        shared = self._unembed_target, self._quantizer, self._window
        return EagleNet(head, self._embedding, self.dtype, self.device, self.max_length, *shared)

    # features

    def mask_row(self) -> MaskRow:
        """Returns the input of a mask token, in a head that has one."""
        assert self.head.mask_token is not None
        states = self.head.tensors[MASK][None].to(self.device, self.dtype)
        parts = states.split(self.head.target_hidden, dim=-1)
        return MaskRow(self.head.mask_token, TapRows([(parts, [0])]), self.features(states))

    def features(self, taps: Tensor) -> Tensor:
        if not self.joined:
            return taps
        for norms in self._norms:
            parts = zip(taps.chunk(len(norms), dim=-1), norms, strict=True)
            taps = torch.cat([F.rms_norm(x.float(), w.shape, w, self._eps).to(x.dtype) for x, w in parts], dim=-1)
        return self._multiply(taps)

    def _entering(self, tokens: Sequence[int], features: Tensor) -> Tensor:
        if self.joined:
            return features
        ids = torch.tensor(tokens, device=self._embedding.device)
        embedded = F.embedding(ids, self._embedding).to(self.device)
        return self._multiply(torch.cat([embedded, features.to(embedded.dtype)], dim=-1))

    def _multiply(self, x: Tensor) -> Tensor:
        return self._fc(x.to(self.device, self.dtype))

    # weights

    def _norm_names(self) -> list[list[str]]:
        """Returns the norms of a row's states, one after another, of all states or of each layer's."""
        count = self.head.tensors["fc.weight"].shape[-1] // self.head.target_hidden
        before = [["input_norm"]] if self.head.norm_before_fc else []
        return before + ([[f"fc_norm.{i}" for i in range(count)]] if self.head.fc_norm else [])
