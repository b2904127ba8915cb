"""Online training of a draft model: a differentiable copy learns from the distributions that its target computed."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foretoken.core.errors import ModelLoadError, reason_of
from foretoken.models.base import Model
from foretoken.models.decoder import Decoder
from foretoken.models.formats.checkpoint import load_config, open_weights
from foretoken.models.formats.gguf import is_gguf

_FLOOR = 1e-6
_COMPANIONS = (".json", ".jinja", ".txt", ".model")


class TopLogprobs(NamedTuple):
    """The most probable tokens of some rows: ids int64 [..., k], and their natural log-probabilities [..., k]."""

    ids: Tensor
    log_p: Tensor


@dataclass(frozen=True, slots=True)
class TargetSpan:
    """A span of tokens with the target's distributions.

    Attributes:
        tokens: [T].
        ids: [n, k], the k most probable tokens after each of the last n tokens.
        log_p: [n, k], their natural log-probabilities.
    """

    tokens: NDArray[np.int64]
    ids: NDArray[np.int64]
    log_p: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.ids)


def overlap(logits: Tensor, top: TopLogprobs) -> Tensor:
    """Returns sum min(p, q) of every row [...]: the acceptance probability of a token sampled from q.

    Tokens outside the top k of p count as one bucket, so the result is an upper bound.

    Args:
        logits: logits of q [..., V].
        top: top tokens of p.
    """
    logits = logits.float()
    q = (logits.gather(-1, top.ids) - logits.logsumexp(-1, keepdim=True)).exp()
    p = top.log_p.exp()
    return torch.minimum(p, q).sum(-1) + torch.minimum((1 - p.sum(-1)).clamp_min(0), (1 - q.sum(-1)).clamp_min(0))


def _load(path: Path) -> Any:
    """Returns the transformers module of a checkpoint in float32. Raises ModelLoadError."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if is_gguf(path):
        raise ModelLoadError(f"the draft {path} is a GGUF file, which cannot be trained further; take safetensors")
    weights = {name: tensor.float() for name, tensor in open_weights(path).items()}
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
        missing, unexpected = module.load_state_dict(weights, strict=False)
    except (ValueError, KeyError, RuntimeError, OSError) as error:
        raise ModelLoadError(f"the draft in {path} cannot be trained further ({reason_of(error)})") from error
    module.tie_weights()
    if odd := [*unexpected, *(set(missing) - set(module._tied_weights_keys or ()))]:
        raise ModelLoadError(
            f"the draft in {path} cannot be trained further: its tensor {odd[0]!r} is unexpected or missing"
        )
    return module.eval()


class Student:
    """Trains the transformers module of a draft model in float32.

    Args:
        path: the draft's checkpoint.
        like: model with the dtype, device and maximum length of the trained drafts.
        learning_rate: learning rate of AdamW.
        batch: spans per update.
        seed: seed for choosing spans.

    Raises:
        ModelLoadError: transformers cannot load the draft.
    """

    def __init__(self, path: Path, like: Model, learning_rate: float, batch: int, seed: int = 0) -> None:
        self.path, self._dtype, self._device, self._max_length = path, like.dtype, like.device, like.max_length
        self.module: Any = _load(path).to(like.device)
        self._optimizer = torch.optim.AdamW(self.module.parameters(), lr=learning_rate, weight_decay=0.0)
        self._batch, self._random = batch, np.random.default_rng(seed)

    def learn(self, spans: Sequence[TargetSpan], steps: int) -> None:
        """Makes ``steps`` updates on random batches of ``spans`` with the loss -log sum min(p, q).

        sum min(p, q) is the acceptance probability itself. The KL divergence is a better loss for an untrained draft,
        but makes a draft worse that was trained for acceptance: the two losses have different optima if the draft is
        too small to match the target.
        """
        with torch.inference_mode(False), torch.enable_grad():
            for _ in range(steps):
                chosen = self._random.choice(len(spans), min(self._batch, len(spans)), replace=False)
                accepted = self._compare([spans[i] for i in chosen])
                (-accepted.clamp_min(_FLOOR).log().mean()).backward()
                torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
                self._optimizer.step()
                self._optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def acceptance(self, spans: Sequence[TargetSpan]) -> float:
        """Returns the mean of sum min(p, q) over all rows: the probability that a sampled token is accepted."""
        rows = [self._compare(spans[i : i + self._batch]) for i in range(0, len(spans), self._batch)]
        return float(torch.cat(rows).mean())

    def snapshot(self) -> Any:
        """Returns weights and optimizer state for ``restore``."""
        return copy.deepcopy((self.module.state_dict(), self._optimizer.state_dict()))

    def restore(self, snapshot: Any) -> None:
        """Restores the weights and optimizer state of a snapshot."""
        self.module.load_state_dict(snapshot[0])
        self._optimizer.load_state_dict(snapshot[1])

    @torch.no_grad()
    def model(self) -> Model:
        """Returns the current draft as a model of the runtime; later updates do not change it."""
        config = load_config(self.path)
        if Decoder.supports(config):
            weights = {name: weight.detach().clone() for name, weight in self.module.state_dict().items()}
            return Decoder(config, weights, self._dtype, self._device, self._max_length)
        from foretoken.models.hf.model import HFModel

        return HFModel.from_module(copy.deepcopy(self.module).to(self._dtype).eval(), self._max_length)

    def save(self, folder: Path) -> None:
        """Saves an ordinary checkpoint with its tokenizer in an existing empty ``folder``."""
        copied = copy.deepcopy(self.module).to(self._dtype)
        copied.save_pretrained(folder)
        for file in sorted(self.path.iterdir()):
            if file.suffix in _COMPANIONS and not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)

    def _compare(self, spans: Sequence[TargetSpan]) -> Tensor:
        """Returns sum min(p, q) of every row of the spans, [rows]."""
        longest = max(len(span.tokens) for span in spans)
        ids = torch.zeros(len(spans), longest, dtype=torch.int64)
        for row, span in zip(ids, spans, strict=True):
            row[: len(span.tokens)] = torch.from_numpy(span.tokens)
        # Padding follows the tokens, so the causal mask is enough.
        logits = self.module(ids.to(self._device), use_cache=False).logits
        parts = [row[len(x.tokens) - len(x) : len(x.tokens)] for row, x in zip(logits, spans, strict=True)]
        top = TopLogprobs(*(torch.from_numpy(np.concatenate([getattr(x, n) for x in spans])) for n in ("ids", "log_p")))
        return overlap(torch.cat(parts), TopLogprobs(top.ids.to(self._device), top.log_p.to(self._device)))
