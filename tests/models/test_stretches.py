"""Contexts of several stretches of keys (csrc/attention.hpp), each with sums of its own."""

from __future__ import annotations

import pytest
import torch

from foretoken.core.draft import Draft

from .plain import one_by_one
from .test_rows import CACHES, NUMBERS, decoder, neighbours, tokens
from .trees import repeating


@pytest.mark.parametrize("window", [0, 700, 1027])
@pytest.mark.parametrize("numbers", NUMBERS | CACHES)
def test_stretches_of_keys_change_no_bit(numbers: str, window: int) -> None:
    """Threads share the stretches of a single sequence; those of several sequences are computed one after the other."""
    changes = {"model_type": "mistral", "sliding_window": window} if window else {}
    model = decoder(f"{numbers}-compiled", **changes)
    prompt, continuation = tokens(2040), tokens(12, seed=9)
    expected = one_by_one(model, prompt, continuation)
    tree = repeating((-1, 0, 1, 2, 3, 4, 5, 6, 7, 2, 9, 10, 11, 12, 13, 8))
    paths = {}
    for node in (8, 14, 15):
        path = [tree.ids[i] for i in tree.path(node)]
        paths[node] = one_by_one(model, prompt, [*path, 0])[-1]
    for threads in (1, 2, 5):
        model.runner.threads = threads
        handle = model.open(prompt)
        for handles, drafts in (([], []), neighbours(model, 1100)):
            for draft in (Draft.chain(continuation[:11]), tree):
                got = model.score([*handles, handle], [*drafts, draft])[-1].logits
                if draft.is_chain:
                    assert all(torch.equal(got[row], expected[row]) for row in range(12)), threads
                else:
                    assert all(torch.equal(got[node + 1], paths[node]) for node in paths), threads
                model.commit([*handles, handle], [()] * (len(handles) + 1))
        model.close(handle)


def test_stretches_of_keys_sum_to_attention_over_all() -> None:
    prompt, draft = tokens(2040), Draft.chain(tokens(11, seed=9))
    compiled, other = (decoder(f"float32-{runner}") for runner in ("compiled", "torch"))
    got, expected = (model.score([model.open(prompt)], [draft])[0].logits for model in (compiled, other))
    assert torch.allclose(got, expected, rtol=1e-4, atol=1e-4)
