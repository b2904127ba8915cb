"""Finds and opens checkpoints of heads, and checks their tensors, sizes and mask tokens."""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from foretoken import zoo
from foretoken.core.artifacts import HEADS_FOLDER
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.core.schema import MAX_INT, Schema, Size, shortened
from foretoken.models.families.architecture import Architecture, unsupported
from foretoken.models.families.config import text_part
from foretoken.models.families.family import TensorNames
from foretoken.models.formats.checkpoint import load_config, open_weights, resolve
from foretoken.models.formats.prequantized import check_prequantized, read_int8, unpacked
from foretoken.models.formats.reader import located
from foretoken.models.formats.weight_files import INDEX, PICKLES, SINGLE

MAX_HEADS = 256  # heads of a checkpoint, and layers of a head; their tensors are listed before any is read
# Names in architectures that the native decoder does not compute.
_OTHER_NAMES = (
    TensorNames(base="transformer.", embedding="wte"),
    TensorNames(base="model.decoder.", embedding="embed_tokens"),
)
TAPS_KEY = "foretoken_taps"  # our key in config.json: the tapped layers, as indices of their inputs
_SIZE_KEYS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")
_LAYER_KEYS = (*_SIZE_KEYS, "rms_norm_eps", "hidden_act", *_ROPE_KEYS)


class HeadSections(Schema):
    """The sections of config.json that some formats nest."""

    speculators_model_type: str | None = None
    transformer_layer_config: dict[str, Any] | None = None


class HeadCheckpointConfig(Schema):
    """The fields of heads of layers, all sections on one level. The layers' must also satisfy ``CausalConfig``."""

    target_hidden_size: Size | None = None
    layer_types: list[str] | None = None
    sliding_window: Annotated[int, Field(ge=0)] | None = None
    use_sliding_window: bool | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LayeredHead:
    """A checkpoint with a head of decoder layers."""

    layer: dict[str, Any]  # config.json of its layers, by Llama's names
    target_hidden: int
    vocab: int  # size of the target's vocabulary
    draft_vocab: int  # size of the head's vocabulary
    tensors: dict[str, Tensor]  # tensors by the names that the subclass states

    @property
    def hidden(self) -> int:
        return int(self.layer["hidden_size"])

    @property
    def head_dim(self) -> int:
        return int(self.layer.get("head_dim") or self.hidden // self.layer["num_attention_heads"])

    def ids(self) -> Tensor:
        """Returns the target's token id for each of the head's, int64 [Vd]."""
        return target_ids(self.tensors, self.draft_vocab)


def find_head(role: str, model: str | Path | None, target: Path | None) -> Path:
    """Returns the folder of the heads to use: ``model``, or the target's heads.

    ``model`` is a folder, the name of a bundled model, or a hub id. A target's heads are in its folder under
    ``heads/<role>``; heads of the bundled target are in the zoo.

    Raises:
        InvalidRequest: ``model`` is None, and the target has no such heads.
        ModelLoadError: ``model`` is not found.
    """
    if model is not None:
        bundled = any(m.name == str(model) for m in zoo.list_models()) and not Path(model).exists()
        return zoo.path(str(model)) if bundled else resolve(model)
    if target is not None:
        shipped = target / HEADS_FOLDER / role
        if (shipped / "config.json").is_file():
            return shipped
        if target.resolve() == zoo.path("target").resolve() and any(m.role == role for m in zoo.list_models()):
            return zoo.path(role)
    raise InvalidRequest(
        f"method {role!r} needs heads for this target and none came with it; pass 'model' in speculative_config, or "
        f"train them: foretoken train {role} HEAD --model TARGET"
    )


def open_head(path: Path) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """Returns config.json and the tensors, those of a quantized head as floats."""
    config = load_config(path)
    if not (path / SINGLE).is_file() and not (path / INDEX).is_file():
        pickles = sorted(file.name for pattern in PICKLES for file in path.glob(pattern))
        if pickles:
            raise ModelLoadError(
                f"{path} has its weights only as a pickle ({pickles[0]}), which can run code when it is read; where "
                "you trust it, save it again: save_file({k: v.contiguous() for k, v in torch.load(F, weights_only=True)"
                f".items()}}, '{SINGLE}') with safetensors.torch"
            )
    weights = unpacked(open_weights(path), config)
    if not check_prequantized(config):
        return config, weights
    int8 = {name: read_int8(weights, name.removesuffix(".weight")) for name in weights}
    names = [name for name in weights if not name.endswith(".weight_scale")]
    return config, {name: weights[name] if (m := int8[name]) is None else m.dequantize() for name in names}


def ends_of(path: Path) -> tuple[Mapping[str, Tensor], str, str]:
    """Returns a target's tensors, and the names of its embedding and its vocabulary head, which it may lack."""
    config, weights = load_config(path), open_weights(path)
    config = text_part(config) or config
    if unsupported(config) is None:
        names = Architecture.of(config).names
    else:
        names = next((n for n in _OTHER_NAMES if f"{n.base}{n.embedding}.weight" in weights), TensorNames())
    base, head = located(weights, names)
    return weights, f"{base}{names.embedding}.weight", f"{head}.weight"


def check_shapes(path: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ModelLoadError for the first tensor of ``expected`` that is missing or has another shape."""
    for name, shape in expected.items():
        if name not in tensors:
            raise ModelLoadError(f"the heads in {path} lack the tensor {name!r}; is the checkpoint complete?")
        if tuple(tensors[name].shape) != shape:
            raise ModelLoadError(
                f"{name} in {path} has the shape {tuple(tensors[name].shape)}, but config.json says {shape}"
            )


def check_dimensions(path: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, int]) -> None:
    """Raises ModelLoadError for a tensor of ``expected`` that has another number of dimensions, or is empty."""
    for name, dimensions in expected.items():
        if name in tensors and (tensors[name].ndim != dimensions or not tensors[name].numel()):
            raise ModelLoadError(
                f"{name} in {path} has the shape {tuple(tensors[name].shape)}; expected {dimensions} dimensions, none "
                "of them 0"
            )


def layer_settings(config: Mapping[str, Any], path: Path, *keys: str) -> dict[str, Any]:
    """Returns the fields of config.json for a head's decoder layers, by Llama's names, and the fields ``keys``."""
    layer = {key: config[key] for key in (*_LAYER_KEYS, *keys) if config.get(key) is not None}
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings"):
        layer[key] = number(config, path, key)
    layer["num_key_value_heads"] = number(config, path, "num_key_value_heads", default=layer["num_attention_heads"])
    layer.setdefault("rms_norm_eps", 1e-6)
    return layer


def layer_shapes(at: str, layer: Mapping[str, Any], tensors: Container[str], inputs: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a decoder layer's tensors, without norms of its input and of heads.

    Args:
        at: prefix of the names.
        layer: result of ``layer_settings``.
        tensors: names of the head's tensors; biases of queries, keys and values are expected if one of them exists.
        inputs: width of the attention's input.
    """
    h, inner, heads = layer["hidden_size"], layer["intermediate_size"], layer["num_attention_heads"]
    dim = layer.get("head_dim") or h // heads
    counts = heads, layer["num_key_value_heads"], layer["num_key_value_heads"]
    qkv = {f"{at}self_attn.{part}_proj": count * dim for part, count in zip("qkv", counts, strict=True)}
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, inputs) for name, rows in qkv.items()}
    shapes |= {
        at + "self_attn.o_proj.weight": (h, heads * dim),
        at + "post_attention_layernorm.weight": (h,),
        at + "mlp.gate_proj.weight": (inner, h),
        at + "mlp.up_proj.weight": (inner, h),
        at + "mlp.down_proj.weight": (h, inner),
    }
    biases = {f"{name}.bias": (rows,) for name, rows in qkv.items()}
    return shapes | (biases if any(name in tensors for name in biases) else {})


def target_ids(tensors: Mapping[str, Tensor], count: int) -> Tensor:
    """Returns the target's token id for each of a head's, int64 [count]. ``d2t`` holds offsets: id = i + d2t[i]."""
    offsets = tensors.get("d2t")
    indices = torch.arange(count)
    return indices if offsets is None else indices + offsets.long()


def check_target_ids(path: Path, ids: Tensor, vocab: int) -> None:
    """Raises ModelLoadError for ids outside the target's vocabulary, or equal ones."""
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(ids.unique()) != len(ids):
        raise ModelLoadError(
            f"d2t in {path} leads outside the vocabulary of {vocab} or twice to one token; it must hold offsets: "
            "target id = i + d2t[i]"
        )


def check_vocabulary_head(matrix: Tensor, vocab: int, hidden: int) -> None:
    """Raises InvalidRequest unless a target's vocabulary head is [vocab, hidden]."""
    if tuple(matrix.shape) != (vocab, hidden):
        raise InvalidRequest(
            f"these heads were made for a target with a vocabulary head of {vocab} x {hidden}, not of "
            f"{' x '.join(map(str, matrix.shape))}"
        )


def number(config: Mapping[str, Any], path: Path, *names: str, default: int | None = None, high: int = MAX_INT) -> int:
    """Returns the first of ``names`` in config.json, or ``default``, as an integer from 1 to ``high``."""
    value = next((config[name] for name in names if config.get(name) is not None), default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
        raise ModelLoadError(
            f"{path / 'config.json'} should say {names[0]!r} as a positive integer of at most {high}, got "
            f"{shortened(value)}"
        )
    return value


MASK_KEYS = ("pard_token", "ptd_token_id")  # PARD's and vLLM's names


def mask_token(config: Mapping[str, Any], vocab: int, path: Path) -> int | None:
    """Returns the mask token that a config.json names; None if it names none.

    Args:
        vocab: size of the draft's input vocabulary.
        path: the checkpoint, for the message.
    """
    name = next((key for key in MASK_KEYS if config.get(key) is not None), None)
    if name is None:
        return None
    value = config[name]
    token = int(value) if isinstance(value, str) and value.isdecimal() else value  # some files quote it
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
        raise ModelLoadError(f"{path} has {name} = {value!r}; expected a token id below {vocab}")
    return token


def no_mask_token(path: Path) -> InvalidRequest:
    """Returns the error for a checkpoint that was not trained for parallel drafting."""
    return InvalidRequest(
        f"parallel_drafting needs a draft that was trained for it, and {path / 'config.json'} names no mask token "
        f"({', '.join(MASK_KEYS)}); leave it out, or take another draft"
    )
