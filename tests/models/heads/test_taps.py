"""The tapped layers of a head are measured if config.json is ambiguous."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.heads import tiny

from foretoken.core.draft import Draft
from foretoken.models.formats.checkpoint import load_tokenizer
from foretoken.models.heads.loading import load_eagle
from foretoken.models.heads.taps import PROMPTS, TOKENS
from foretoken.models.loading import load_model


def learnt(target: Any, tokenizer: Any, written: tuple[dict[str, Any], tiny.Tensors], taps: tuple[int, ...]) -> None:
    """Teach the head of ``written`` the target's greedy text by rote: fc reads it off the states at ``taps``.

    With its layer silenced and its norm at one, the head is a linear map of what it is fed.
    """
    _, tensors = written
    seen, next_tokens = [], []
    for prompt in PROMPTS:
        handle = target.open(list(tokenizer(prompt)["input_ids"]))
        for _ in range(TOKENS + 2):
            scores = target.score([handle], [Draft.empty()], taps)[0]
            token = int(scores.logits[-1].argmax())
            seen.append(torch.cat([scores.taps[i][-1] for i in taps]))
            next_tokens.append(token)
            target.commit([handle], [[token]])
        seen.pop()
        next_tokens.pop(len(next_tokens) - TOKENS - 2)  # a row predicts the token after the next
        target.close(handle)
    states, ids = torch.stack(seen), torch.tensor(next_tokens)
    hidden = tensors["fc.weight"].shape[0]
    head_weights = tensors["lm_head.weight"] = torch.nn.functional.normalize(tensors["lm_head.weight"], dim=-1)
    tensors["fc.weight"] = (torch.linalg.pinv(states) @ head_weights[ids]).T.contiguous()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"midlayer.{name}.weight"].zero_()
    tensors["norm.weight"] = torch.ones(hidden)


@pytest.mark.parametrize("shift", [0, 1])
def test_the_better_convention_is_used_and_logged(
    shift: int, tiny_pair: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target, tokenizer = load_model(tiny_pair.target, "float32", "cpu"), load_tokenizer(tiny_pair.target)
    written = tiny.eagle3(vocab=target.vocab_size, draft_vocab=target.vocab_size, hidden=64, taps=(0, 1, 1))
    learnt(target, tokenizer, written, (shift, 1 + shift, 1 + shift))
    config, tensors = written
    del config["foretoken_taps"]
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}
    folder = tiny.save(tmp_path, config, tensors)
    with caplog.at_level(logging.INFO):
        loaded = load_eagle(target, tokenizer, folder, None)
    assert loaded.taps == (shift, 1 + shift, 1 + shift)
    assert loaded.convention is not None
    right, wrong = loaded.convention.inputs, loaded.convention.outputs
    if shift:
        right, wrong = wrong, right
    assert right > 0.5 > wrong
    assert f"as the {'outputs' if shift else 'inputs'} of those layers" in caplog.text


def test_nothing_is_measured_if_the_ids_are_unambiguous(tiny_pair: Any, tmp_path: Path) -> None:
    target = load_model(tiny_pair.target, "float32", "cpu")
    folder = tiny.save(tmp_path, *tiny.eagle3(vocab=target.vocab_size))
    assert load_eagle(target, None, folder, None).convention is None


def test_the_last_layer_has_one_convention(tiny_pair: Any, tmp_path: Path) -> None:
    target, tokenizer = load_model(tiny_pair.target, "float32", "cpu"), load_tokenizer(tiny_pair.target)
    config, tensors = tiny.eagle3(vocab=target.vocab_size, taps=(1, 2, 3))
    del config["foretoken_taps"]
    config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3]
    loaded = load_eagle(target, tokenizer, tiny.save(tmp_path, config, tensors), None)
    assert loaded.taps == (1, 2, 3)
