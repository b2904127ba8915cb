"""Records the loss and the gradients of a step as a CUDA graph, so that the GPU does not wait for each operation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

_WARMUP = 3  # runs before the recording, in which libraries allocate and choose their algorithms


class RecordedStep:
    """A training step without the optimizer's part, recorded at the first batch.

    All batches must have the shape of the first one, and ``loss_fn`` must neither wait for the device nor branch on
    what it computes.

    Args:
        model: The model, whose parameters get gradients.
        loss_fn: Returns the loss of a batch.
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
