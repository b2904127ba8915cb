"""Measures which hidden states a head was trained on, on a short text that the target generates.

The config.json of an EAGLE-3 head lists layer ids, and engines differ in their meaning: the input of the layer (vLLM,
speculators, transformers' ``hidden_states[id]``), or its output, which is one more (SGLang). The wrong meaning loses
nearly all acceptance without an error.

An MTP layer may read the target's last hidden state after the final norm (vLLM, transformers) or before it, and, if it
is chained, its own output after its last norm (vLLM for Qwen3-Next, transformers) or before it (vLLM for DeepSeek-V3).
config.json states neither.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.models.base import Model
from foretoken.models.heads.feature_net import FeatureNet
from foretoken.models.heads.mtp_net import MtpNet, MtpStack

TOKENS = 24  # generated for each prompt; few passes, and enough to distinguish 59 % from 1 %
PROMPTS = ("def main():\n", "The first thing to know about", "import os\n\nclass ", "1. ")


@dataclass(frozen=True, slots=True)
class TapConvention:
    """The measured meaning of layer ids."""

    ids: tuple[int, ...]  # the ids in config.json
    inputs: float  # accuracy of the head's top token if the ids are layer inputs
    outputs: float  # accuracy of the head's top token if the ids are layer outputs

    @property
    def taps(self) -> tuple[int, ...]:
        """Indices of layer inputs, by the meaning with the higher accuracy; layer inputs on a tie."""
        shift = int(self.outputs > self.inputs)
        return tuple(i + shift for i in self.ids)

    def __str__(self) -> str:
        meaning = "outputs" if self.outputs > self.inputs else "inputs"
        return (
            f"ids {list(self.ids)} are read as the {meaning} of those layers: as inputs {self.inputs:.0%} of the "
            f"head's top tokens are right, as outputs {self.outputs:.0%}"
        )


@torch.inference_mode()
def measure_taps(net: FeatureNet, target: Model, tokenizer: Any, ids: Sequence[int]) -> TapConvention:
    """Measures the head's accuracy on the target's greedy text with both meanings of the layer ids.

    Args:
        net: the head.
        tokenizer: the target's tokenizer; None for prompts of arbitrary tokens.
        ids: the layer ids in config.json.
    """
    shifted = tuple(i + 1 for i in ids)
    layers = tuple(sorted({*ids, *(i for i in shifted if i <= target.num_layers)}))
    texts, taps = generated(target, tokenizer, layers)
    inputs = accuracy(net, texts, taps, ids)
    possible = max(shifted) <= target.num_layers
    return TapConvention(tuple(ids), inputs, accuracy(net, texts, taps, shifted) if possible else 0.0)


def _prompts(tokenizer: Any, vocab: int) -> list[list[int]]:
    if tokenizer is None:
        return [[1 + 7 * i % (vocab - 1), 2 % vocab] for i in range(len(PROMPTS))]
    encoded = [list(tokenizer(text)["input_ids"]) for text in PROMPTS]
    return [ids for ids in encoded if ids and max(ids) < vocab] or [[0]]


def measurable(target: Model, tokenizer: Any) -> bool:
    """Returns whether the texts of the measurement fit the target's context window."""
    return max(map(len, _prompts(tokenizer, target.vocab_size))) + TOKENS <= target.max_length


def generated(target: Model, tokenizer: Any, layers: Sequence[int]) -> tuple[list[list[int]], list[dict[int, Tensor]]]:
    """Returns prompts with greedy continuations of ``TOKENS`` tokens, and the target's hidden states by layer.

    The last token of each has no hidden states.
    """
    prompts = _prompts(tokenizer, target.vocab_size)
    handles = [target.open(prompt) for prompt in prompts]
    texts = [list(prompt) for prompt in prompts]
    taps_by_text: list[list[Mapping[int, Tensor]]] = [[] for _ in prompts]
    try:
        for _ in range(TOKENS):
            scores = target.score(handles, [Draft.empty()] * len(handles), layers)
            best = [[int(score.logits[-1].argmax())] for score in scores]
            target.commit(handles, best)
            for text, passes, token, score in zip(texts, taps_by_text, best, scores, strict=True):
                text += token
                passes.append(score.taps)
    finally:
        for handle in handles:
            target.close(handle)
    return texts, [{i: torch.cat([taps[i] for taps in passes]) for i in layers} for passes in taps_by_text]


def accuracy(
    net: FeatureNet | MtpStack, texts: Sequence[list[int]], taps: Sequence[dict[int, Tensor]], ids: Sequence[int]
) -> float:
    """Returns the fraction of the target's tokens that are the head's top token one step ahead."""
    right = total = 0
    for text, states in zip(texts, taps, strict=True):
        features = net.features(torch.cat([states[i] for i in ids], dim=-1))
        predicted = net.target_ids(net.teacher_forced(text[1:], features).argmax(-1)).tolist()
        actual = text[2:]
        right += sum(a == b for a, b in zip(predicted[-TOKENS:-1], actual[-TOKENS + 1 :], strict=True))
        total += TOKENS - 1
    return right / total


@dataclass(frozen=True, slots=True)
class MtpStates:
    """The measured meaning of hidden states. Accuracies are fractions of correct top tokens; None if not measured."""

    normed: bool = True  # whether the layer reads the target's state after the final norm
    chained_normed: bool = True  # whether it reads its own output after its last norm
    after: float | None = None  # accuracy with the target's state after the final norm
    before: float | None = None  # accuracy with the state before it
    chained_after: float | None = None  # accuracy of the second token with the layer's output after its last norm
    chained_before: float | None = None  # accuracy of the second token with the output before it

    def __str__(self) -> str:
        target = f"the target's hidden states are read {_place(self.normed)} the final norm"
        chained = f"the layer's own {_place(self.chained_normed)} its last norm"
        return f"{target}{_rates(self.after, self.before)}; {chained}{_rates(self.chained_after, self.chained_before)}"


@torch.inference_mode()
def measure_states(
    net: MtpNet | MtpStack,  # the layers
    target: Model,
    tokenizer: Any,  # the target's tokenizer; None for prompts of arbitrary tokens
    normed: bool | None = None,  # whether it reads the target's state after the final norm; None to measure it
    chained_normed: bool | None = None,  # whether it reads its own output after its last norm; None to measure it
) -> MtpStates:
    """Measures the layer's accuracy on the target's greedy text with both meanings of both states.

    If the text does not fit the target's context window, states after the norms are assumed.
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
