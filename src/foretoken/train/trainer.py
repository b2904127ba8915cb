"""The training loop of all models: optimizers (Muon among them), compiled steps, schedule, progress, checkpoints."""

import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.core.errors import TrainingError, reason_of
from foretoken.core.files import atomic_file
from foretoken.core.progress import Reporter, interruptible
from foretoken.train import processes
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
    tables = ("embed", "lm_head", "shared.weight", "relative_attention_bias", "markov_w")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            matrix = (parameter.ndim == 2 and not any(table in name for table in tables)) or ".experts." in name
            groups.setdefault((matrix, scale(name)), []).append(parameter)
    rate, decay, made = config.learning_rate, config.weight_decay, list[torch.optim.Optimizer]()
    for matrices in (False, True):
        own = [{"params": listed, "scale": s} for (kind, s), listed in groups.items() if kind == matrices]
        if own and matrices:
            made.append(StackedMuon(own, lr=rate, weight_decay=decay))
        elif own:
            made.append(torch.optim.AdamW(own, lr=rate, weight_decay=0.0, betas=(0.9, 0.95), fused=True))
    return made


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


LossFn = Callable[[Any], torch.Tensor]
Score = Callable[[dict[str, float]], float]
"""Returns the score of an evaluation, higher for better ones."""


class Trainer:
    """Trains a model in place. Under torchrun every process has its own batches, and all take the same steps."""

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,  # length of the run, learning rate and batches
        checkpoint: Path,  # file from which ``resume`` continues
        score: Score | None = None,  # compares evaluations; ``config.patience`` needs it
        # returns the factor of the learning rate of a parameter, by its name; 1 by default
        scale: Callable[[str], float] = lambda name: 1.0,
        # returns the figures of an evaluation that the progress shows until the next one
        headline: Callable[[dict[str, float]], str] = lambda row: "",
        dynamic: bool | None = None,  # as in torch.compile, for a compiled loss
    ) -> None:
        self.model, self.config, self.checkpoint = model, config, checkpoint
        self.step, self.elapsed, self._finished = 0, 0.0, False
        self.history: list[dict[str, float]] = []
        self.optimizers = optimizers(model, config, scale)
        self._score, self._headline, self._dynamic = score, headline, dynamic
        self._best: dict[str, Any] = {"score": -math.inf, "waited": 0, "row": {}, "weights": {}}

    def resume(self) -> bool:
        """Loads the checkpoint, and returns whether there is one. Raises TrainingError if it cannot be used."""
        if not self.checkpoint.exists():
            return False
        try:
            state = torch.load(self.checkpoint, weights_only=True)
            self.model.load_state_dict(state["model"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.step, self.elapsed, self.history = state["step"], state["elapsed"], state["history"]
            self._best, self._finished = state["best"], state["finished"]
        except Exception as error:
            raise TrainingError(
                f"the checkpoint {self.checkpoint} is damaged or was written with other settings ({reason_of(error)}); "
                "run with the settings it was started with, or pass --force to start again"
            ) from error
        return True

    def save_checkpoint(self) -> None:
        """Writes the checkpoint, whole or not at all. Raises TrainingError if it cannot be written."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "step": self.step,
            "elapsed": self.elapsed,
            "history": self.history,
            "best": self._best,
            "finished": self._finished,
        }
        if processes.rank() > 0:
            return
        try:
            self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(self.checkpoint) as partial:
                torch.save(state, partial)
        except (OSError, RuntimeError) as error:  # torch's zip writer raises RuntimeError on a full disk
            reason = str(error) if isinstance(error, OSError) else "the disk is full or refuses to write"
            raise TrainingError(
                f"cannot write the checkpoint {self.checkpoint}: {reason}; free some space and run again "
                "with --resume (an earlier checkpoint is untouched)"
            ) from error

    def progress(self) -> float:
        if self.config.minutes is not None:
            return min(1.0, self.elapsed / (self.config.minutes * 60))
        return min(1.0, self.step / self.config.steps)

    def shorten(self, seconds: float) -> None:
        """Subtracts the time spent before training from the run's minutes, equally in all processes."""
        minutes = self.config.minutes
        if minutes is not None:
            spent = processes.largest(seconds, False)[0] / 60
            self.config = replace(self.config, minutes=max(minutes - spent, minutes / 10))

    def rate_factor(self, progress: float) -> float:
        """Returns the factor of the learning rate: warm-up, plateau, linear decay to zero (WSD)."""
        c = self.config
        return max(0.0, min(1.0, (progress + 1e-3) / c.warmup, (1.0 - progress) / c.decay))

    def run(self, batches: Iterator[Any], loss_fn: LossFn, evaluate: Callable[[], dict[str, float]]) -> None:
        """Trains to the end of the schedule, evaluates, and writes a checkpoint.

        Ctrl-C finishes the current step, writes a checkpoint and raises KeyboardInterrupt; a second one stops at once.
        A run that is resumed with a length which it has already reached ends with the weights of its best evaluation.

        Batches are token ids [B, T], or tuples that begin with them. ``evaluate`` returns figures by name.
        """
        shortened = self.progress() >= 1.0 and not self._finished
        notice = "stopping after this step (press again to stop at once)"
        with Reporter("training", shown=processes.rank() == 0) as report, interruptible(notice) as interrupted:
            try:
                self._train(batches, self._backward(loss_fn), evaluate, report, interrupted)
                if not self.history or self.history[-1]["step"] != self.step:
                    self._record(evaluate, report)
                if shortened or self._stalled():
                    self._restore_best(report)
            except KeyboardInterrupt:
                self.model.train()
                self.save_checkpoint()
                report.line(
                    f"stopped at step {self.step}: the same command with --resume continues; with --resume, and with "
                    f"--steps {self.step} as its length, it writes the best weights so far"
                )
                raise
            self._finished = True
            self.save_checkpoint()

    def _train(
        self,
        batches: Iterator[Any],
        backward: LossFn,
        evaluate: Callable[[], dict[str, float]],
        report: Reporter,
        interrupted: Callable[[], bool],
    ) -> None:
        """Takes steps until the schedule, the patience or Ctrl-C ends the run."""
        next_evaluation, stop = self.elapsed + self.config.evaluate_every_seconds, interrupted()
        while self.progress() < 1.0 and not self._stalled():
            if stop:
                raise KeyboardInterrupt
            started = time.monotonic()
            batch = next(batches)
            loss = self._update(batch, backward)
            spent = time.monotonic() - started
            self.elapsed, stop = processes.largest(self.elapsed + spent, interrupted())
            self.step += 1
            speed = (batch if isinstance(batch, torch.Tensor) else batch[0]).numel() / spent
            status = f"step {self.step}  loss {loss:.3f}  {speed:,.0f} tok/s"
            if self.history:
                status += f"  {self._headline(self.history[-1])}"
            report.update(self.progress(), status.rstrip())
            if self.elapsed >= next_evaluation and self.progress() < 1.0:
                self._record(evaluate, report)
                self.save_checkpoint()
                next_evaluation = self.elapsed + self.config.evaluate_every_seconds

    def _backward(self, loss_fn: LossFn) -> LossFn:
        """Returns a function that sets the gradients of a batch and returns its loss."""
        if self.config.recorded:
            return CudaGraphStep(self.model, loss_fn)
        faster = compiled(loss_fn, self.config.compile, self._dynamic)

        def backward(batch: Any) -> torch.Tensor:
            loss = faster(batch)
            loss.backward()
            return loss

        return backward

    def _update(self, batch: Any, backward: LossFn) -> float:
        factor = self.rate_factor(self.progress())
        loss = backward(batch)
        processes.average_gradients(self.model)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        value = loss.item()
        if not math.isfinite(value):
            raise TrainingError(f"the loss became {value} at step {self.step}; lower --learning-rate")
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.config.learning_rate * factor * group["scale"]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return value

    def _record(self, evaluate: Callable[[], dict[str, float]], report: Reporter) -> None:
        self.model.eval()
        with torch.no_grad():
            row = {"step": self.step, "minutes": round(self.elapsed / 60, 2), **evaluate()}
        self.model.train()
        self.history.append(row)
        report.line("  ".join(f"{k} {v:.4g}" for k, v in row.items()))
        if self._score is not None:
            self._best["waited"] += 1
            if (value := self._score(row)) > self._best["score"]:
                weights = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
                self._best = {"score": value, "waited": 0, "row": row, "weights": weights}

    def _stalled(self) -> bool:
        return self.config.patience is not None and self._best["waited"] >= self.config.patience

    def _restore_best(self, report: Reporter) -> None:
        """After an early end, restores the weights of the best evaluation, and appends it to the history."""
        best = self._best
        if best["weights"] and best["row"] != self.history[-1]:
            self.model.load_state_dict(best["weights"])
            self.history.append(best["row"])
            report.line(f"stopped early: nothing better since step {best['row']['step']:.0f}")
