"""Tiny random copies of transformers modules: the same class and attention layout, at sizes that are cheap to run.

A class uses masks, positions and its cache in the same way at every width. So it can be checked on a copy, with windows
short enough to be crossed.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from foretoken.models.hf.rotary import LONGROPE, longrope_length

LENGTH = 64  # maximum length of a copy
WINDOW = 4  # tokens of a copy's attention windows
_RUN = 56  # tokens that a copy must be able to run; some classes leave their first positions unused
_LONGROPE_LENGTH = 6
_VOCAB = 96
_ATTEMPTS = ((True, 2), (True, 4), (False, 2))  # whether few layers are kept, and how many heads
_MAX_PARAMETERS = 60_000_000
_ORIGINAL = "original_max_position_embeddings"
_BOUNDARY = re.compile(r"window(_size|_len|s)?$|^local_attention$|^attention_chunk_size$|^index_topk$|^rel_extent$")
_POSITIONS = ("max_position_embeddings", "max_seq_len")
# Names of sizes in configurations, and their largest values in a copy.
_SIZES: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), _VOCAB),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner"), 64),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "moe_intermediate_size", "intermediate_size_mlp"), 64),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size", "dense_intermediate_size"), 64),
    **dict.fromkeys(("expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "zero_expert_num"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
}


def boundaries(config: Any, max_length: int) -> dict[str, int]:
    """Returns the lengths beyond which attention or rotary factors change, by their names in ``config``.

    Args:
        config: configuration of the text model.
        max_length: length of the longest sequence. Boundaries that it does not exceed are omitted.
    """
    lengths = {name: value for name, value in vars(config).items() if _BOUNDARY.search(name) and _whole(value)}
    lengths[_ORIGINAL] = longrope_length(vars(config).get("rope_parameters"))
    return {name: value for name, value in lengths.items() if 0 < value < max_length}


def tiny_random(module: Any, crossed: Mapping[str, int]) -> Any:
    """Returns a tiny copy in float32 on the CPU with random weights; None if it cannot be built.

    If the class of a multimodal model cannot be built, the copy has the class of its text model.

    Args:
        module: the module to copy; its weights are not read.
        crossed: the ``boundaries`` to shorten, so that texts of a few tokens exceed them.
    """
    model = next((part for part in module.modules() if isinstance(part, PreTrainedModel)), None)
    candidates = () if model is None else _candidates(model)
    return next((copied for kind, config in candidates if (copied := tiny_of(kind, config, crossed)) is not None), None)


def tiny_of(kind: Callable[[Any], Any], config: Any, crossed: Mapping[str, int]) -> Any:
    """Returns a tiny random module of the class ``kind``, as ``tiny_random`` does; None if it cannot be built.

    It keeps a layer of every kind and the head dimension, on which rotary factors depend.
    """
    for few_layers, heads in _ATTEMPTS:
        try:
            small = _shrunk(config, crossed, few_layers, heads)
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in kind(small).parameters())
            if size <= _MAX_PARAMETERS:
                return _random(kind, small)
        except Exception:  # each class checks its configuration in its own way
            continue
    return None


def _candidates(model: PreTrainedModel) -> Iterator[tuple[Callable[[Any], Any], Any]]:
    """Yields classes and configurations that represent ``model``, the closest first."""
    yield type(model), model.config
    text = model.config.get_text_config()
    if text is not model.config and type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
        yield MODEL_FOR_CAUSAL_LM_MAPPING[type(text)], text


def _random(kind: Callable[[Any], Any], config: Any) -> Any:
    """Returns a module whose parameters are all random: norms of 1 and gates of 0 would hide differences."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        module = kind(config).float().eval()
        generator = torch.Generator().manual_seed(0)
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim < 2:
                parameter.add_(noise, alpha=0.2)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        module(input_ids=torch.arange(3, _RUN).unsqueeze(0), use_cache=False)  # raises if sizes do not fit
    return module


def _shrunk(config: Any, crossed: Mapping[str, int], few_layers: bool, heads: int) -> Any:
    small = copy.deepcopy(config)
    for part in _parts(small):
        if few_layers:
            _drop_layers(part)
        _narrow(part, heads)
    text = small.get_text_config()
    for name in crossed:
        setattr(text, name, _LONGROPE_LENGTH if name == _ORIGINAL else WINDOW)
    if _ORIGINAL in crossed:
        _shorten_rope(text.rope_parameters)
    return small


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value)


def _drop_layers(config: Any) -> None:
    """Keeps the first layer of each kind, and at least two layers.

    Layers are of one kind if all per-layer lists have equal entries for them. The last ``num_kv_shared_layers``, which
    reuse keys and values of earlier layers, are separate kinds.
    """
    count, shared = _number(config, "num_hidden_layers"), _number(config, "num_kv_shared_layers")
    if count <= 2:
        return
    lists = {name: value for name, value in vars(config).items() if isinstance(value, list) and len(value) == count}
    kinds = [(at >= count - shared, *(str(value[at]) for value in lists.values())) for at in range(count)]
    layers = sorted({kinds.index(kind) for kind in kinds})
    layers = layers if len(layers) > 1 else [0, 1]
    for name, value in lists.items():
        setattr(config, name, [value[layer] for layer in layers])
    config.num_hidden_layers = len(layers)
    if shared:
        config.num_kv_shared_layers = sum(kinds[layer][0] for layer in layers)


def _narrow(config: Any, max_heads: int) -> None:
    """Reduces heads and sizes; the head dimension stays."""
    heads, kv_heads = _number(config, "num_attention_heads"), _number(config, "num_key_value_heads")
    width = _number(config, "hidden_size")
    if heads and width:
        head_dim = _number(config, "head_dim") or width // heads
        config.num_attention_heads = min(heads, max_heads)
        config.hidden_size = config.num_attention_heads * head_dim
        if vars(config).get("head_dim", head_dim) is None:
            config.head_dim = head_dim
        if "num_key_value_heads" in vars(config):
            config.num_key_value_heads = 1 if 0 < kv_heads < heads else config.num_attention_heads
    for name, size in _SIZES.items():
        value = vars(config).get(name)
        if isinstance(value, list):
            setattr(config, name, [size] * len(value))
        elif _number(config, name) > size:
            setattr(config, name, size)
    for name in _POSITIONS:
        if _number(config, name):
            setattr(config, name, LENGTH)
    for name, value in vars(config).items():
        if name.endswith("_token_id") and _whole(value) and value >= _VOCAB:
            setattr(config, name, _VOCAB - 1)


def _shorten_rope(settings: dict[str, Any]) -> None:
    if settings.get("rope_type") == LONGROPE:
        settings[_ORIGINAL] = _LONGROPE_LENGTH
    for value in settings.values():
        if isinstance(value, dict):
            _shorten_rope(value)


def _number(config: Any, name: str) -> int:
    """Returns a size, also by the configuration's alias; 0 if it has none or one for each layer."""
    try:
        value = getattr(config, name, 0)
    except Exception:  # transformers: AmbiguousGlobalPerLayerAttributeError
        value = 0
    return value if _whole(value) else 0


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
