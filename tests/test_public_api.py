"""The public names, no more and no fewer."""

from __future__ import annotations

import subprocess
import sys

import pytest

import foretoken

NAMES = {
    "LLM",
    "SamplingParams",
    "SpeculativeConfig",
    "RequestOutput",
    "CompletionOutput",
    "StreamPiece",
    "SpeculationStats",
    "custom_generate",
    "ForetokenError",
    "__version__",
}


def test_all_is_exact():
    assert set(foretoken.__all__) == NAMES
    assert len(foretoken.__all__) == len(NAMES)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_name_resolves(name):
    assert getattr(foretoken, name) is not None


def test_other_names_are_an_error():
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        foretoken.Llm  # noqa: B018


def test_importing_the_package_is_light():
    code = "import sys, foretoken; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
