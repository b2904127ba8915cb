from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foretoken.core.errors import InvalidRequest
from foretoken.train.data import from_files, held_out_batches, standard_library, train_tokenizer, windows


@pytest.mark.slow
def test_standard_library_is_split_the_same_way_each_time_and_leaves_tests_out() -> None:
    first, second = standard_library(), standard_library()
    assert first == second
    assert len(first.train) > 300
    assert 0 < len(first.held_out) < len(first.train) // 20
    assert not set(first.train) & set(first.held_out)


def test_one_more_file_moves_no_other_between_train_and_held_out(tmp_path: Path) -> None:
    for i in range(120):
        (tmp_path / f"f{i}.py").write_text(f"x = {i}\n")
    before = from_files([tmp_path])
    (tmp_path / "another.py").write_text("y = 1\n")
    after = from_files([tmp_path])
    moved = set(before.held_out) ^ (set(after.held_out) - {"y = 1\n"})
    assert len(moved) <= 1  # only the border of the ranking


def test_too_few_or_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no such file"):
        from_files([tmp_path / "nothing"])
    (tmp_path / "one.py").write_text("x = 1")
    with pytest.raises(InvalidRequest, match="at least two"):
        from_files([tmp_path])


def test_prompts_are_read_a_line_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"one"\n{"prompt": "two"}\n\n{"text": "three"}\n')
    corpus = from_files([file])
    assert sorted((*corpus.train, *corpus.held_out)) == ["one", "three", "two"]
    for wrong in ("not json", "3", '{"question": "?"}'):
        file.write_text(f'"fine"\n{wrong}\n')
        with pytest.raises(InvalidRequest, match="text 2"):
            from_files([file])


@given(text=st.text(max_size=200))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_text_round_trips_through_the_tokenizer(tokenizer: Any, text: str) -> None:
    text = text.replace("<|endoftext|>", "")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) == text


def test_the_tokenizer_is_the_same_for_the_same_corpus(corpus: Any) -> None:
    assert train_tokenizer(corpus, 300).get_vocab() == train_tokenizer(corpus, 300).get_vocab()


def test_windows_depend_on_seed_and_index_alone() -> None:
    stream = torch.arange(1000)
    through = windows(stream, 3, 16, seed=5)
    batches = [next(through) for _ in range(50)]
    for start in (0, 7, 49):
        assert torch.equal(next(windows(stream, 3, 16, seed=5, start=start)), batches[start])
    assert not torch.equal(next(windows(stream, 3, 16, seed=6)), batches[0])


def test_an_epoch_shows_no_window_twice() -> None:
    per_epoch = (1000 - 16) // 16 // 3
    source = windows(torch.arange(1000), 3, 16, seed=0)
    seen = torch.cat([next(source)[:, 0] for _ in range(per_epoch)])
    assert len(seen.unique()) == len(seen) == per_epoch * 3


def test_short_texts_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least"):
        next(windows(torch.arange(20), 3, 16, seed=0))
    with pytest.raises(InvalidRequest, match="held-out"):
        held_out_batches(torch.arange(3), 2, 16)
