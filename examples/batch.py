"""Many prompts of different lengths and parameters in one call; they share forward passes, and nothing else.

.venv/bin/python examples/batch.py
"""

from __future__ import annotations

from foretoken import LLM, SamplingParams

PROMPTS = ("def area(width, height):", "import json\n\n", "class Stack:\n    def __init__(self):", "for i in range(")


def main() -> None:
    """Completes all prompts in one batch and each alone, and compares the texts."""
    llm = LLM()
    params = [SamplingParams(max_tokens=20 + 10 * i, temperature=0.8, seed=i) for i in range(len(PROMPTS))]
    together = llm.generate(PROMPTS, params, use_tqdm=False)
    for output in together:
        stats = output.stats
        print(f"{output.prompt!r}: {stats.tokens} tokens, {stats.mean_acceptance_length:.1f} per forward pass")
    alone = [llm.generate(prompt, each)[0] for prompt, each in zip(PROMPTS, params, strict=True)]
    same = sum(a.outputs[0].text == b.outputs[0].text for a, b in zip(together, alone, strict=True))
    print(f"{same} of {len(PROMPTS)} texts are the same alone")


if __name__ == "__main__":
    main()
