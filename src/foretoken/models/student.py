"""Online training of a draft model: a differentiable copy learns from the distributions that its target computed."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.core.errors import ModelLoadError, reason_of
from foretoken.models.base import Model
from foretoken.models.decoder import Decoder
from foretoken.models.formats.checkpoint import load_config, open_weights
from foretoken.models.formats.gguf import is_gguf
from foretoken.models.learner import Learner, TargetSpan, TopLogprobs, overlap, padded_tokens

_COMPANIONS = (".json", ".jinja", ".txt", ".model")


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


class Student(Learner):
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
        super().__init__(_load(path).to(like.device), learning_rate, batch, seed)
        self.path, self._dtype, self._device, self._max_length = path, like.dtype, like.device, like.max_length

    @torch.no_grad()
    def version(self) -> Model:
        config = load_config(self.path)
        if Decoder.supports(config):
            weights = {name: weight.detach().clone() for name, weight in self.module.state_dict().items()}
            return Decoder(config, weights, self._dtype, self._device, self._max_length)
        from foretoken.models.hf.model import HFModel

        return HFModel.from_module(copy.deepcopy(self.module).to(self._dtype).eval(), self._max_length)

    def save(self, folder: Path) -> None:
        copied = copy.deepcopy(self.module).to(self._dtype)
        copied.save_pretrained(folder)
        for file in sorted(self.path.iterdir()):
            if file.suffix in _COMPANIONS and not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)

    def overlaps(self, spans: Sequence[TargetSpan]) -> Tensor:
        # Padding follows the tokens, so the causal mask is enough.
        ids = padded_tokens(spans)
        logits = self.module(ids.to(self._device), use_cache=False).logits
        parts = [row[len(x.tokens) - len(x) : len(x.tokens)] for row, x in zip(logits, spans, strict=True)]
        top = TopLogprobs(*(torch.from_numpy(np.concatenate([getattr(x, n) for x in spans])) for n in ("ids", "log_p")))
        return overlap(torch.cat(parts), TopLogprobs(top.ids.to(self._device), top.log_p.to(self._device)))
