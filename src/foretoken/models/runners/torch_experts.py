"""A mixture of experts on torch tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foretoken.models.families.architecture import Architecture
from foretoken.models.families.experts import Experts
from foretoken.models.formats.experts import ExpertWeights, MatrixStack
from foretoken.models.formats.quantize import stacked
from foretoken.models.formats.weights import NormWeight
from foretoken.models.runners.functional import activate, clamped_gate, normalize
from foretoken.models.runners.linear import Product, moved, product
from foretoken.models.runners.triton_kernels import expert_kernels, has_kernels


@dataclass(frozen=True, slots=True, eq=False)
class TorchExperts:
    """The experts of a layer on the device, with packed matrices.

    Rows are grouped by expert. An expert's output for a row, and the order in which a row adds up its experts, do not
    depend on other rows.
    """

    experts: Experts
    router: Product
    correction: Tensor | None
    up: tuple[Product, ...]
    down: tuple[Product, ...]
    shared_up: Product | None
    shared_down: Product | None
    shared_gate: Tensor | None
    router_norm: NormWeight | None
    expert_scales: Tensor | None
    stacks: tuple[Any, Any] | None  # ``triton_kernels.experts.ExpertStack`` of up and down, if kernels compute them

    @staticmethod
    def of(device: torch.device, w: ExpertWeights) -> TorchExperts:
        stacks = _stacks(w, device)
        up, down = (_products(w.up, device), _products(w.down, device)) if stacks is None else map(_views, stacks)
        return TorchExperts(
            experts=w.experts,
            router=product(w.router.float().to(device), moved(w.router_bias, device)),
            correction=moved(w.correction, device),
            up=up,
            down=down,
            shared_up=product(stacked(w.shared_up).to(device), moved(w.shared_up_bias, device))
            if w.shared_up
            else None,
            shared_down=None
            if w.shared_down is None
            else product(w.shared_down.to(device), moved(w.shared_down_bias, device)),
            shared_gate=moved(w.shared_gate, device),
            router_norm=None if w.router_norm is None else NormWeight(w.router_norm.to(device)),
            expert_scales=moved(w.expert_scales, device),
            stacks=stacks,
        )

    def __call__(
        self,
        a: Architecture,
        x: Tensor,
        any_kernel: bool = False,
        hidden: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> Tensor:
        """Returns the weighted sum of each row's experts, from the best to the last, and of the shared one, [R, H].

        Args:
            x: input of the experts [R, H].
            any_kernel: see ``Product``.
            hidden: the residual stream [R, H], for a router with a separate norm; None if it reads ``x``.
            counts: 0 for padding [R], if kernels compute the rows; see ``triton_kernels.rows.PassRows``.
        """
        routed = x.float() if hidden is None else normalize(a, hidden.float(), self.router_norm)
        chosen, weights = choose(self.experts, self.router(routed, any_kernel), self.correction)
        if self.expert_scales is not None:
            weights = weights * self.expert_scales[chosen]
        if counts is not None and self.stacks is not None:
            total = self._by_kernels(a, x, chosen, weights, counts)
        else:
            total = self._by_products(a, x, chosen, weights, any_kernel)
        if self.shared_up is not None and self.shared_down is not None:
            inner = activate(a, self.shared_up(x, any_kernel), self.experts.gated)
            shared = self.shared_down(inner, any_kernel).float()
            if self.shared_gate is not None:
                shared = shared * (x.float() * self.shared_gate).sum(-1, keepdim=True).sigmoid()
            total += shared
        return total.to(x.dtype)

    def _by_kernels(self, a: Architecture, x: Tensor, chosen: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """Returns the weighted sums of the experts, float32 [R, H]. It copies nothing to the host."""
        assert self.stacks is not None
        up, down = self.stacks
        if self.experts.scaled_inputs:
            x, weights = x[:, None] * weights[..., None].to(x.dtype), torch.ones_like(weights)
        routes = expert_kernels().Routes.of(chosen, counts, len(up.weights))
        inner = self._activate(a, up(x, routes).flatten(0, 1))
        outputs = down(inner.view(*chosen.shape, -1), routes)
        total: Tensor = expert_kernels().combine(outputs, weights)
        return total

    def _by_products(self, a: Architecture, x: Tensor, chosen: Tensor, weights: Tensor, any_kernel: bool) -> Tensor:
        """Returns the weighted sums of the experts, float32 [R, H], from a product for each expert."""
        outputs = x.new_empty(*chosen.shape, x.shape[1])
        for expert in chosen.unique().tolist():
            rows, ranks = (chosen == expert).nonzero(as_tuple=True)
            padded_rows = rows if len(rows) > 1 else rows.repeat(2)  # a single row may take another kernel
            inputs = x[padded_rows]
            if self.experts.scaled_inputs:
                inputs = inputs * weights[padded_rows, ranks if len(rows) > 1 else ranks.repeat(2), None].to(x.dtype)
            inner = self._activate(a, self.up[expert](inputs, any_kernel))
            outputs[rows, ranks] = self.down[expert](inner, any_kernel)[: len(rows)]
        if self.experts.scaled_inputs:
            weights = torch.ones_like(weights)
        total = outputs[:, 0].float() * weights[:, :1]
        for rank in range(1, chosen.shape[1]):
            total += outputs[:, rank].float() * weights[:, rank : rank + 1]
        return total

    def _activate(self, a: Architecture, x: Tensor) -> Tensor:
        e = self.experts
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


def _stacks(w: ExpertWeights, device: torch.device) -> tuple[Any, Any] | None:
    """Returns the matrices of all experts as one tensor each if kernels take them: float weights on CUDA."""
    if not has_kernels(device):
        return None
    stacks = []
    for part in (w.up, w.down):
        read = [stacked(part.read(expert)) for expert in range(part.count)]
        matrices = [matrix for matrix in read if isinstance(matrix, Tensor)]
        if len(matrices) < len(read):
            return None
        biases = torch.cat(part.biases, dim=-1).to(device) if part.biases else None
        stacks.append(expert_kernels().ExpertStack(torch.stack([matrix.to(device) for matrix in matrices]), biases))
    return stacks[0], stacks[1]


def _views(stack: Any) -> tuple[Product, ...]:
    biases = [None] * len(stack.weights) if stack.biases is None else stack.biases
    return tuple(product(matrix, bias) for matrix, bias in zip(stack.weights, biases, strict=True))


def _products(stack: MatrixStack, device: torch.device) -> tuple[Product, ...]:
    def bias(expert: int) -> Tensor | None:
        return torch.cat([part[expert] for part in stack.biases]).to(device) if stack.biases else None

    return tuple(product(stacked(stack.read(expert)).to(device), bias(expert)) for expert in range(stack.count))
