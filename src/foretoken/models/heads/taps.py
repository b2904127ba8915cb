"""Which layers an EAGLE-3 head reads, measured.

config.json names layers, and engines differ in what an explicit id means: the input of that layer (vLLM, speculators,
transformers' ``hidden_states[id]``) or its output, one more (SGLang). A wrong reading costs nearly all acceptance and
says nothing, so both are tried on a little text of the target's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.models.base import Model
from foretoken.models.heads.eagle_net import EagleNet

TOKENS = 24  # generated for each prompt; few passes, and enough to tell 59 % from 1 %
PROMPTS = ("def main():\n", "The first thing to know about", "import os\n\nclass ", "1. ")


@dataclass(frozen=True, slots=True)
class Reading:
    """What was measured. inputs, outputs: how often the head's best guess was right under either reading of the ids."""

    ids: tuple[int, ...]
    inputs: float
    outputs: float

    @property
    def taps(self) -> tuple[int, ...]:
        """Indices of layer inputs under the better reading; the plain one where they tie."""
        shift = int(self.outputs > self.inputs)
        return tuple(i + shift for i in self.ids)

    def __str__(self) -> str:
        taken = "outputs" if self.outputs > self.inputs else "inputs"
        return (
            f"ids {list(self.ids)} are read as the {taken} of those layers: as inputs {self.inputs:.0%} of the head's "
            f"guesses are right, as outputs {self.outputs:.0%}"
        )


@torch.inference_mode()
def choose_reading(net: EagleNet, target: Model, tokenizer: Any, ids: Sequence[int]) -> Reading:
    """Let the target continue a few prompts greedily and the head guess along, with either reading's hidden states."""
    shifted = tuple(i + 1 for i in ids)
    wanted = tuple(sorted({*ids, *(i for i in shifted if i <= target.num_layers)}))
    texts, taps = _texts(target, _prompts(tokenizer, target.vocab_size), wanted)
    inputs = _share(net, texts, taps, ids)
    possible = max(shifted) <= target.num_layers
    return Reading(tuple(ids), inputs, _share(net, texts, taps, shifted) if possible else 0.0)


def _prompts(tokenizer: Any, vocab: int) -> list[list[int]]:
    if tokenizer is None:
        return [[1 + 7 * i % (vocab - 1), 2 % vocab] for i in range(len(PROMPTS))]
    encoded = [list(tokenizer(text)["input_ids"]) for text in PROMPTS]
    return [ids for ids in encoded if ids] or [[0]]


def _texts(
    target: Model, prompts: Sequence[list[int]], wanted: Sequence[int]
) -> tuple[list[list[int]], list[dict[int, Tensor]]]:
    """The prompts with the target's greedy continuations, and its hidden states at all but the last token of each."""
    handles = [target.open(prompt) for prompt in prompts]
    texts = [list(prompt) for prompt in prompts]
    seen: list[list[dict[int, Tensor]]] = [[] for _ in prompts]
    try:
        for _ in range(TOKENS):
            scores = target.score(handles, [Draft.empty()] * len(handles), wanted)
            best = [[int(score.logits[-1].argmax())] for score in scores]
            target.commit(handles, best)
            for text, own, token, score in zip(texts, seen, best, scores, strict=True):
                text += token
                own.append(score.taps)
    finally:
        for handle in handles:
            target.close(handle)
    return texts, [{i: torch.cat([taps[i] for taps in own]) for i in wanted} for own in seen]


def _share(net: EagleNet, texts: Sequence[list[int]], taps: Sequence[dict[int, Tensor]], ids: Sequence[int]) -> float:
    """Of the tokens that the target wrote, how many the head guesses one step ahead."""
    right = total = 0
    for text, states in zip(texts, taps, strict=True):
        features = net.features(torch.cat([states[i] for i in ids], dim=-1))
        guesses = net.target_ids(net.teach(text[1:], features).argmax(-1)).tolist()
        truth = text[2:]
        right += sum(a == b for a, b in zip(guesses[-TOKENS:-1], truth[-TOKENS + 1 :], strict=True))
        total += TOKENS - 1
    return right / total
