"""The draft policy on recorded streams: never slower than plain decoding, and near the best constant draft length."""

from __future__ import annotations

from statistics import median

import pytest

from .replay import (
    BUNDLED,
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
TEMPERATURES = (0.0, 1.0)
SHORT, USUAL = 0.88, 0.97  # of the best constant length: at least, and in the median; a stream has 240 to 400 tokens


def ratios(pair: str, machine: Machine) -> list[float]:
    """Speeds of the policy over those of the best constant length, stream by stream, each with a new engine."""
    texts = [stream(pair, kind, temperature) for temperature in TEMPERATURES for kind in KINDS]
    return [Replay.policy(machine).run(text).speedup / best_constant(machine, [text]) for text in texts]


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_policy_is_near_the_best_constant_length_of_each_stream(setting: str) -> None:
    found = ratios(*SETTINGS[setting])
    assert min(found) > SHORT and median(found) > USUAL


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_policy_is_never_slower_than_plain_decoding(setting: str, kind: str, temperature: float) -> None:
    pair, machine = SETTINGS[setting]
    assert Replay.policy(machine).run(stream(pair, kind, temperature)).speedup > 0.98


@pytest.mark.parametrize(
    ("setting", "gain"),
    [("SmolLM2", 1.04), ("SmolLM2, 1.2 B", 1.0), ("bundled pair", 1.15), ("bundled pair, 0.74 B", 1.3)],
)
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
