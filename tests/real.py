"""Real pretrained models in tests."""

from pathlib import Path

import pytest

from real_models import real_model_path


def real_model(name: str) -> Path:
    """Returns the path of a model that ``make real`` fetched; without it the test is skipped."""
    if not (file := real_model_path(name)).exists():
        pytest.skip(f"{file.name} is not there; `make real` fetches it")
    return file
