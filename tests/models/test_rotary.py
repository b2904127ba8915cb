"""Rotary factors that transformers chooses in every pass: our tables are fixed, alone and in batches."""

from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.models.base import Model
from foretoken.models.hf.model import HFModel
from foretoken.models.hf.rotary import FixedRope, longrope_length

from .tiny import GROUPED, Tiny

ORIGINAL = 24  # tokens up to which transformers takes the short factors
SHORT, LONG = [1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0], [2.0, 3.0, 4.5, 6.0, 9.0, 12.0, 16.0, 20.0]
TEXT = [3 + 7 * i % 90 for i in range(60)]
TREE = Draft.tree([5, 6, 7, 8], (-1, -1, 0, 1))


CONFIG: dict[str, Any] = {**GROUPED, "original_max_position_embeddings": ORIGINAL}  # where Phi-3 keeps it


def longrope(short: list[float] = SHORT, long: list[float] = LONG, **more: Any) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": ORIGINAL,
        **more,
    }


def family(name: str, long: bool | None = None) -> Any:
    """A module with LongRoPE; ``long`` gives it one kind of factors for every length."""
    sets = {None: (SHORT, LONG), True: (LONG, LONG), False: (SHORT, SHORT)}
    short, far = sets[long]
    if name == "Phi3-partial":  # as Phi-4-mini has it: a part of each head turns
        rope = longrope(short[:6], far[:6], partial_rotary_factor=0.75)
        return Tiny("Phi3", {**CONFIG, "rope_parameters": rope}).build()
    if name == "Gemma3Text":  # a set for each kind of layer
        ropes = {
            "full_attention": longrope(short, far),
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        }
        types = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "head_dim": 16}
        return Tiny("Gemma3Text", {**GROUPED, **types, "rope_parameters": ropes}).build()
    return Tiny(name, {**CONFIG, "rope_parameters": longrope(short, far)}).build()


FAMILIES = ["Phi3", "Phi3-partial", "Llama", "Qwen2", "Gemma3Text"]


def alone(module: Any, text: list[int]) -> Tensor:
    with torch.no_grad():
        return module(torch.tensor([text]), use_cache=False).logits[0]


def rows(model: Model, texts: list[list[int]], draft: Draft = TREE) -> list[Tensor]:
    """Logits of each text and its draft, all in one pass."""
    handles = [model.open(text) for text in texts]
    logits = [scores.logits for scores in model.score(handles, [draft] * len(handles))]
    for handle in handles:
        model.close(handle)
    return logits


def check(model: Model, module: Any, texts: list[list[int]]) -> None:
    """A tree on each of ``texts``, in one pass, equals ``module`` on every path alone."""
    for text, logits in zip(texts, rows(model, texts), strict=True):
        for leaf in (2, 3):
            path = TREE.path(leaf)
            want = alone(module, [*text, *(TREE.ids[node] for node in path)])[len(text) - 1 :]
            assert (logits[[0, *(node + 1 for node in path)]] - want).abs().max() < 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_long_factors_serve_every_length_where_the_maximum_is_beyond_the_original(name: str) -> None:
    model, always_long = HFModel(family(name)), family(name, long=True)
    assert model.max_length > ORIGINAL
    check(model, always_long, [TEXT[:4]])
    check(model, always_long, [TEXT[:4], TEXT[:50], TEXT[:22]])


@pytest.mark.parametrize("name", FAMILIES)
def test_short_factors_serve_where_the_maximum_is_within_the_original(name: str) -> None:
    module = family(name)
    check(HFModel(module, ORIGINAL), module, [TEXT[:4], TEXT[:20]])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_sequence_that_grows_over_the_original_length_keeps_its_factors(name: str) -> None:
    model, always_long = HFModel(family(name)), family(name, long=True)
    handle = model.open(TEXT[: ORIGINAL - 2])
    for _ in range(3):
        (scores,) = model.score([handle], [TREE])
        assert (scores.logits[0] - alone(always_long, handle.tokens)[-1]).abs().max() < 1e-4
        model.commit([handle], [[6, 8, 9]])
    assert len(handle.tokens) > ORIGINAL


def test_the_module_does_not_change() -> None:
    module = family("Phi3")
    before = [alone(module, TEXT[:n]) for n in (4, 50)]
    check(HFModel(module), family("Phi3", long=True), [TEXT[:4], TEXT[:50]])
    check(HFModel(module, ORIGINAL), module, [TEXT[:4]])
    assert all(torch.equal(alone(module, TEXT[:n]), want) for n, want in zip((4, 50), before, strict=True))


def test_dynamic_scaling_stays_as_it_is_within_the_models_positions() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    module = Tiny("Llama", {**GROUPED, "max_position_embeddings": len(TEXT), "rope_parameters": rope}).build()
    model, want = HFModel(module), alone(module, TEXT)[-1]
    handle = model.open(TEXT[:-1])
    model.score([handle], [Draft.empty()])
    alone(module, [*TEXT, *TEXT])  # its owner goes beyond its positions, and the frequencies change
    model.commit([handle], [TEXT[-1:]])
    (scores,) = model.score([handle], [Draft.empty()])
    assert (scores.logits[0] - want).abs().max() < 1e-4


def test_original_lengths_of_longrope_are_found_in_every_format() -> None:
    assert longrope_length(longrope()) == ORIGINAL
    assert longrope_length({"full_attention": longrope(), "sliding_attention": {"rope_type": "default"}}) == ORIGINAL
    assert longrope_length({"rope_type": "yarn", "original_max_position_embeddings": 64}) == 0
    assert longrope_length(None) == 0


def failing_pass(rope: FixedRope, rotary: Any) -> None:
    with rope.applied():
        assert rotary.rope_type == "default"
        raise RuntimeError("within")


def test_a_pass_that_fails_leaves_the_module_as_it_was() -> None:
    module = family("Phi3")
    rotary = module.model.rotary_emb
    kind, table = rotary.rope_type, rotary.inv_freq
    rope = FixedRope(module, 512)
    with pytest.raises(RuntimeError, match="within"):
        failing_pass(rope, rotary)
    assert rotary.rope_type == kind and rotary.inv_freq is table
