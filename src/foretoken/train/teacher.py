"""The target's distributions on fixed windows, computed once and kept on disk: top-k log-probabilities."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from foretoken.core.errors import TrainingError
from foretoken.core.schema import read_object
from foretoken.train.files import write_json
from foretoken.train.optimization import compiled
from foretoken.train.progress import Reporter

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

_BATCH = 16
LawFn = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Returns top-k token ids and log-probabilities of ids [B, T]."""


@dataclass(frozen=True)
class TaughtWindows:
    """Windows with the target's distribution after each of their tokens.

    Args:
        ids: Token ids, int64 [N, T].
        top_ids: Ids of the k likeliest tokens, int16 or int32 [N, T, k].
        top_logp: Their natural log-probabilities, float16 [N, T, k].
        seconds: Time of the pass.
    """

    ids: torch.Tensor
    top_ids: np.ndarray
    top_logp: np.ndarray
    seconds: float

    def batches(self, batch: int, seed: int, start: int = 0) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yields endless (ids, top_ids, top_logp), reshuffled each epoch. Batch i depends on (seed, i) alone."""
        for drawn in shuffled(len(self.ids), batch, seed, start):
            rows = np.sort(drawn)  # to read the disk in order
            ids = torch.from_numpy(self.top_ids[rows].astype(np.int64))
            yield self.ids[torch.from_numpy(rows)], ids, torch.from_numpy(self.top_logp[rows].astype(np.float32))


def shuffled(count: int, batch: int, seed: int, start: int = 0) -> Iterator[np.ndarray]:
    """Yields indices of endless batches of ``count`` windows, reshuffled each epoch.

    Args:
        count: Number of windows.
        batch: Windows of a batch, at most ``count``.
        seed: Batch i depends on (seed, i) alone.
        start: Number of the first batch.
    """
    batch = min(batch, count)
    per_epoch = count // batch
    epoch, first = divmod(start, per_epoch)
    while True:
        order = np.random.default_rng([seed, epoch]).permutation(count)
        for at in range(first, per_epoch):
            yield order[at * batch : (at + 1) * batch]
        epoch, first = epoch + 1, 0


def fixed_windows(stream: torch.Tensor, length: int, seed: int) -> torch.Tensor:
    """Returns the stream cut into windows [N, length], shuffled so that any prefix is a fair sample."""
    rows = stream[: len(stream) // length * length].view(-1, length)
    return rows[torch.from_numpy(np.random.default_rng([seed, 1]).permutation(len(rows)))]


def teach(
    model: LlamaForCausalLM,
    windows: torch.Tensor,
    folder: Path,
    top: int = 64,
    limit_seconds: float | None = None,
    compile_model: bool | None = None,
) -> TaughtWindows:
    """Runs the target over windows once, or reuses ``folder`` if it holds the same pass.

    Args:
        model: The target. bfloat16 is twice as fast as float32.
        windows: Token ids, [N, T].
        folder: Folder of the files.
        top: Likeliest tokens kept per position.
        limit_seconds: Time after which the pass ends with the windows done so far.
        compile_model: Whether to compile, see ``trainer.compiled``.

    Raises:
        TrainingError: The files cannot be written. None are left then.
    """
    top = min(top, model.config.vocab_size)
    key = _fingerprint(model, windows, top)
    meta = folder / "meta.json"
    if not (meta.exists() and read_object(meta).get("key") == key):
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            rows, seconds = _pass(model, windows, folder, top, limit_seconds, compile_model)
            write_json(meta, {"key": key, "rows": rows, "seconds": seconds})
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise TrainingError(
                f"cannot keep the target's distributions in {folder}: {error}; free some space"
            ) from error
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    done = read_object(meta)
    shape = (done["rows"], windows.shape[1], top)
    return TaughtWindows(
        windows[: done["rows"]],
        np.memmap(folder / "ids.bin", _id_type(model), "r", shape=shape),
        np.memmap(folder / "logp.bin", np.float16, "r", shape=shape),
        done["seconds"],
    )


def top_law(model: LlamaForCausalLM, top: int) -> LawFn:
    """Returns a function from ids [B, T] to ids and log-probabilities of the likeliest next tokens, [B, T, top]."""

    def law(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(ids, use_cache=False).logits
        values, indices = logits.topk(top, dim=-1, sorted=False)
        return indices, values.float() - logits.float().logsumexp(-1, keepdim=True)

    return law


def _pass(
    model: LlamaForCausalLM, windows: torch.Tensor, folder: Path, top: int, limit: float | None, enabled: bool | None
) -> tuple[int, float]:
    law = compiled(top_law(model, top), enabled)
    batch = min(_BATCH, len(windows))
    total = len(windows) // batch
    started = time.monotonic()
    # Plain writes instead of a writable memory map: a full disk is then an exception, not a bus error.
    with (
        torch.no_grad(),
        Reporter("teaching") as report,
        (folder / "ids.bin").open("wb") as ids_file,
        (folder / "logp.bin").open("wb") as logp_file,
    ):
        for i in range(total):
            ids, logp = law(windows[i * batch : (i + 1) * batch])
            ids_file.write(ids.numpy().astype(_id_type(model)).tobytes())
            logp_file.write(logp.numpy().astype(np.float16).tobytes())
            spent = time.monotonic() - started
            speed = (i + 1) * batch * windows.shape[1] / spent
            report.update((i + 1) / total, f"{speed:,.0f} tok/s")
            if limit is not None and spent > limit:
                report.line(f"teaching stopped at its limit with {(i + 1) / total:.0%} of the windows done")
                return (i + 1) * batch, spent
    return total * batch, time.monotonic() - started


def _id_type(model: LlamaForCausalLM) -> type[np.signedinteger]:
    return np.int16 if model.config.vocab_size <= 2**15 else np.int32


def _fingerprint(model: LlamaForCausalLM, windows: torch.Tensor, top: int) -> str:
    digest = hashlib.sha256(f"{top} {tuple(windows.shape)} {model.dtype}".encode())
    digest.update(windows.numpy().tobytes())
    for name, value in model.state_dict().items():
        digest.update(name.encode())
        digest.update(value.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
