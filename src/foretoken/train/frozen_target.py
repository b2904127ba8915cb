"""A frozen target in transformers, and windows of text with its outputs: hidden states, or most likely next tokens."""

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.core.errors import InvalidRequest, ModelLoadError, TrainingError, reason_of
from foretoken.core.files import atomic_file, write_json
from foretoken.core.progress import Reporter
from foretoken.core.schema import read_object
from foretoken.models.formats.checkpoint import quiet_transformers
from foretoken.models.formats.shards import weights_sha256
from foretoken.train import processes
from foretoken.train.trainer import compiled


class FrozenTarget:
    """A frozen target: hidden states by layer, embeddings, vocabulary head.

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
            raise ModelLoadError(
                f"cannot load the target {path}: {reason_of(error)}; pass the folder of a checkpoint"
            ) from error
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
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def head(self) -> Tensor:
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    def layer(self, number: int) -> nn.Module | None:
        """Returns a decoder layer, -1 the last; None if the model has no such layer."""
        layers = getattr(self.model.base_model, "layers", None)
        return layers[number] if layers is not None and -len(layers) <= number < len(layers) else None

    def final_norm(self) -> Tensor | None:
        """Returns the weight of the norm before the vocabulary head, None if the model has no ``norm``."""
        return getattr(getattr(self.model.base_model, "norm", None), "weight", None)

    @torch.no_grad()
    def states(self, ids: Tensor, layers: Sequence[int]) -> Tensor:
        """Returns hidden states [B, T, layers, H] of ids [B, T].

        Index i of ``layers`` is the input of layer i. The last one is the output after the norm.
        """
        output = self._base(ids.to(self.device), use_cache=False, output_hidden_states=True)
        return torch.stack([output.hidden_states[layer] for layer in layers], dim=2)

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(ids.to(self.device), use_cache=False).logits
        return logits

    def batch(self, ids: Tensor, states: Tensor, layers: tuple[int, ...]) -> "TrainBatch":
        return TrainBatch(ids, states, layers, self.embeddings, self.head, self.softcap)

    def _check(self) -> None:
        ids = torch.arange(min(8, self.vocab), device=self.device)[None]
        expected = self.logits(ids).float()
        computed = self.batch(ids, self.states(ids, [self.layers]), (self.layers,)).target_logits().float()
        if (expected - computed).abs().max() > 0.05 * expected.abs().max() + 1e-3:
            raise InvalidRequest(
                f"{self.path} scales or changes its logits in a way that heads here do not follow; "
                "train heads for a model of the Llama family"
            )


@dataclass(frozen=True)
class TrainBatch:
    """Windows of text and the target's hidden states there."""

    ids: Tensor  # token ids, int64 [B, T]
    states: Tensor  # hidden states, [B, T, len(layers), H] in the order of ``layers``, the normed output last
    layers: tuple[int, ...]  # indices of the hidden states
    embeddings: Tensor  # the target's, [V, H]
    head: Tensor  # the target's vocabulary head, [V, H]
    softcap: float = 0.0  # soft cap of its logits as in Gemma 2, 0 for none

    def tapped(self, taps: Sequence[int]) -> Tensor:
        """Returns the concatenated hidden states of ``taps``, [B, T, len(taps) * H]."""
        return torch.cat([self.states[:, :, self.layers.index(tap)] for tap in taps], dim=-1)

    def last(self) -> Tensor:
        """Returns the normed output, [B, T, H]."""
        return self.states[:, :, -1]

    def embedded(self) -> Tensor:
        return F.embedding(self.ids, self.embeddings)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits [..., V] of the target's vocabulary head for ``hidden`` [..., H]."""
        logits = F.linear(hidden, self.head.to(hidden.dtype))
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits

    def target_logits(self) -> Tensor:
        return self.logits(self.last())

    @torch.no_grad()
    def target_probs(self) -> Tensor:
        """Returns the target's distribution after each token, float32 [B, T, V]."""
        return self.target_logits().float().softmax(-1)


_BATCH = 8  # windows per forward pass of the target


def fixed_windows(stream: Tensor, length: int, seed: int) -> Tensor:
    """Returns the stream cut into windows [N, length], shuffled so that any prefix is a fair sample."""
    rows = stream[: len(stream) // length * length].view(-1, length)
    return rows[torch.from_numpy(np.random.default_rng([seed, 1]).permutation(len(rows)))]


def shuffled(count: int, batch: int, seed: int, start: int = 0) -> Iterator[np.ndarray]:
    """Yields ascending indices of endless batches of ``count`` windows, reshuffled each epoch.

    Batch i of a process depends on (seed, i, rank) alone. ``start`` is the number of the first batch.
    """
    rank, world = processes.rank(), processes.world()
    batch = min(batch, max(1, count // world))
    per_epoch = max(1, count // (batch * world))
    step = start
    while True:
        epoch, at = divmod(step, per_epoch)
        order = np.random.default_rng([seed, 3, epoch]).permutation(count)
        first = (at * world + rank) * batch % count
        yield np.sort(order[first : first + batch])
        step += 1


class HiddenStateDataset:
    """Windows of text and the target's hidden states there, on disk within ``budget`` bytes.

    Each file holds one layer, so that heads with common layers can share a folder. Hidden states that do not fit are
    recomputed each time. Raises TrainingError if files cannot be written.
    """

    def __init__(
        self, target: FrozenTarget, windows: Tensor, taps: Sequence[int], folder: Path, budget: float, title: str
    ) -> None:
        self.target, self.windows, self.folder = target, windows, folder
        self.layers = tuple(sorted({*taps, target.layers}))
        row_bytes = 2 * windows.shape[1] * target.hidden
        self.stored = min(len(windows), int(budget / (row_bytes * len(self.layers))))
        shape = (self.stored, windows.shape[1], target.hidden)
        self._states: list[np.ndarray] = []
        if self.stored:
            files = [folder / f"{title}-{layer}.bin" for layer in self.layers]
            self._compute([f for f in files if not f.exists() or f.stat().st_size < self.stored * row_bytes], title)
            self._states = [np.memmap(file, np.int16, "r", shape=shape) for file in files]

    def __len__(self) -> int:
        return len(self.windows)

    def with_target(self, target: FrozenTarget) -> "HiddenStateDataset":
        """Returns the same windows with another target's hidden states, none of them on disk."""
        return HiddenStateDataset(target, self.windows, self.layers[:-1], self.folder, 0, "")

    def batch(self, rows: Sequence[int]) -> TrainBatch:
        """Returns the windows ``rows`` and their hidden states, on the target's device."""
        stored, other = [r for r in rows if r < self.stored], [r for r in rows if r >= self.stored]
        chunks = []
        if stored:
            layers = [torch.from_numpy(states[stored]).view(torch.bfloat16) for states in self._states]
            chunks.append(torch.stack(layers, dim=2).to(self.target.device))
        if other:
            chunks.append(self.target.states(self.windows[other], self.layers).bfloat16())
        ids = self.windows[stored + other].to(self.target.device)
        return self.target.batch(ids, torch.cat(chunks), self.layers)

    def batches(self, batch: int, seed: int, start: int) -> Iterator[TrainBatch]:
        for rows in shuffled(len(self), batch, seed, start):
            yield self.batch(rows.tolist())

    def in_order(self) -> Iterator[TrainBatch]:
        """Yields all windows once."""
        for first in range(0, len(self), _BATCH):
            yield self.batch(range(first, min(first + _BATCH, len(self))))

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
            for first in range(0, self.stored, _BATCH):
                ids = self.windows[first : min(first + _BATCH, self.stored)]
                states = self.target.states(ids, layers).bfloat16().cpu()
                for i, out in enumerate(outs):
                    out.write(states[:, :, i].contiguous().view(torch.int16).numpy().tobytes())
                report.update(first / self.stored)


class TopTokens:
    """Windows of text and the target's most likely next tokens there, computed once and kept on disk.

    The target is on the CPU. Files in ``folder`` are reused if they are those of the same target and windows [N, T].
    Computing ends after ``limit_seconds`` with the windows done so far. Raises TrainingError if the files cannot be
    written. None are left then.

    Attributes:
        ids: Token ids of the windows that were done.
        seconds: Duration of the computation.
    """

    def __init__(
        self,
        target: FrozenTarget,
        windows: Tensor,
        folder: Path,
        top: int = 64,
        limit_seconds: float | None = None,
        compile_model: bool | None = None,
    ) -> None:
        top = min(top, target.vocab)
        self._id_type = np.int16 if target.vocab <= 2**15 else np.int32
        key, meta = _fingerprint(target, windows, top), folder / "meta.json"
        if not (meta.exists() and read_object(meta).get("key") == key):
            try:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                rows, seconds = self._compute(target, windows, folder, top, limit_seconds, compile_model)
                write_json(meta, {"key": key, "rows": rows, "seconds": seconds})
            except BaseException as error:
                shutil.rmtree(folder, ignore_errors=True)
                if not isinstance(error, OSError):
                    raise
                raise TrainingError(
                    f"cannot keep the target's distributions in {folder}: {error}; free some space"
                ) from error
        done = read_object(meta)
        shape = (done["rows"], windows.shape[1], top)
        self.ids, self.seconds = windows[: done["rows"]], float(done["seconds"])
        self._tokens = np.memmap(folder / "ids.bin", self._id_type, "r", shape=shape)
        self._log_probs = np.memmap(folder / "logp.bin", np.float16, "r", shape=shape)

    def at(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Returns token ids, int64, and natural log-probabilities, float32, of windows, [B, T, top] each."""
        tokens, log_probs = self._tokens[rows].astype(np.int64), self._log_probs[rows].astype(np.float32)
        return torch.from_numpy(tokens), torch.from_numpy(log_probs)

    def _compute(
        self,
        target: FrozenTarget,
        windows: Tensor,
        folder: Path,
        top: int,
        limit: float | None,
        compile_model: bool | None,
    ) -> tuple[int, float]:
        """Writes both files. Returns the number of windows that were done, and the seconds it took."""

        def most_likely(ids: Tensor) -> tuple[Tensor, Tensor]:
            logits = target.logits(ids)
            values, tokens = logits.topk(top, dim=-1, sorted=False)
            return tokens, values.float() - logits.float().logsumexp(-1, keepdim=True)

        compute, batch = compiled(most_likely, compile_model), min(2 * _BATCH, len(windows))
        total, started = len(windows) // batch, time.monotonic()
        # Plain writes instead of a writable memory map: a full disk is then an exception, not a bus error.
        with (
            Reporter("target distributions") as report,
            (folder / "ids.bin").open("wb") as tokens_file,
            (folder / "logp.bin").open("wb") as log_probs_file,
        ):
            for i in range(total):
                tokens, log_probs = compute(windows[i * batch : (i + 1) * batch])
                tokens_file.write(tokens.numpy().astype(self._id_type).tobytes())
                log_probs_file.write(log_probs.numpy().astype(np.float16).tobytes())
                spent, done = time.monotonic() - started, (i + 1) / total
                report.update(done, f"{(i + 1) * batch * windows.shape[1] / spent:,.0f} tok/s")
                if limit is not None and spent > limit:
                    report.line(f"the time limit was reached with {done:.0%} of the windows done")
                    return (i + 1) * batch, spent
        return total * batch, time.monotonic() - started


def _fingerprint(target: FrozenTarget, windows: Tensor, top: int) -> str:
    shape = tuple(windows.shape)
    digest = hashlib.sha256(f"{top} {shape} {target.model.dtype} {weights_sha256(target.path)}".encode())
    digest.update(windows.numpy().tobytes())
    return digest.hexdigest()
