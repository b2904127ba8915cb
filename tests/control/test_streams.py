"""The draft policy: settings; on recorded streams it is never slower than plain decoding and near the best length."""

from statistics import median

import pytest
import torch

from foretoken.control.config import CONTROLS, build, max_tokens, parse
from foretoken.control.fixed import Fixed
from foretoken.control.policy import DraftPolicy
from foretoken.core.errors import InvalidRequest

from .replay import (
    BUNDLED,
    DISPLACED,
    HEADED,
    KINDS,
    SCALED,
    SMOLLM2,
    WIDE_HEADED,
    WIDENED,
    Machine,
    Replay,
    best_constant,
    stream,
)

SETTINGS = {
    "SmolLM2": ("smollm2", SMOLLM2),
    "SmolLM2, head": ("smollm2", HEADED),
    "SmolLM2, 1.2 B": ("smollm2", WIDENED),
    "SmolLM2, 1.2 B, head": ("smollm2", WIDE_HEADED),
    "bundled pair": ("bundled", BUNDLED),
    "bundled pair, 0.74 B": ("bundled", SCALED),
}
SLOWED = {**SETTINGS, "SmolLM2, head, displaced caches": ("smollm2", DISPLACED)}
TEMPERATURES = (0.0, 1.0)
SHORT, USUAL = 0.88, 0.97  # of the best constant length: at least, and in the median; a stream has 240 to 400 tokens


def ratios(pair: str, machine: Machine) -> list[float]:
    """Speeds of the policy over those of the best constant length, stream by stream, each with a new engine."""
    texts = [stream(pair, kind, temperature) for temperature in TEMPERATURES for kind in KINDS]
    return [Replay.policy(machine).run(text).speedup / best_constant(machine, [text]) for text in texts]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.slow
def test_the_policy_is_near_the_best_constant_length_of_each_stream(setting: str) -> None:
    found = ratios(*SETTINGS[setting])
    assert min(found) > SHORT and median(found) > USUAL


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setting", SLOWED)
def test_the_policy_is_never_slower_than_plain_decoding(setting: str, kind: str, temperature: float) -> None:
    pair, machine = SLOWED[setting]
    assert Replay.policy(machine).run(stream(pair, kind, temperature)).speedup > 0.98


@pytest.mark.parametrize(
    ("setting", "gain"),
    [("SmolLM2", 1.04), ("SmolLM2, 1.2 B", 1.0), ("bundled pair", 1.15), ("bundled pair, 0.74 B", 1.3)],
)
@pytest.mark.slow
def test_a_stream_that_changes_is_faster_than_with_the_best_constant_length(setting: str, gain: float) -> None:
    """The kind of text changes every 200 tokens."""
    pair, machine = SETTINGS[setting]
    texts = [stream(pair, kind, temperature) for temperature in TEMPERATURES for kind in KINDS]
    replay = Replay.policy(machine)
    for first in (0, 200):
        for text in texts:
            replay.run(text, first, min(200, len(text["tokens"]) - first))
    assert replay.speedup > gain * best_constant(machine, texts)


def test_repeated_text_of_a_real_model_without_a_draft() -> None:
    for machine, speedup in ((SMOLLM2, 2.4), (WIDENED, 3.2)):
        assert Replay.policy(machine).run(stream("smollm2", "repetition", 0.0)).speedup > speedup


def test_controllers_by_name():
    policy, cpu = DraftPolicy(), torch.device("cpu")
    assert build(parse("goodput"), 12, cpu, policy) is policy and policy.max_tokens == 12 and not policy.constant
    assert policy.ledger is not None and policy.memory is not None
    assert build(parse({"name": "fixed", "memory": False}), 4, cpu, policy) == Fixed(4)
    assert build(parse({"name": "fixed", "guard": True, "memory": False}), 4, cpu, policy) is policy
    assert policy.constant and policy.max_tokens == 4 and policy.ledger is not None and policy.memory is None


def test_the_largest_draft_length():
    assert max_tokens(parse("goodput"), 4, given=False) == 16
    assert max_tokens(parse("goodput"), 32, given=False) == 32
    assert max_tokens(parse("goodput"), 4, given=True) == 4
    assert max_tokens(parse({"name": "goodput", "max_tokens": 6}), 4, given=False) == 6
    assert max_tokens(parse("goodput"), 0, given=False) == 0
    assert max_tokens(parse("fixed"), 4, given=False) == 4


@pytest.mark.parametrize(
    "control, message",
    [
        ("fastest", "one of fixed, goodput, got 'fastest'"),
        ({"guard": True}, "one of fixed, goodput"),
        (3, "one of fixed, goodput"),
        ({"name": "fixed", "depth": 3}, "unknown key.s. in control: depth; known: name, allowance, guard, memory"),
        ({"name": "goodput", "guard": 1}, "guard of control must be true or false"),
        ({"name": "goodput", "max_tokens": 0}, "max_tokens of control must be an integer from 1 to 4096"),
        ({"name": "goodput", "allowance": "much"}, "allowance must be a number"),
    ],
)
def test_wrong_configurations_are_refused(control, message):
    with pytest.raises(InvalidRequest, match=message):
        parse(control)
    assert set(CONTROLS) == {"fixed", "goodput"}
