"""Describes MLPs and experts for the kernels (csrc/specs.hpp)."""

from __future__ import annotations

from foretoken.models.families.experts import Scoring
from foretoken.models.formats.experts import ExpertWeights
from foretoken.models.formats.weights import DenseMlpWeights
from foretoken.models.runners.native.bindings import LANES, ExpertsSpec, Matrix, MlpSpec, NormSpec, RouterSpec
from foretoken.models.runners.native.held import HeldWeights, halves
from foretoken.models.runners.native.memory import padded

SCORINGS: dict[Scoring, int] = {"softmax": 0, "sigmoid": 1}  # as csrc/specs.hpp numbers them


def dense_mlp(held: HeldWeights, weights: DenseMlpWeights, gated: bool, inner: int) -> MlpSpec:
    """Packs an MLP of ``inner`` neurons."""
    up = halves(weights.up) if gated else weights.up
    return MlpSpec(
        up=held.matrix(up, weights.up_bias, interleave=gated),
        down=held.matrix([weights.down], weights.down_bias),
        inner=padded(inner, LANES),
        gated=gated,
    )


def expert_mlp(held: HeldWeights, weights: ExpertWeights) -> ExpertsSpec:
    """Packs experts and their router."""
    e = weights.experts
    shared: dict[str, Matrix] = {}
    if weights.shared_down is not None:
        up = halves(weights.shared_up) if e.gated else weights.shared_up
        shared["shared_up"] = held.matrix(up, weights.shared_up_bias, interleave=e.gated)
        shared["shared_down"] = held.matrix([weights.shared_down], weights.shared_down_bias)
    router = RouterSpec(
        weights=held.router(weights.router, weights.router_bias),
        correction=held.keep(weights.correction),
        experts=e.count,
        chosen=e.chosen,
        scoring=SCORINGS[e.scoring],
        normalized=e.normalized,
        groups=e.groups,
        chosen_groups=e.chosen_groups,
        group_score=e.best_two,
        scale=e.scale,
        divisor_eps=e.divisor_eps,
    )
    before = held.nbytes
    stacks = {"up": held.stack(weights.up), "down": held.stack(weights.down)}
    held.inactive += (held.nbytes - before) * (1 - e.chosen / e.count)
    return ExpertsSpec(
        router=router,
        shared_gate=held.keep(weights.shared_gate),
        router_norm=NormSpec(held.keep(weights.router_norm)),
        expert_scales=held.keep(weights.expert_scales),
        gated=e.gated,
        scaled_inputs=e.scaled_inputs,
        inner=padded(e.intermediate, LANES),
        shared_inner=padded(e.shared, LANES),
        limit=e.clamp,
        slope=e.slope,
        **stacks,
        **shared,
    )
