"""A mixture of experts on torch tensors."""

import torch
from torch import Tensor

from foretoken.models.families.architecture import Architecture
from foretoken.models.families.experts import Experts
from foretoken.models.runners.functional import activate, clamped_gate, normalize
from foretoken.models.runners.torch_layers import TorchExperts
from foretoken.models.runners.triton_kernels import expert_kernels


def mix_experts(
    a: Architecture,
    w: TorchExperts,
    x: Tensor,
    any_kernel: bool = False,
    hidden: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """Returns the weighted sum of each row's experts, from the best to the last, and of the shared one, [R, H].

    Rows are grouped by expert. An expert's output for a row, and the order in which a row adds up its experts, do not
    depend on other rows.

    Args:
        x: input of the experts [R, H].
        any_kernel: see ``Product``.
        hidden: the residual stream [R, H], for a router with a separate norm; None if it reads ``x``.
        counts: 0 for padding [R], if kernels compute the rows; see ``triton_kernels.rows.PassRows``.
    """
    routed = x.float() if hidden is None else normalize(a, hidden.float(), w.router_norm)
    chosen, weights = choose(w.experts, w.router(routed, any_kernel), w.correction)
    if w.expert_scales is not None:
        weights = weights * w.expert_scales[chosen]
    if counts is not None and by_kernels(w):
        total = _by_kernels(a, w, x, chosen, weights, counts)
    else:
        total = _by_products(a, w, x, chosen, weights, any_kernel)
    if w.shared_up is not None and w.shared_down is not None:
        inner = activate(a, w.shared_up(x, any_kernel), w.experts.gated)
        shared = w.shared_down(inner, any_kernel).float()
        if w.shared_gate is not None:
            shared = shared * (x.float() * w.shared_gate).sum(-1, keepdim=True).sigmoid()
        total += shared
    return total.to(x.dtype)


def by_kernels(w: TorchExperts) -> bool:
    """Returns whether kernels can compute the experts, without copies to the host."""
    return w.up.kernels is not None and w.down.kernels is not None


def _by_kernels(a: Architecture, w: TorchExperts, x: Tensor, chosen: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Returns the weighted sums of the experts, float32 [R, H]."""
    up, down = w.up.kernels, w.down.kernels
    if w.experts.scaled_inputs:
        x, weights = x[:, None] * weights[..., None].to(x.dtype), torch.ones_like(weights)
    routes = expert_kernels().Routes.of(chosen, counts, len(up.weights))
    inner = _activate(a, w.experts, up(x, routes).flatten(0, 1))
    outputs = down(inner.view(*chosen.shape, -1), routes)
    total: Tensor = expert_kernels().combine(outputs, weights)
    return total


def _by_products(
    a: Architecture, w: TorchExperts, x: Tensor, chosen: Tensor, weights: Tensor, any_kernel: bool
) -> Tensor:
    """Returns the weighted sums of the experts, float32 [R, H], from a product for each expert."""
    outputs = x.new_empty(*chosen.shape, x.shape[1])
    for expert in chosen.unique().tolist():
        rows, ranks = (chosen == expert).nonzero(as_tuple=True)
        padded_rows = rows if len(rows) > 1 else rows.repeat(2)  # a single row may take another kernel
        inputs = x[padded_rows]
        if w.experts.scaled_inputs:
            inputs = inputs * weights[padded_rows, ranks if len(rows) > 1 else ranks.repeat(2), None].to(x.dtype)
        inner = _activate(a, w.experts, w.up[expert](inputs, any_kernel))
        outputs[rows, ranks] = w.down[expert](inner, any_kernel)[: len(rows)]
    if w.experts.scaled_inputs:
        weights = torch.ones_like(weights)
    total = outputs[:, 0].float() * weights[:, :1]
    for rank in range(1, chosen.shape[1]):
        total += outputs[:, rank].float() * weights[:, rank : rank + 1]
    return total


def _activate(a: Architecture, e: Experts, x: Tensor) -> Tensor:
    return clamped_gate(x, e.clamp, e.slope) if e.clamp else activate(a, x, e.gated)


def choose(e: Experts, logits: Tensor, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """Chooses the experts of each row.

    Args:
        logits: the router's logits, float32 [R, experts].
        correction: float32 [experts], or None.

    Returns:
        Indices of experts [R, chosen], the best first, and their weights, float32 [R, chosen].
    """
    scores = logits.softmax(-1) if e.scoring == "softmax" else logits.sigmoid()
    ranked = logits if correction is None else scores + correction
    if e.groups > 1:
        groups = ranked.unflatten(-1, (e.groups, -1))
        best = groups.topk(min(2, groups.shape[-1]) if e.best_two else 1).values.sum(-1)
        best_groups = _largest(best, e.chosen_groups)
        outside = torch.ones_like(best, dtype=torch.bool).scatter_(-1, best_groups, False)
        ranked = groups.masked_fill(outside[..., None], -torch.inf).flatten(-2)
    chosen = _largest(ranked, e.chosen)
    weights = scores.gather(-1, chosen)
    if e.normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + e.divisor_eps)
    return chosen, weights * e.scale


def _largest(numbers: Tensor, count: int) -> Tensor:
    """Returns the indices of the largest values of each row in order, the lowest index first on ties."""
    return numbers.sort(dim=-1, descending=True, stable=True).indices[..., :count]
