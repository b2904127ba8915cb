"""A custom proposer: drafts, for each token, the token that followed it the last time.

.venv/bin/python examples/custom_proposer.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from foretoken import LLM, SamplingParams
from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.propose.base import BuildContext, Method, Proposer
from foretoken.propose.methods import register


@dataclass(frozen=True)
class BigramConfig:
    """Keys of the method in ``speculative_config``: this one has none."""


class Bigram(Proposer):
    """Follows each token by its latest successor in the text. The draft is a chain of fixed candidates."""

    name = "bigram"
    costless = True  # no model: the draft length needs no measured drafting time

    def propose(self, contexts: Sequence[Context], budgets: Sequence[int]) -> list[Draft]:
        return [self._chain(context.tokens, budget) for context, budget in zip(contexts, budgets, strict=True)]

    def _chain(self, tokens: Sequence[int], budget: int) -> Draft:
        successor = dict(pairwise(tokens))
        drafted: list[int] = []
        while len(drafted) < budget and (drafted or tokens)[-1] in successor:
            drafted.append(successor[(drafted or tokens)[-1]])
        return Draft.chain(drafted)


def build(config: BigramConfig, build_context: BuildContext) -> Bigram:
    """Builds the proposer. ``build_context`` holds the target and its tokenizer, which this one does not need."""
    return Bigram()


METHOD = Method(BigramConfig, build, tokens=4)


def main() -> None:
    """Compares the text and the acceptance with plain decoding."""
    register("bigram", METHOD)
    prompt = "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n"
    params = SamplingParams(max_tokens=60, temperature=0)
    (plain,) = LLM(speculative_config={"method": "none"}).generate(prompt, params)
    (drafted,) = LLM(speculative_config={"method": "bigram"}).generate(prompt, params)
    print(drafted.outputs[0].text)
    print(f"{drafted.stats.mean_acceptance_length:.2f} tokens per forward pass")
    print("same text as plain decoding:", drafted.outputs[0].text == plain.outputs[0].text)


if __name__ == "__main__":
    main()
