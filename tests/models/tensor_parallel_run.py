"""The program of each rank in a test under torchrun: compares a model in two parts with the same model in one.

    torchrun --nproc-per-node 2 tests/models/tensor_parallel_run.py MODEL DRAFT OUT

Only the first rank continues after the first lines of ``main``, and writes OUT.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken import LLM, SamplingParams
from foretoken.core.draft import Draft
from foretoken.models.base import Model
from foretoken.models.loading import load_model

PROMPTS = ["def greet(name):", "for i in range(10):\n    print(i", "class"]
LONG = 300  # tokens: their order is longer than one message


def texts(llm: LLM, **params: Any) -> list[str]:
    settings = SamplingParams(max_tokens=16, ignore_eos=True, **params)
    return [output.outputs[0].text for output in llm.generate(PROMPTS, settings)]


def passes(model: Model) -> list[Tensor]:
    """Chunked prefill, a tree whose second path is kept, two sequences at once, taps, and the head alone."""
    prompt = [5 + i % 80 for i in range(LONG)]
    handle, other = model.open(prompt), model.open(prompt[:4])
    tree = Draft.tree([5, 6, 6, 6], (-1, 0, -1, 2))
    seen = [model.score([handle], [tree])[0].logits]
    model.commit([handle], [[6, 6, 9]])
    for scores in model.score([handle, other], [Draft.chain([5, 6]), Draft.empty()], (1, 3)):
        seen += [scores.logits, *scores.taps.values()]
    seen.append(model.unembed(torch.linspace(-1, 1, 2 * model.hidden_size).reshape(2, -1)))
    for each in (handle, other):
        model.close(each)
    return seen


def main(path: str, draft: str, out: str) -> None:
    llm = LLM(path, draft, dtype="float32", tensor_parallel_size=2, speculative_config={"control": "goodput"})
    whole = load_model(path, "float32", backend="hf")
    divided, single = passes(llm.target), passes(whole)
    result = {
        "plain": texts(llm, temperature=0, speculative_tokens=0),
        "speculative": texts(llm, temperature=0, speculative_tokens=3),
        "controlled": texts(llm, temperature=0),
        "seeded plain": texts(llm, temperature=1, seed=3, speculative_tokens=0),
        "seeded": texts(llm, temperature=1, seed=3, speculative_tokens=3),
        "difference": max(float((a - b).abs().max()) for a, b in zip(divided, single, strict=True)),
        "row bytes": [llm.target.kv_bytes_per_token, whole.kv_bytes_per_token],
    }
    Path(out).write_text(json.dumps(result), encoding="utf-8")
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
