"""A causal model of transformers behind the model contract: its own module with our KV cache and masks.

The module sees an ordinary padded batch, explicit positions and a 4-D mask. Its cache writes go to our slots, and its
cache reads return the rows of the sequences in the pass. Attention is the module's, so the model is not
batch-invariant.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from foretoken.core.devices import on_host
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.models.base import NO_ENCODER, Handle, Scores, growing
from foretoken.models.hf.modules import check_supported, read_module
from foretoken.models.hf.probe import WrappedModule, check
from foretoken.models.hf.rotary import FixedRope
from foretoken.models.hf.tiny_random import boundaries
from foretoken.models.state.slots import Placement, Slots

PREFILL_ROWS = 256  # rows of one prefill pass
JOINT_ROWS = 32  # a sequence with more pending rows than this is prefilled by itself
_CHECKED: WeakKeyDictionary[Any, object] = WeakKeyDictionary()


class HFModel(WrappedModule):
    """A transformers module as a ``Model``.

    The constructor ends with a check that the module's logits in a batch equal its logits alone (``probe.py``). Rotary
    factors follow from the maximum length (``rotary.py``).

    Args:
        module: the live module; it is shared, not copied.
        max_length: maximum length of a sequence in tokens; None for the module's.

    Raises:
        ModelLoadError: the module is an encoder-decoder, keeps a state that cannot be rewound (Mamba and other
            recurrent layers), counts rows instead of positions in its attention (ALiBi, GPT-Neo), or fails the check.
    """

    no_adapters = (
        "LoRA adapters are computed by the compiled runtime, and this model runs through transformers' modules"
    )

    def __init__(self, module: Any, max_length: int | None = None) -> None:
        config = module.config.get_text_config()
        check_supported(module, config)
        self.module = module
        self.device, self.dtype = module.device, module.dtype
        self.num_layers, self.hidden_size = config.num_hidden_layers, config.hidden_size
        head = module.get_output_embeddings()
        self.vocab_size = config.vocab_size if head is None else head.weight.shape[0]
        module_length = max(0, getattr(config, "max_position_embeddings", None) or 0) or max_length or 1 << 20
        limit = min(max_length or module_length, module_length)
        self.max_length = module_length
        self.batch_invariant = False
        self._slots = Slots()
        self._cache = Cache(layer_class_to_replicate=self._slots.new_layer)
        self._layer_types = sorted(set(getattr(config, "layer_types", None) or ()))
        self._window = getattr(config, "sliding_window", None) or 0
        accepted = inspect.signature(module.forward).parameters
        self._keeps_rows = "logits_to_keep" in accepted
        self._rope = FixedRope(module, limit)
        self._check_once(limit)
        self.max_length = limit

    @classmethod
    def from_module(cls, module: Any, max_length: int | None = None) -> Self:
        """Returns the model of a live module, which is shared, not copied."""
        return cls(module, max_length)

    @classmethod
    def load(cls, path: Path, dtype: torch.dtype, device: torch.device, max_length: int | None = None) -> Self:
        """Loads a safetensors checkpoint with the class that its config.json names, without remote code and pickles."""
        return cls(read_module(path, dtype).to(device).eval(), max_length)

    @property
    def kv_bytes_per_token(self) -> int:
        config = self.module.config.get_text_config()
        layers = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
        return sum(map(_cached_values, layers)) * self.dtype.itemsize

    # the contract

    def open(
        self,
        prompt: Sequence[int],
        source: Sequence[int] = (),
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> Handle:
        if source:
            raise InvalidRequest(NO_ENCODER)
        if adapter is not None:
            raise InvalidRequest(self.no_adapters)
        if not prompt:
            raise InvalidRequest("the prompt is empty; at least one token is needed to continue from")
        self.check_tokens(prompt)
        return Handle(self._slots.acquire(), list(prompt))

    def close(self, handle: Handle) -> None:
        if handle.slot >= 0:
            self._slots.release(handle.slot)
            handle.slot = -1

    @torch.inference_mode()
    def commit(self, handles: Sequence[Handle], tokens: Sequence[Sequence[int]]) -> None:
        for new in tokens:
            self.check_tokens(new)
        for handle, new in zip(handles, tokens, strict=True):
            self._move(handle.slot, *handle.advance(new))

    @torch.inference_mode()
    def score(self, handles: Sequence[Handle], drafts: Sequence[Draft], taps: Sequence[int] = ()) -> list[Scores]:
        for draft in drafts:
            self.check_tokens(draft.ids)
        firsts = [handle.cached for handle in handles]
        earlier = [self._prefill(handle, taps) for handle in handles]
        done = [growing(h, d) for h, d in zip(handles, drafts, strict=True)]
        firsts = [min(first, handle.cached) for first, handle in zip(firsts, handles, strict=True)]
        counts = [len(d) - n + bool(h.pending) for h, d, n in zip(handles, drafts, done, strict=True)]
        rows = [len(h.pending) + len(d) - n for h, d, n in zip(handles, drafts, done, strict=True)]
        output, first = self._run(handles, drafts, done, taps)
        results = []
        for at, (handle, draft) in enumerate(zip(handles, drafts, strict=True)):
            handle.cached = len(handle.tokens)
            handle.nodes[:], handle.parents[:] = draft.ids, draft.parents
            start, end = rows[at] - counts[at] - first, rows[at] - first
            tapped = {
                layer: torch.cat([*(part[layer] for part in earlier[at]), output.hidden_states[layer][at, : rows[at]]])
                for layer in taps
            }
            results.append(Scores(on_host(output.logits[at, start:end]), tapped, firsts[at]))
        return results

    @torch.inference_mode()
    def unembed(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.module.get_output_embeddings()(hidden.to(self.device, self.dtype))
        return on_host(logits.float())

    # one pass

    def _prefill(self, handle: Handle, taps: Sequence[int]) -> list[dict[int, Tensor]]:
        """Computes a long pending prompt, all but its last token, in passes of bounded size.

        Returns:
            The taps of each pass.
        """
        tapped: list[dict[int, Tensor]] = []
        if len(handle.pending) <= JOINT_ROWS:
            return tapped
        while len(handle.pending) > 1:
            count = min(PREFILL_ROWS, len(handle.pending) - 1)
            part = Handle(handle.slot, handle.tokens[: handle.cached + count], handle.cached)
            output, _ = self._run([part], [Draft.empty()], [0], taps)
            tapped.append({layer: output.hidden_states[layer][0, :count] for layer in taps})
            handle.cached += count
        return tapped

    def _run(
        self, handles: Sequence[Handle], drafts: Sequence[Draft], done: Sequence[int], taps: Sequence[int]
    ) -> tuple[Any, int]:
        """Runs one padded pass. Returns the module's output, and the first row of its logits."""
        placement = Placement.of(handles, drafts, done)
        if placement.reach > self.max_length:
            raise InvalidRequest(
                f"a sequence reaches {placement.reach} tokens, beyond the {self.max_length} this model was opened "
                "with; shorten the prompt, lower max_tokens, or raise max_model_len"
            )
        return self._pass(placement, taps), min(placement.roots) if self._keeps_rows else 0

    def _pass(self, placement: Placement, taps: Sequence[int]) -> Any:
        keep = {}
        if self._keeps_rows:
            keep["logits_to_keep"] = torch.arange(min(placement.roots), placement.width, device=self.device)
        with self._slots.serving(placement, self.device), _evaluating(self.module), self._rope.applied():
            return self.module(
                input_ids=placement.tokens.to(self.device),
                attention_mask=self._masks(placement),
                position_ids=placement.positions.to(self.device),
                past_key_values=self._cache,
                use_cache=True,
                output_hidden_states=bool(taps),
                return_dict=True,
                **keep,
            )

    def plain(self, texts: Tensor) -> Tensor:
        with _evaluating(self.module), self._rope.applied():
            logits: Tensor = self.module(input_ids=texts.to(self.device), use_cache=False, return_dict=True).logits
        return logits

    def _move(self, slot: int, destination: int, sources: Sequence[int]) -> None:
        self._slots.move(slot, destination, sources)

    def _masks(self, placement: Placement) -> Tensor | dict[str, Tensor]:
        """Returns the additive 4-D mask, or one for each kind of layer if there are several."""

        def additive(window: int) -> Tensor:
            visible = placement.visible(window).unsqueeze(1).to(self.device)
            mask = torch.zeros(visible.shape, dtype=self.dtype, device=self.device)
            return mask.masked_fill_(~visible, torch.finfo(self.dtype).min)

        windows = {kind: self._window if kind == "sliding_attention" else 0 for kind in self._layer_types}
        if len(windows) > 1:
            return {kind: additive(window) for kind, window in windows.items()}
        return additive(next(iter(windows.values()), self._window))

    # the check

    def _check_once(self, max_length: int) -> None:
        """Checks a module when it is first wrapped, and again after its precision or attention changed."""
        crossed = boundaries(self.module.config.get_text_config(), max_length)
        state = (self.dtype, getattr(self.module.config, "_attn_implementation", None), tuple(crossed))
        if _CHECKED.get(self.module) != state:
            check(self, max_length, _Unchecked)
            _CHECKED[self.module] = state


class _Unchecked(HFModel):
    """A tiny copy of a module, wrapped so that ``probe.check`` can run it."""

    def _check_once(self, max_length: int) -> None:
        """Does nothing: this model is part of a check."""


def _cached_values(layer: Any) -> int:
    """Returns the number of elements of one token's keys and values in the layer that this configuration describes."""
    heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
    width = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
    return 2 * int(heads * width)


@contextmanager
def _evaluating(module: Any) -> Iterator[None]:
    """Context manager: the module is in evaluation mode inside, and back in its own mode afterwards."""
    training = module.training
    if training:
        module.eval()
    try:
        yield
    finally:
        if training:
            module.train()
