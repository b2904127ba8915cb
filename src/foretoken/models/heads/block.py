"""Reads block drafters, DFlash (2602.06036), JetSpec (2606.18394) and DSpark (2607.05147), of any layout into one form.

Tensors have the names of the originals (z-lab, DeepSpec). The layouts differ in config.json:

- z-lab: ``dflash_config`` holds ``mask_token_id`` and ``target_layer_ids``, indices of layer *outputs*;
- JetSpec: as z-lab, with ``causal_head``: rows of a block see no later rows;
- DeepSpec: the same keys and those of the heads are on the first level, and -1 stands for the embeddings;
- speculators: the layers are under ``transformer_layer_config``, and ``aux_hidden_state_layer_ids`` are layer *inputs*.

Some checkpoints have an embedding and a vocabulary head, also one of fewer tokens (``d2t``); others take the target's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor

from foretoken.core.errors import ModelLoadError
from foretoken.core.schema import parse
from foretoken.models.families.architecture import unsupported
from foretoken.models.heads.files import (
    MAX_HEADS,
    HeadCheckpointConfig,
    HeadSections,
    LayeredHead,
    check_dimensions,
    check_shapes,
    check_target_ids,
    layer_settings,
    layer_shapes,
    number,
    open_head,
)

Method = Literal["dflash", "jetspec", "dspark"]
_LayerIds = Annotated[list[Annotated[int, Field(ge=-1, le=10_000)]], Field(min_length=1, max_length=64)]
_KINDS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
_NOT_COMPUTED = {  # keys of config.json, and the values with which a head is computed here
    "output_multiplier": (None, 1, 1.0),
    "final_logit_softcapping": (None, 0, 0.0),
    "input_embedding_scale": (None, 1, 1.0),
    "attention_bias": (None, False),
    "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1, 1.0),
    "partial_rotary_factor": (None, 1, 1.0),
}
# parts of the names of tensors in heads that extend DFlash
_OTHER_HEADS = {"attention_conv.": "DFlash 2", "candidate_selector.": "DFlash 2", "lilicorr.": "LiLiCorr"}
# dimensions of tensors whose shapes define sizes
_DIMENSIONS = {"fc.weight": 2, "t2d": 1, "lm_head.weight": 2, "markov_head.markov_w1.weight": 2}


class BlockSections(HeadSections):
    """The sections of config.json that layouts of block drafters nest."""

    dflash_config: dict[str, Any] | None = None


class BlockCheckpointConfig(HeadCheckpointConfig):
    """The fields of block drafters."""

    target_layer_ids: _LayerIds | None = None
    aux_hidden_state_layer_ids: _LayerIds | None = None
    mask_token_id: Annotated[int, Field(ge=0)] | None = None
    sample_from_anchor: bool | None = None
    sliding_window_non_causal: bool | None = None
    is_causal: bool | None = None
    causal: bool | None = None
    causal_head: bool | None = None
    markov_rank: Annotated[int, Field(ge=0, le=65_536)] | None = None
    markov_head_type: str | None = None
    confidence_head_with_markov: bool | None = None
    use_swa: bool | None = None
    swa_window_size: Annotated[int, Field(ge=1)] | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BlockHead(LayeredHead):
    """The block drafter of one checkpoint. Tensors have their names in the original layout."""

    block: int  # rows of a block: the newest token, then mask tokens
    mask_token: int  # the token of the other rows
    from_newest: bool  # whether the row of the newest token predicts the first token; else it predicts none
    taps: tuple[int, ...]  # tapped layers of the target, as indices of their inputs
    ordered: tuple[bool, ...]  # for each layer, whether rows see no later rows of their block
    causal: bool  # whether it is a JetSpec head, whose layers are all ordered
    gated: bool  # whether the Markov head's vector of the previous token is gated by the row's state
    confident_of: bool  # whether the confidence head reads the vector of the previous token

    @property
    def method(self) -> Method:
        if self.markov_rank or self.confident:
            return "dspark"
        return "jetspec" if self.causal else "dflash"

    @property
    def layers(self) -> int:
        return int(self.layer["num_hidden_layers"])

    @property
    def depth(self) -> int:
        """Number of tokens that a block predicts."""
        return self.block if self.from_newest else self.block - 1

    @property
    def markov_rank(self) -> int:
        """Rank of the Markov head; 0 without one."""
        w1 = self.tensors.get("markov_head.markov_w1.weight")
        return 0 if w1 is None else int(w1.shape[1])

    @property
    def confident(self) -> bool:
        return "confidence_head.proj.weight" in self.tensors


def read_block(path: Path) -> BlockHead:
    """Reads the checkpoint in ``path``."""
    config, weights = open_head(path)
    tensors = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    if "hidden_norm.weight" not in tensors or "layers.0.self_attn.q_norm.weight" not in tensors:
        raise ModelLoadError(
            f"{path} is no DFlash, JetSpec or DSpark head: it lacks hidden_norm.weight or its layers; is it the right "
            "folder?"
        )
    flat = _flat(config, path)
    _refuse(flat, tensors, path)
    check_dimensions(path, tensors, _DIMENSIONS)
    head = _sized(flat, tensors, path, "speculators_model_type" in config)
    check_shapes(path, tensors, _shapes(head))
    _check_values(head, path)
    return head


def _flat(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    where = str(path / "config.json")
    parse(BlockSections, config, where)
    kind = config.get("speculators_model_type")
    if kind not in (None, "dflash", "dspark"):
        raise ModelLoadError(f"{path} holds a speculator of the kind {kind!r}; DFlash and DSpark are read here")
    top_level = {
        k: v for k, v in config.items() if v is not None and k not in ("model_type", "transformer_layer_config")
    }
    flat = {**(config.get("transformer_layer_config") or {}), **top_level, **(config.get("dflash_config") or {})}
    parse(BlockCheckpointConfig, flat, where)
    return _windowed(flat, path) if flat.get("use_swa") else flat


def _windowed(flat: dict[str, Any], path: Path) -> dict[str, Any]:
    """Returns settings with ``use_swa`` as types of layers: an attention window in all, unless some are listed.

    It says nothing about the order of a block's rows, which see each other then, as in llama.cpp.
    """
    window = {"sliding_window": number(flat, path, "swa_window_size", "sliding_window")}
    if "sliding_attention" in (flat.get("layer_types") or ()):
        return flat | window
    kinds = ["sliding_attention"] * number(flat, path, "num_hidden_layers", high=MAX_HEADS)
    return {"sliding_window_non_causal": True} | flat | window | {"layer_types": kinds}


def _refuse(flat: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raises ModelLoadError for heads that would be computed wrongly."""
    for name, values in _NOT_COMPUTED.items():
        if flat.get(name) not in values:
            raise ModelLoadError(f"{path} has {name} = {flat[name]!r}, with which heads are not computed here")
    kind = flat.get("markov_head_type", "vanilla")
    if "markov_head.markov_w1.weight" in tensors and kind not in ("vanilla", "gated"):
        raise ModelLoadError(f"{path} has a Markov head of the type {kind!r}; 'vanilla' and 'gated' are computed here")
    for name in tensors:
        for part, other in _OTHER_HEADS.items():
            if part in name:
                raise ModelLoadError(f"{path} is a {other} head (it has {name}), which is not computed here")


def _sized(flat: dict[str, Any], tensors: dict[str, Tensor], path: Path, speculators: bool) -> BlockHead:
    layer = layer_settings(flat, path, *_KINDS)
    layer["num_hidden_layers"] = number(flat, path, "num_hidden_layers", high=MAX_HEADS)
    layer.setdefault("head_dim", layer["hidden_size"] // layer["num_attention_heads"])
    layer |= {"model_type": "qwen3", "vocab_size": number(flat, path, "vocab_size")}
    if "sliding_attention" in layer.get("layer_types", ()):
        layer["use_sliding_window"] = True
    if reason := unsupported(layer):
        raise ModelLoadError(f"the layers in {path} have a feature that is not computed here: {reason}")
    taps = _taps(flat, path, speculators)
    vocab = int(tensors["t2d"].shape[0]) if "t2d" in tensors else layer["vocab_size"]
    lm_head = tensors.get("lm_head.weight")
    inputs = int(tensors["fc.weight"].shape[-1]) if "fc.weight" in tensors else 0
    dspark = "markov_head.markov_w1.weight" in tensors or flat.get("speculators_model_type") == "dspark"
    return BlockHead(
        layer=layer,
        block=number(flat, path, "block_size", high=1024),
        mask_token=_mask_token(flat, path),
        from_newest=bool(flat.get("sample_from_anchor", dspark)),
        taps=taps,
        ordered=_ordered(flat, layer),
        causal=bool(flat.get("causal_head")),
        target_hidden=number(flat, path, "target_hidden_size", default=max(1, inputs // len(taps))),
        vocab=vocab,
        draft_vocab=vocab if lm_head is None else len(lm_head),
        gated=flat.get("markov_head_type") == "gated",
        confident_of=bool(flat.get("confidence_head_with_markov", True)) and dspark,
        tensors={name: t for name, t in tensors.items() if not name.startswith("verifier_")},
    )


def _mask_token(flat: Mapping[str, Any], path: Path) -> int:
    if flat.get("mask_token_id") is None:
        raise ModelLoadError(f"{path / 'config.json'} lacks mask_token_id, the token of the rows to predict")
    return int(flat["mask_token_id"])


def _taps(flat: Mapping[str, Any], path: Path, speculators: bool) -> tuple[int, ...]:
    """Returns the tapped layers as indices of their inputs."""
    ids, shift = (flat.get("aux_hidden_state_layer_ids"), 0) if speculators else (flat.get("target_layer_ids"), 1)
    if ids is None:
        name = "aux_hidden_state_layer_ids" if speculators else "target_layer_ids"
        raise ModelLoadError(f"{path / 'config.json'} lacks {name}, the target's layers that the head reads")
    return tuple(i + shift for i in ids)


def _ordered(flat: Mapping[str, Any], layer: Mapping[str, Any]) -> tuple[bool, ...]:
    """Returns for each layer whether its rows see no later rows: by default layers with a sliding window."""
    kinds = layer.get("layer_types") or ["full_attention"] * layer["num_hidden_layers"]
    stated = [flat[key] for key in ("causal_head", "is_causal", "causal") if flat.get(key) is not None]
    if stated:
        return (bool(stated[0]),) * len(kinds)
    mutual = bool(flat.get("sliding_window_non_causal"))
    return tuple(kind == "sliding_attention" and not mutual for kind in kinds)


def _shapes(head: BlockHead) -> dict[str, tuple[int, ...]]:
    width, dim = head.hidden, head.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, len(head.taps) * head.target_hidden),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    for i in range(head.layers):
        at = f"layers.{i}."
        shapes |= {
            f"{at}input_layernorm.weight": (width,),
            f"{at}self_attn.q_norm.weight": (dim,),
            f"{at}self_attn.k_norm.weight": (dim,),
            **layer_shapes(at, head.layer, head.tensors, width),
        }
    optional = {
        "embed_tokens.weight": (head.vocab, width),
        "lm_head.weight": (head.draft_vocab, width),
        "d2t": (head.draft_vocab,),
        "t2d": (head.vocab,),
        "confidence_head.proj.bias": (1,),
    }
    rank = head.markov_rank
    if rank:
        shapes |= {"markov_head.markov_w1.weight": (head.vocab, rank)}
        shapes |= {"markov_head.markov_w2.weight": (head.draft_vocab, rank)}
    if rank and head.gated:
        shapes |= {"markov_head.gate_proj.weight": (rank, width + rank), "markov_head.gate_proj.bias": (rank,)}
    if head.confident:
        shapes |= {"confidence_head.proj.weight": (1, width + (rank if head.confident_of else 0))}
    return shapes | {name: shape for name, shape in optional.items() if name in head.tensors}


def _check_values(head: BlockHead, path: Path) -> None:
    """Raises ModelLoadError for token ids that the target does not have."""
    if head.block < 2 and not head.from_newest:
        raise ModelLoadError(f"{path} has blocks of {head.block} row, which predict nothing")
    if head.mask_token >= head.vocab:
        raise ModelLoadError(f"{path} has the mask token {head.mask_token}, beyond its vocabulary of {head.vocab}")
    if "d2t" not in head.tensors and head.draft_vocab != head.vocab:
        raise ModelLoadError(f"{path} predicts {head.draft_vocab} of {head.vocab} tokens, and lacks d2t to say which")
    check_target_ids(path, head.ids(), head.vocab)
