"""Training data of heads: text of the target, its hidden states there, and through them its distribution."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.core.errors import InvalidRequest, ModelLoadError, TrainingError, reason_of
from foretoken.core.files import atomic_file
from foretoken.train import processes
from foretoken.train.optimization import compiled
from foretoken.train.progress import Reporter, quiet_transformers

EVALUATED = 4  # heads that draft a block evaluate one row of so many
_BATCH = 8  # windows per forward pass of the target


class Teacher:
    """A frozen target in transformers: hidden states by layer, embeddings, vocabulary head.

    Raises:
        ModelLoadError: The checkpoint cannot be loaded.
        InvalidRequest: The logits are not the vocabulary head's product with the last normed hidden state, up to a soft
            cap.
    """

    def __init__(self, path: Path, device: torch.device, compile_model: bool | None = False) -> None:
        from transformers import AutoModelForCausalLM

        try:
            with quiet_transformers():
                self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, use_safetensors=True)
        except Exception as error:  # transformers raises many kinds
            raise ModelLoadError(f"cannot load {path}: {reason_of(error)}; pass the folder of a checkpoint") from error
        self.model.to(device).eval().requires_grad_(False)
        self.path, self.device = path, device
        self.config: Any = self.model.config.get_text_config()
        self.hidden, self.layers = int(self.config.hidden_size), int(self.config.num_hidden_layers)
        self.vocab = int(self.head.shape[0])
        self.softcap: float = getattr(self.config, "final_logit_softcapping", None) or 0.0
        self._base: Callable[..., Any] = self.model.base_model
        self._check()
        self._base = compiled(self.model.base_model, compile_model)

    def adopt(self, model: Any) -> None:
        """Replaces the model by another of the same shape."""
        self.model, self._base = model, model.base_model

    @property
    def embeddings(self) -> Tensor:
        """Input embeddings, [V, H]."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def head(self) -> Tensor:
        """Vocabulary head, [V, H]."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    def layer(self, number: int) -> nn.Module | None:
        """Returns a decoder layer, -1 the last; None where the model has no such layer."""
        layers = getattr(self.model.base_model, "layers", None)
        return layers[number] if layers is not None and -len(layers) <= number < len(layers) else None

    def final_norm(self) -> Tensor | None:
        """Returns the weight of the norm before the vocabulary head, None where the model has no ``norm``."""
        return getattr(getattr(self.model.base_model, "norm", None), "weight", None)

    @torch.no_grad()
    def states(self, ids: Tensor, layers: Sequence[int]) -> Tensor:
        """Returns hidden states [B, T, layers, H] of ids [B, T].

        Index i of ``layers`` is the input of layer i. The last one is the output after the norm.
        """
        output = self._base(ids.to(self.device), use_cache=False, output_hidden_states=True)
        return torch.stack([output.hidden_states[layer] for layer in layers], dim=2)

    def _check(self) -> None:
        ids = torch.arange(min(8, self.vocab), device=self.device)[None]
        with torch.no_grad():
            expected = self.model(ids, use_cache=False).logits.float()
            computed = capped(self.states(ids, [self.layers])[:, :, 0] @ self.head.T, self.softcap).float()
        if (expected - computed).abs().max() > 0.05 * expected.abs().max() + 1e-3:
            raise InvalidRequest(
                f"{self.path} scales or changes its logits in a way that heads here do not follow; "
                "train heads for a model of the Llama family"
            )


def chosen_mask_token(given: int | None, teacher: Teacher, counts: Tensor) -> int:
    """Returns the mask token of a head: ``given``, or the target's rarest token by ``counts`` [V]."""
    token = int((counts == counts.min()).nonzero()[-1]) if given is None else given
    if token >= teacher.vocab:
        raise InvalidRequest(f"mask_token {token} for a vocabulary of {teacher.vocab} tokens")
    return token


def capped(logits: Tensor, cap: float) -> Tensor:
    """Returns logits soft-capped as in Gemma 2. A cap of 0 means none."""
    return cap * torch.tanh(logits / cap) if cap else logits


@dataclass(frozen=True)
class Lesson:
    """One batch.

    Args:
        ids: Token ids, int64 [B, T].
        states: Hidden states, [B, T, len(layers), H] in the order of ``layers``, the normed output last.
        layers: Indices of the hidden states.
        embeddings: The target's, [V, H].
        head: The target's vocabulary head, [V, H].
        softcap: Soft cap of its logits.
    """

    ids: Tensor
    states: Tensor
    layers: tuple[int, ...]
    embeddings: Tensor
    head: Tensor
    softcap: float = 0.0

    def tapped(self, taps: Sequence[int]) -> Tensor:
        """Returns the concatenated hidden states of ``taps``, [B, T, len(taps) * H]."""
        return torch.cat([self.states[:, :, self.layers.index(tap)] for tap in taps], dim=-1)

    def last(self) -> Tensor:
        """Returns the normed output, [B, T, H]."""
        return self.states[:, :, -1]

    def embedded(self) -> Tensor:
        """Returns the embeddings of the tokens, [B, T, H]."""
        return F.embedding(self.ids, self.embeddings)

    def read(self, hidden: Tensor) -> Tensor:
        """Returns logits [..., V] of the target's vocabulary head for ``hidden`` [..., H]."""
        return capped(F.linear(hidden, self.head.to(hidden.dtype)), self.softcap)

    def law(self) -> Tensor:
        """Returns the target's distribution after each token, float32 [B, T, V], without gradient."""
        with torch.no_grad():
            return self.read(self.last()).float().softmax(-1)


class RmsNorm(nn.RMSNorm):
    """RMS norm that computes in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class Drafted(NamedTuple):
    """Output of a head in training.

    Attributes:
        logits: See ``Head.forward``.
        confidence: Logits [B, R] of the estimated acceptance at every depth, None for a head without such estimates.
        roots: At every depth the rows [R] of a window whose chains were computed, None for all.
    """

    logits: list[Tensor]
    confidence: list[Tensor] | None = None
    roots: list[Tensor] | None = None


class Head(nn.Module, ABC):
    """A head that drafts from the target's hidden states.

    Attributes:
        depths: Number of consecutive tokens that it drafts.
        taps: Layers whose inputs it reads besides the normed output.
        vocabulary: The target's token id of each of its logits, None if they are the target's own.
        drawn: Whether its tokens are sampled, each given those before, instead of ranked independently.
    """

    depths: int
    taps: tuple[int, ...] = ()
    vocabulary: Tensor | None = None
    drawn = False

    @abstractmethod
    def forward(self, lesson: Lesson) -> list[Tensor]:
        """Returns logits [B, T - depths, Vd] for every depth: index i of depth j is for token i + 2 + j.

        A head that computes some rows alone (``Drafted.roots``) returns [B, R, Vd]; in evaluation they are the same at
        all depths, ascending. In training, later depths may be left out.
        """

    def drafted(self, lesson: Lesson) -> Drafted:
        """Returns what is trained: by default the logits alone."""
        return Drafted(self(lesson))

    def begin(self, progress: float, step: int, length: int) -> None:
        """Called before each training step.

        Args:
            progress: Finished share of the run.
            step: Number of the step.
            length: Tokens per window.
        """

    @abstractmethod
    def describe(self, teacher: Teacher) -> dict[str, Any]:
        """Returns the content of config.json."""

    def start(self, tensors: Mapping[str, Tensor]) -> None:
        """Loads the checkpoint of an earlier head. Raises RuntimeError or KeyError if it does not fit."""
        self.load_state_dict({name: value.float() for name, value in tensors.items()})

    def tensors(self, teacher: Teacher) -> dict[str, Tensor]:
        """Returns the checkpoint."""
        return self.weights()

    def weights(self) -> dict[str, Tensor]:
        """Returns the state_dict in bfloat16."""
        return {name: value.detach().cpu().bfloat16().contiguous() for name, value in self.state_dict().items()}


class Lessons:
    """Windows of text and the target's hidden states there, on disk within ``budget`` bytes.

    Each file holds one layer, so that heads with common layers can share a folder. Hidden states that do not fit are
    recomputed each time. Raises TrainingError if files cannot be written.
    """

    def __init__(
        self, teacher: Teacher, windows: Tensor, taps: Sequence[int], folder: Path, budget: float, title: str
    ) -> None:
        self.teacher, self.windows, self.folder = teacher, windows, folder
        self.layers = tuple(sorted({*taps, teacher.layers}))
        row_bytes = 2 * windows.shape[1] * teacher.hidden
        self.kept = min(len(windows), int(budget / (row_bytes * len(self.layers))))
        shape = (self.kept, windows.shape[1], teacher.hidden)
        self._states: list[np.ndarray] = []
        if self.kept:
            files = [folder / f"{title}-{layer}.bin" for layer in self.layers]
            self._compute([f for f in files if not f.exists() or f.stat().st_size < self.kept * row_bytes], title)
            self._states = [np.memmap(file, np.int16, "r", shape=shape) for file in files]

    def __len__(self) -> int:
        return len(self.windows)

    def with_teacher(self, teacher: Teacher) -> Lessons:
        """Returns the same windows with another target's hidden states, none of them on disk."""
        return Lessons(teacher, self.windows, self.layers[:-1], self.folder, 0, "")

    def lesson(self, rows: Sequence[int]) -> Lesson:
        """Returns the windows ``rows`` and their hidden states, on the target's device."""
        kept, other = [r for r in rows if r < self.kept], [r for r in rows if r >= self.kept]
        parts = []
        if kept:
            layers = [torch.from_numpy(states[kept]).view(torch.bfloat16) for states in self._states]
            parts.append(torch.stack(layers, dim=2).to(self.teacher.device))
        if other:
            parts.append(self.teacher.states(self.windows[other], self.layers).bfloat16())
        return self.of(self.windows[kept + other].to(self.teacher.device), torch.cat(parts))

    def of(self, ids: Tensor, states: Tensor) -> Lesson:
        """Returns a lesson of this target."""
        t = self.teacher
        return Lesson(ids, states, self.layers, t.embeddings, t.head, t.softcap)

    def batches(self, batch: int, seed: int, start: int) -> Iterator[Lesson]:
        """Yields endless lessons, reshuffled each epoch. Batch i of a process depends on (seed, i, rank) alone."""
        rank, world = processes.rank(), processes.world()
        batch = min(batch, max(1, len(self) // world))
        per_epoch = max(1, len(self) // (batch * world))
        step = start
        while True:
            epoch, at = divmod(step, per_epoch)
            order = np.random.default_rng([seed, 3, epoch]).permutation(len(self))
            first = (at * world + rank) * batch % len(self)
            yield self.lesson(sorted(order[first : first + batch].tolist()))
            step += 1

    def in_order(self) -> Iterator[Lesson]:
        """Yields all lessons once."""
        for first in range(0, len(self), _BATCH):
            yield self.lesson(range(first, min(first + _BATCH, len(self))))

    def _compute(self, missing: list[Path], title: str) -> None:
        """Computes missing files, all from one pass. One process writes, the others wait."""
        try:
            if missing and processes.rank() == 0:
                self._write(missing, title)
        except OSError as error:
            raise TrainingError(
                f"cannot keep hidden states in {self.folder}: {error}; free some space or lower --disk-gigabytes"
            ) from error
        processes.wait()

    def _write(self, files: list[Path], title: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        layers = [int(file.stem.rpartition("-")[2]) for file in files]
        with Reporter(f"hidden states, {title}") as report, ExitStack() as stack:
            partials = [stack.enter_context(atomic_file(file)) for file in files]
            outs = [stack.enter_context(partial.open("wb")) for partial in partials]
            for first in range(0, self.kept, _BATCH):
                ids = self.windows[first : min(first + _BATCH, self.kept)]
                states = self.teacher.states(ids, layers).bfloat16().cpu()
                for i, out in enumerate(outs):
                    out.write(states[:, :, i].contiguous().view(torch.int16).numpy().tobytes())
                report.update(first / self.kept)
