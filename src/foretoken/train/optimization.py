"""Optimizers of training, Muon among them, and faster steps: compiled functions, recorded CUDA graphs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.train.config import TrainConfig

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the Newton-Schulz iteration, as torch.optim.Muon has them
_ITERATIONS = 5
_WARMUP = 3  # runs before a CUDA graph is recorded, in which libraries allocate and choose their algorithms


class StackedMuon(torch.optim.Optimizer):
    """torch.optim.Muon with ``adjust_lr_fn="match_rms_adamw"``, over all matrices of a shape at once.

    A parameter [..., m, n] is a stack of matrices, each of which is made orthogonal by itself: the experts of a layer,
    say. A step takes few large operations, where one by one a GPU would wait for the next. The weight decay is
    decoupled.
    """

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.1, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes a step."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes.setdefault(parameter.shape[-2:], []).append(parameter)
            for parameters in shapes.values():
                self._update(parameters, group)
        return None

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        momenta = [self.state[p]["momentum_buffer"] for p in parameters]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        ahead = torch._foreach_lerp(gradients, momenta, group["momentum"])
        m, n = parameters[0].shape[-2:]
        updates = orthogonal(torch.cat([u.reshape(-1, m, n) for u in ahead]))
        parts = updates.to(parameters[0].dtype).split([p.numel() // (m * n) for p in parameters])
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        turned = [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]
        torch._foreach_add_(parameters, turned, alpha=-group["lr"] * 0.2 * max(m, n) ** 0.5)


def orthogonal(x: Tensor) -> Tensor:
    """Returns matrices [N, m, n] with the singular vectors of ``x`` and singular values near 1, in bf16."""
    a, b, c = _COEFFICIENTS
    wide = x.bfloat16()
    tall = wide.shape[-2] > wide.shape[-1]
    wide = wide.mT if tall else wide
    wide = wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = wide @ wide.mT
        wide = torch.baddbmm(wide, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.mT if tall else wide


def optimizers(model: nn.Module, config: TrainConfig, scale: Callable[[str], float]) -> list[torch.optim.Optimizer]:
    """Returns Muon (orthogonalized momentum) for matrices and stacks of experts, and AdamW for all else."""
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            matrix = (parameter.ndim == 2 and _is_matrix(name)) or ".experts." in name
            groups.setdefault((matrix, scale(name)), []).append(parameter)
    rate, decay, made = config.learning_rate, config.weight_decay, list[torch.optim.Optimizer]()
    for matrices in (False, True):
        own = [{"params": listed, "scale": s} for (kind, s), listed in groups.items() if kind == matrices]
        if own and matrices:
            made.append(StackedMuon(own, lr=rate, weight_decay=decay))
        elif own:
            made.append(torch.optim.AdamW(own, lr=rate, weight_decay=0.0, betas=(0.9, 0.95), fused=True))
    return made


def _is_matrix(name: str) -> bool:
    return not any(
        table in name for table in ("embed", "lm_head", "shared.weight", "relative_attention_bias", "markov_w")
    )


def compiled(fn: Callable[..., Any], enabled: bool | None, dynamic: bool | None = None) -> Callable[..., Any]:
    """Returns ``fn`` compiled by torch.compile if ``enabled``; None compiles if there is a C++ compiler."""
    if enabled is None:
        enabled = shutil.which("g++") is not None
    return torch.compile(fn, dynamic=dynamic) if enabled else fn


class CudaGraphStep:
    """A training step without the optimizer's part, recorded at the first batch.

    All batches must have the shape of the first one, and ``loss_fn`` must neither wait for the device nor branch on
    computed values.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[[Tensor], Tensor]) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._loss_fn = loss_fn
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, batch: Tensor) -> Tensor:
        """Sets the gradients of a batch, and returns its loss."""
        if self._graph is None:
            self._graph = self._record(batch)
        self._batch.copy_(batch)
        self._graph.replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return self._loss

    def _record(self, batch: Tensor) -> torch.cuda.CUDAGraph:
        self._batch = batch.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARMUP):
                self._loss_fn(self._batch).backward()
                self._clear()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._loss = self._loss_fn(self._batch)
            self._loss.backward()
        self._loss = self._loss.detach()
        self._gradients = [p.grad for p in self._parameters]
        return graph

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
