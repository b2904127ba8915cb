"""The public names, no more and no fewer."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import foretoken

NAMES = {
    "LLM",
    "LoRARequest",
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


@pytest.mark.slow
def test_class_names_are_unique_in_the_package():
    files = Path(foretoken.__file__).parent.rglob("*.py")
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    names = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    public = Counter(name for name in names if not name.startswith("_"))
    assert [name for name, count in public.items() if count > 1] == []
