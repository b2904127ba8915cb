"""The vocabulary head alone gives the same logits as a pass, on every runner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.tiny import ARCHITECTURES, only_runner

from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.models.base import Model
from foretoken.models.loading import load_model
from foretoken.models.toy import ToyModel

IDS = [5, 9, 3, 77, 20]


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("runner", ["compiled", "torch"])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "gemma2"])
def test_the_head_alone_gives_the_logits_of_a_pass(
    name: str, runner: str, dtype: str, quantization: Any, tmp_path: Path
) -> None:
    with only_runner(runner):
        model = load_model(ARCHITECTURES[name].save(tmp_path), dtype, "cpu", quantization=quantization)
    tolerance = 0.0 if runner == "compiled" else 1e-5 if dtype == "float32" and not quantization else 0.1
    _check(model, tolerance)


def test_the_head_alone_of_a_transformers_module(tmp_path: Path) -> None:
    _check(load_model(ARCHITECTURES["gpt2"].save(tmp_path), "float32", "cpu"), 1e-5)


def _check(model: Model, tolerance: float) -> None:
    handle = model.open(IDS)
    scores = model.score([handle], [Draft.chain([4, 8])], (model.num_layers,))[0]
    again = model.unembed(scores.taps[model.num_layers][-3:])
    assert (again - scores.logits).abs().max() <= tolerance * scores.logits.abs().max()
    one = model.unembed(scores.taps[model.num_layers][-1:])
    assert one.shape == (1, model.vocab_size)
    torch.testing.assert_close(one, again[-1:], rtol=1e-5, atol=1e-5)


def test_a_model_without_a_head_refuses() -> None:
    with pytest.raises(InvalidRequest, match="ToyModel"):
        ToyModel().unembed(torch.zeros(1, 8))
