"""A corpus of a few hundred lines."""

from pathlib import Path

import pytest

from foretoken.train.data import Corpus


def lines(first: int, count: int) -> str:
    return "".join(f"def f{i}(x):\n    return x * {i} + {i % 7}\n\n" for i in range(first, first + count))


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    return Corpus("a few functions", tuple(lines(i * 20, 20) for i in range(6)), (lines(500, 20),))


@pytest.fixture
def texts(corpus: Corpus, tmp_path: Path) -> Path:
    """The corpus as a folder of files."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i, text in enumerate((*corpus.train, *corpus.held_out)):
        (folder / f"f{i}.py").write_text(text)
    return folder
