"""Mixtures of experts that a config.json describes: the routing of rows, and the experts' MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

MAX_EXPERTS = 1024  # of csrc/router.hpp

Scoring = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names of a layer's tensors, below ``model.layers.N.``.

    Attributes:
        router: the router.
        correction: bias of its scores for choosing experts.
        experts: the experts; below it a number, then ``up`` and ``down``.
        up: gate and up, or up alone if experts are not gated.
        down: down.
        shared: the shared expert; below it ``shared_up`` and ``shared_down``.
        shared_up: its gate and up, one matrix of both, or up alone.
        shared_down: its down.
    """

    router: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"
    experts: str = "mlp.experts"
    up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    shared: str = "mlp.shared_experts"
    shared_up: tuple[str, ...] = ("gate_proj", "up_proj")
    shared_down: str = "down_proj"


@dataclass(frozen=True, slots=True)
class Beside:
    """A dense MLP beside the experts of a layer, which read the same residual stream x (Gemma 4).

    The layer adds after_mlp(after(mlp(mlp_norm(x))) + after_experts(experts(norm(x)))). The router reads
    x / rms(x) * scale / sqrt(hidden), and a weight is multiplied by its expert's factor.

    Attributes:
        norm: name of the norm of the experts' input.
        after_experts: name of the norm of their output.
        after: name of the norm of the dense MLP's output.
        scale: name of the factors of the router's input, [hidden].
        expert_scales: name of the experts' factors, [experts].
    """

    norm: str = "pre_feedforward_layernorm_2"
    after_experts: str = "post_feedforward_layernorm_2"
    after: str = "post_feedforward_layernorm_1"
    scale: str = "router.scale"
    expert_scales: str = "router.per_expert_scale"


@dataclass(frozen=True, slots=True)
class Experts:
    """The MLP of a layer with experts (1701.06538).

    A row's score for each expert is the softmax or sigmoid of its router logits. The row takes the ``chosen`` experts
    with the largest scores, on ties those with the lowest indices. Their outputs are added up, weighted by the scores.

    Attributes:
        count: number of experts.
        chosen: number of experts of a row.
        intermediate: inner size of an expert.
        scoring: function from router logits to scores.
        normalized: whether weights are divided by their sum.
        divisor_eps: is added to that sum.
        scale: factor of the weights.
        correction: whether a bias is added to the scores before experts are chosen (2408.15664).
        groups: number of groups of experts; experts are chosen from the best ``chosen_groups`` of them (2405.04434).
        best_two: whether a group is scored by the sum of its best two experts; else by its best one.
        shared: inner size of the shared expert, whose output every row adds; 0 for none.
        shared_gate: whether that output is multiplied by the sigmoid of a product of the row.
        biased: whether router and experts have biases.
        scaled_inputs: whether a weight multiplies the expert's input instead of its output (Llama 4).
        inputs_first: whether stacks of experts are stored as [experts, in, out].
        gated: whether experts and the shared expert are gated MLPs; otherwise down(activation(up)).
        clamp: bound of gate and up in gpt-oss's activation, ``(up + 1) * gate * sigmoid(slope * gate)``; 0 for
            activation(gate) * up.
        slope: see ``clamp``.
        names: names of the tensors.
        beside: the dense MLP beside the experts; None for none.
    """

    count: int = 1
    chosen: int = 1
    intermediate: int = 1
    scoring: Scoring = "softmax"
    normalized: bool = True
    divisor_eps: float = 0.0
    scale: float = 1.0
    correction: bool = False
    groups: int = 1
    chosen_groups: int = 1
    best_two: bool = False
    shared: int = 0
    shared_gate: bool = False
    biased: bool = False
    scaled_inputs: bool = False
    inputs_first: bool = False
    gated: bool = True
    clamp: float = 0.0
    slope: float = 1.0
    names: ExpertNames = field(default_factory=ExpertNames)
    beside: Beside | None = None


@dataclass(frozen=True, slots=True)
class ExpertFamily:
    """Properties of the experts of every checkpoint of a model type.

    Attributes:
        defaults: transformers' values of missing fields of config.json.
        experts: the properties that config.json does not name.
        kind: kind of the layers with experts, by its name in ``layer_types``; None for layers of all kinds.
    """

    defaults: Mapping[str, Any]
    experts: Experts = Experts()
    kind: str | None = None
