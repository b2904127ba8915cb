"""The families with experts that the runtime computes, and the experts that a config.json of theirs describes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from foretoken.core.errors import ModelLoadError
from foretoken.core.schema import Positive, Schema, Size, parse

MAX_EXPERTS = 1024  # of csrc/router.hpp

Scoring = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names of a layer's tensors, below ``model.layers.N.``."""

    router: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"  # bias of its scores for choosing experts
    experts: str = "mlp.experts"  # the experts; below it a number, then ``up`` and ``down``
    up: tuple[str, ...] = ("gate_proj", "up_proj")  # gate and up, or up alone if experts are not gated
    down: str = "down_proj"
    shared: str = "mlp.shared_experts"  # the shared expert; below it ``shared_up`` and ``shared_down``
    shared_up: tuple[str, ...] = ("gate_proj", "up_proj")  # its gate and up, one matrix of both, or up alone
    shared_down: str = "down_proj"


@dataclass(frozen=True, slots=True)
class Beside:
    """A dense MLP beside the experts of a layer, which read the same residual stream x (Gemma 4).

    The layer adds after_mlp(after(mlp(mlp_norm(x))) + after_experts(experts(norm(x)))). The router reads
    x / rms(x) * scale / sqrt(hidden), and a weight is multiplied by its expert's factor.
    """

    norm: str = "pre_feedforward_layernorm_2"  # name of the norm of the experts' input
    after_experts: str = "post_feedforward_layernorm_2"  # name of the norm of their output
    after: str = "post_feedforward_layernorm_1"  # name of the norm of the dense MLP's output
    scale: str = "router.scale"  # name of the factors of the router's input, [hidden]
    expert_scales: str = "router.per_expert_scale"  # name of the experts' factors, [experts]


@dataclass(frozen=True, slots=True)
class Experts:
    """The MLP of a layer with experts (1701.06538).

    A row's score for each expert is the softmax or sigmoid of its router logits. The row takes the ``chosen`` experts
    with the largest scores, on ties those with the lowest indices. Their outputs are added up, weighted by the scores.
    """

    count: int = 1  # number of experts
    chosen: int = 1  # number of experts of a row
    intermediate: int = 1  # inner size of an expert
    scoring: Scoring = "softmax"  # function from router logits to scores
    normalized: bool = True  # whether weights are divided by their sum
    divisor_eps: float = 0.0  # is added to that sum
    scale: float = 1.0  # factor of the weights
    correction: bool = False  # whether a bias is added to the scores before experts are chosen (2408.15664)
    # number of groups of experts; experts are chosen from the best ``chosen_groups`` of them (2405.04434)
    groups: int = 1
    chosen_groups: int = 1
    best_two: bool = False  # whether a group is scored by the sum of its best two experts; else by its best one
    shared: int = 0  # inner size of the shared expert, whose output every row adds; 0 for none
    shared_gate: bool = False  # whether that output is multiplied by the sigmoid of a product of the row
    biased: bool = False
    scaled_inputs: bool = False  # whether a weight multiplies the expert's input instead of its output (Llama 4)
    inputs_first: bool = False  # whether stacks of experts are stored as [experts, in, out]
    gated: bool = True  # whether experts and the shared expert are gated MLPs; otherwise down(activation(up))
    # bound of gate and up in gpt-oss's ``(up + 1) * gate * sigmoid(slope * gate)``; 0 for activation(gate) * up
    clamp: float = 0.0
    slope: float = 1.0  # see ``clamp``
    names: ExpertNames = field(default_factory=ExpertNames)  # names of the tensors
    beside: Beside | None = None  # the dense MLP beside the experts; None for none


@dataclass(frozen=True, slots=True)
class ExpertFamily:
    """Properties of the experts of every checkpoint of a model type."""

    defaults: Mapping[str, Any]  # transformers' values of missing fields of config.json
    experts: Experts = Experts()  # the properties that config.json does not name
    # kind of the layers with experts, by its name in ``layer_types``; None for layers of all kinds
    kind: str | None = None


Count = Annotated[int, Field(ge=1, le=MAX_EXPERTS)]


def _fields(count: int, chosen: int, inner: int | None = None, **others: Any) -> dict[str, Any]:
    """Returns the numbers of experts and of those chosen for a row, the units of an expert, and other fields."""
    return {"num_experts": count, "num_experts_per_tok": chosen, "moe_intermediate_size": inner, **others}


_SHARED = Experts(names=ExpertNames(shared="mlp.shared_expert"), shared_gate=True)
_SIGMOID = Experts(scoring="sigmoid", divisor_eps=1e-20, correction=True)
_BEST_TWO = replace(_SIGMOID, best_two=True)
_GRANITE = ExpertFamily(
    _fields(8, 2),
    Experts(
        names=ExpertNames(
            "block_sparse_moe.router.layer",
            experts="block_sparse_moe",
            shared="shared_mlp",
            shared_up=("input_linear",),
            shared_down="output_linear",
        )
    ),
)
_QWEN: dict[str, Any] = {"norm_topk_prob": False, "decoder_sparse_step": 1}
# The families with experts that the runtime computes.
EXPERT_FAMILIES: dict[str, ExpertFamily] = {
    "qwen3_moe": ExpertFamily(_QWEN | _fields(128, 8, 768)),
    "qwen2_moe": ExpertFamily(_QWEN | _fields(60, 4, 1408, shared_expert_intermediate_size=5632), _SHARED),
    "qwen3_next": ExpertFamily(
        _QWEN | _fields(512, 10, 512, shared_expert_intermediate_size=512, norm_topk_prob=True), _SHARED
    ),
    "qwen3_5_moe_text": ExpertFamily(_fields(256, 8, 512, shared_expert_intermediate_size=512), _SHARED),
    "mixtral": ExpertFamily(
        _fields(8, 2),
        Experts(
            names=ExpertNames("block_sparse_moe.gate", experts="block_sparse_moe.experts", up=("w1", "w3"), down="w2")
        ),
    ),
    "olmoe": ExpertFamily(_fields(64, 8, norm_topk_prob=False)),
    "granitemoe": _GRANITE,
    "granitemoeshared": _GRANITE,
    "granitemoehybrid": replace(_GRANITE, defaults={**_GRANITE.defaults, "shared_intermediate_size": 1024}),
    "gpt_oss": ExpertFamily(
        _fields(128, 4, swiglu_alpha=1.702, swiglu_limit=7.0),
        Experts(names=ExpertNames("mlp.router"), biased=True, inputs_first=True),
    ),
    "gemma4_text": ExpertFamily({}, Experts(names=ExpertNames("router.proj", experts="experts"), beside=Beside())),
    "glm4_moe": ExpertFamily(
        _fields(128, 8, 1408, n_shared_experts=1, norm_topk_prob=True, first_k_dense_replace=1), _BEST_TWO
    ),
    # The divisor of its weights is at least moe_norm_min, 1e-12, which a sum of softmax scores does not fall below.
    "ernie4_5_moe": ExpertFamily(
        _fields(64, 6, 1536, n_shared_experts=2, first_k_dense_replace=1),
        Experts(names=ExpertNames(correction="mlp.moe_statics.e_score_correction_bias"), correction=True),
    ),
    "exaone_moe": ExpertFamily(
        _fields(64, 8, 1024, n_shared_experts=1, routed_scaling_factor=2.5, first_k_dense_replace=1),
        replace(_BEST_TWO, names=ExpertNames(correction="mlp.e_score_correction_bias")),
    ),
    "hy_v3": ExpertFamily(
        _fields(192, 8, 1536, n_shared_experts=1, routed_scaling_factor=2.826, first_k_dense_replace=1),
        replace(_SIGMOID, names=ExpertNames("mlp.router.gate", "mlp.expert_bias", shared="mlp.shared_mlp")),
    ),
    "lfm2_moe": ExpertFamily(
        _fields(32, 4, 1792, num_dense_layers=2, use_expert_bias=True),
        Experts(
            names=ExpertNames(
                "feed_forward.gate", "feed_forward.expert_bias", "feed_forward.experts", ("w1", "w3"), "w2"
            ),
            scoring="sigmoid",
            divisor_eps=1e-6,
            correction=True,
        ),
    ),
    "deepseek_v2": ExpertFamily(_fields(64, 6, 1407, n_shared_experts=2, norm_topk_prob=False, topk_method="greedy")),
    "deepseek_v3": ExpertFamily(
        _fields(256, 8, 2048, n_shared_experts=1, routed_scaling_factor=2.5, first_k_dense_replace=3)
        | {"n_group": 8, "topk_group": 4},
        _BEST_TWO,
    ),
    "glm4_moe_lite": ExpertFamily(
        _fields(64, 4, 1536, n_shared_experts=1, routed_scaling_factor=1.8, first_k_dense_replace=1), _BEST_TWO
    ),
    "llama4_text": ExpertFamily(
        _fields(16, 1, n_shared_experts=1, norm_topk_prob=False),
        Experts(
            names=ExpertNames(
                "feed_forward.router", experts="feed_forward.experts", shared="feed_forward.shared_expert"
            ),
            scoring="sigmoid",
            scaled_inputs=True,
            inputs_first=True,
        ),
    ),
    "nemotron_h": ExpertFamily(
        _fields(8, 2, 7688, moe_shared_expert_intermediate_size=7688),
        replace(
            _BEST_TWO,
            gated=False,
            names=ExpertNames(
                "mixer.gate",
                "mixer.gate.e_score_correction_bias",
                "mixer.experts",
                ("up_proj",),
                shared="mixer.shared_experts",
                shared_up=("up_proj",),
            ),
        ),
        kind="moe",
    ),
}


class ExpertsConfig(Schema):
    """The fields of a config.json that describe experts; the family decides which of them it has."""

    num_experts: Count | None = None
    num_local_experts: Count | None = None
    n_routed_experts: Count | None = None
    num_experts_per_tok: Count
    moe_intermediate_size: Size | None = None
    shared_expert_intermediate_size: Size | None = None
    moe_shared_expert_intermediate_size: Size | None = None
    shared_intermediate_size: Annotated[int, Field(ge=0)] | None = None
    n_shared_experts: Annotated[int, Field(ge=0, le=1024)] | None = None
    norm_topk_prob: bool | None = None
    routed_scaling_factor: Positive | None = None
    n_group: Count | None = None
    topk_group: Count | None = None
    topk_method: str | None = None
    first_k_dense_replace: Annotated[int, Field(ge=0)] | None = None
    moe_layer_end_index: Annotated[int, Field(ge=-1)] | None = None
    num_dense_layers: Annotated[int, Field(ge=0)] | None = None
    use_expert_bias: bool | None = None
    mlp_layer_types: list[str] | None = None
    decoder_sparse_step: Annotated[int, Field(ge=0)] | None = None
    interleave_moe_layer_step: Annotated[int, Field(ge=1)] | None = None
    mlp_only_layers: list[int] | None = None
    moe_layers: list[int] | None = None
    swiglu_alpha: Positive | None = None
    swiglu_limit: Positive | None = None


_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # names for the number of experts


def experts_of(c: Mapping[str, Any]) -> tuple[Experts | None, ...]:
    """Returns the experts of each layer; None for a layer with a dense MLP.

    c: the config.json of a decoder, with its family's defaults filled in.
    """
    family, layers = EXPERT_FAMILIES.get(c["model_type"]), range(c["num_hidden_layers"])
    has_kind = [
        family is not None and family.kind in (None, kind) for kind in c.get("layer_types") or [None] * len(layers)
    ]
    if family is None or _count(c) == 0 or not any(has_kind):
        return (None,) * len(layers)  # without experts a Qwen3-Next or Granite is dense
    filled = {**family.defaults, **{key: value for key, value in c.items() if value is not None}}
    parsed = parse(ExpertsConfig, filled, "config.json")
    experts = _checked(_experts(family, parsed, c))
    return tuple(experts if has_kind[layer] and _sparse(parsed, layer) else None for layer in layers)


def _experts(family: ExpertFamily, c: ExpertsConfig, config: Mapping[str, Any]) -> Experts:
    inner = c.moe_intermediate_size or config["intermediate_size"]
    grouped = "topk_method" not in family.defaults or c.topk_method != "greedy"  # only DeepSeek-V2 reads it
    e = family.experts
    return replace(
        e,
        count=_count(config) or _count(family.defaults) or 1,
        chosen=c.num_experts_per_tok,
        intermediate=inner,
        normalized=c.norm_topk_prob is not False,
        scale=c.routed_scaling_factor or 1.0,
        correction=e.correction and c.use_expert_bias is not False,
        groups=c.n_group or 1 if grouped else 1,
        chosen_groups=c.topk_group or 1 if grouped else 1,
        shared=c.shared_expert_intermediate_size
        or c.moe_shared_expert_intermediate_size
        or c.shared_intermediate_size
        or inner * (c.n_shared_experts or 0),
        clamp=c.swiglu_limit or 0.0,
        slope=c.swiglu_alpha or 1.0,
    )


def _count(c: Mapping[str, Any]) -> int | None:
    return next((c[name] for name in _COUNTS if c.get(name) is not None), None)


def _sparse(c: ExpertsConfig, layer: int) -> bool:
    if c.mlp_layer_types is not None:
        return c.mlp_layer_types[layer : layer + 1] == ["sparse"]
    if layer < (c.first_k_dense_replace or c.num_dense_layers or 0) or layer in (c.mlp_only_layers or ()):
        return False
    if c.moe_layer_end_index not in (None, -1) and layer > c.moe_layer_end_index:
        return False
    if c.moe_layers is not None:
        return layer in c.moe_layers
    step = c.interleave_moe_layer_step or c.decoder_sparse_step
    return step is None or (step > 0 and (layer + 1) % step == 0)


def _checked(e: Experts) -> Experts:
    """Returns the experts. Raises ModelLoadError if their numbers do not fit together."""
    if e.chosen > e.count:
        raise ModelLoadError(f"config.json has num_experts_per_tok = {e.chosen}, more than its {e.count} experts")
    if e.count % e.groups or e.chosen_groups > e.groups or e.count // e.groups * e.chosen_groups < e.chosen:
        raise ModelLoadError(
            f"config.json has n_group = {e.groups} and topk_group = {e.chosen_groups}, from which {e.chosen} of "
            f"{e.count} experts cannot be chosen"
        )
    return e
