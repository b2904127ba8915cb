"""A causal model of transformers behind the model contract."""

from pathlib import Path
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch

from foretoken.models.decoder import RunnerModel
from foretoken.models.hf.probe import check, check_supported, read_module
from foretoken.models.hf.runner import HFRunner
from foretoken.models.hf.tiny_random import boundaries

_CHECKED: WeakKeyDictionary[Any, object] = WeakKeyDictionary()


class HFModel(RunnerModel):
    """A transformers module as a ``Model``.

    The constructor ends with a check that the module's logits in a batch equal its logits alone (``probe.py``). Raises
    ModelLoadError if the module is an encoder-decoder, keeps a state that cannot be rewound (Mamba and other recurrent
    layers), counts rows instead of positions in its attention (ALiBi, GPT-Neo), or fails the check.

    Args:
        module: the live module; it is shared, not copied.
        max_length: maximum length of a sequence in tokens; None for the module's.
    """

    no_adapters = (
        "LoRA adapters are computed by the compiled runtime, and this model runs through transformers' modules"
    )
    runner: HFRunner

    def __init__(self, module: Any, max_length: int | None = None) -> None:
        config = module.config.get_text_config()
        check_supported(module, config)
        self.device, self.dtype = module.device, module.dtype
        self.num_layers, self.hidden_size = config.num_hidden_layers, config.hidden_size
        head = module.get_output_embeddings()
        self.vocab_size = config.vocab_size if head is None else head.weight.shape[0]
        module_length = max(0, getattr(config, "max_position_embeddings", None) or 0) or max_length or 1 << 20
        limit = min(max_length or module_length, module_length)
        self.max_length = module_length
        self.runner = self._new_runner(module, limit)
        self._check_once(limit)
        self.max_length = limit

    def _new_runner(self, module: Any, max_length: int) -> HFRunner:
        return HFRunner(module, max_length)

    @classmethod
    def from_module(cls, module: Any, max_length: int | None = None) -> Self:
        """Returns the model of a live module, which is shared, not copied."""
        return cls(module, max_length)

    @classmethod
    def load(cls, path: Path, dtype: torch.dtype, device: torch.device, max_length: int | None = None) -> Self:
        """Loads a safetensors checkpoint with the class that its config.json names, without remote code and pickles."""
        return cls(read_module(path, dtype).to(device).eval(), max_length)

    def _check_once(self, max_length: int) -> None:
        """Checks a module when it is first wrapped, and again after its precision or attention changed."""
        module = self.runner.module
        crossed = boundaries(module.config.get_text_config(), max_length)
        state = (self.dtype, getattr(module.config, "_attn_implementation", None), tuple(crossed))
        if _CHECKED.get(module) != state:
            check(self, max_length, _Unchecked)
            _CHECKED[module] = state


class _Unchecked(HFModel):
    """A tiny copy of a module, wrapped so that ``probe.check`` can run it."""

    def _check_once(self, max_length: int) -> None:
        """Does nothing: this model is part of a check."""
