"""Measures which hidden states MTP layers were trained on.

Engines differ: a layer may read the target's last hidden state after the final norm (vLLM, transformers) or before it,
and, if it is chained, its own output after its last norm (vLLM for Qwen3-Next, transformers) or before it (vLLM for
DeepSeek-V3). config.json states neither, so both are measured on a short text that the target generates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.models.base import Model
from foretoken.models.heads.mtp_net import MtpNet
from foretoken.models.heads.mtp_stack import MtpStack
from foretoken.models.heads.taps import TOKENS, accuracy, generated, measurable


@dataclass(frozen=True, slots=True)
class MtpStates:
    """The measured meaning of hidden states. Accuracies are fractions of correct top tokens; None if not measured.

    Attributes:
        normed: whether the layer reads the target's state after the final norm.
        chained_normed: whether it reads its own output after its last norm.
        after: accuracy with the target's state after the final norm.
        before: accuracy with the state before it.
        chained_after: accuracy of the second token with the layer's output after its last norm.
        chained_before: accuracy of the second token with the output before it.
    """

    normed: bool = True
    chained_normed: bool = True
    after: float | None = None
    before: float | None = None
    chained_after: float | None = None
    chained_before: float | None = None

    def __str__(self) -> str:
        target = f"the target's hidden states are read {_place(self.normed)} the final norm"
        chained = f"the layer's own {_place(self.chained_normed)} its last norm"
        return f"{target}{_rates(self.after, self.before)}; {chained}{_rates(self.chained_after, self.chained_before)}"


@torch.inference_mode()
def measure_states(
    net: MtpNet | MtpStack,
    target: Model,
    tokenizer: Any,
    normed: bool | None = None,
    chained_normed: bool | None = None,
) -> MtpStates:
    """Measures the layer's accuracy on the target's greedy text with both meanings of both states.

    If the text does not fit the target's context window, states after the norms are assumed.

    Args:
        net: the layers.
        tokenizer: the target's tokenizer; None for prompts of arbitrary tokens.
        normed: whether it reads the target's state after the final norm; None to measure it.
        chained_normed: whether it reads its own output after its last norm; None to measure it.
    """
    last = target.num_layers
    if normed is None and not target.taps_before_norm:
        normed = True
    if normed is not None and chained_normed is not None:
        return MtpStates(normed, chained_normed)
    if not measurable(target, tokenizer):  # most checkpoints were trained this way
        return MtpStates(normed is not False, chained_normed is not False)
    both = (last, last + 1)
    texts, taps = generated(target, tokenizer, both if normed is None else (both[not normed],))
    after = before = chained_after = chained_before = None
    if normed is None:
        after, before = (accuracy(net, texts, taps, (tap,)) for tap in both)
        normed = after >= before
    if chained_normed is None:
        states = [by_layer[both[not normed]] for by_layer in taps]
        chained_after, chained_before = (_chained(net, texts, states, choice) for choice in (True, False))
        chained_normed = chained_after >= chained_before
    return MtpStates(normed, chained_normed, after, before, chained_after, chained_before)


def _chained(net: MtpNet | MtpStack, texts: Sequence[list[int]], states: Sequence[Tensor], normed: bool) -> float:
    """Returns the fraction of the target's tokens that are the top token two steps ahead."""
    before, net.normed = net.normed, normed
    handles = [net.open() for _ in texts]
    right = 0
    try:
        for step in range(TOKENS - 2):
            actual = []
            for handle, text, hidden in zip(handles, texts, states, strict=True):
                at = len(text) - TOKENS + step  # the newest token of a sequence that is being continued
                computed = len(handle.tokens)
                net.extend(handle, text[computed + 1 : at + 1], net.features(hidden[computed:at]))
                actual.append(text[at + 1 : at + 3])
            net.catch_up(handles)
            logits = net.grow(handles, [Draft.chain(tokens[:1]) for tokens in actual])
            right += sum(int(row[-1].argmax()) == tokens[1] for row, tokens in zip(logits, actual, strict=True))
    finally:
        net.normed = before
        for handle in handles:
            net.close(handle)
    return right / (len(texts) * (TOKENS - 2))


def _place(normed: bool) -> str:
    return "after" if normed else "before"


def _rates(after: float | None, before: float | None) -> str:
    if after is None or before is None:
        return ""
    return f" ({after:.0%} of the top tokens are right after it, {before:.0%} before it)"
