from __future__ import annotations

import ast
import json
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from foretoken.bench.workloads import REPAIRS
from foretoken.core.errors import InvalidRequest
from foretoken.train.data import Corpus

from .repair_script import repair

IGNORED, RepairTask = repair.IGNORED, repair.RepairTask

TEXT = """class Clock:
    def tick(self, number):
        if number == self.number and "late":
            return [self.number, number]
        import time
        return time.time()
"""


def test_each_bug_changes_one_position_or_nothing() -> None:
    rng = np.random.default_rng(0)
    for bug in repair.BUGS:
        spoilt = {bug(TEXT, rng) for _ in range(40)}
        assert len(spoilt - {TEXT}) > (0 if bug.__name__ == "_assign" else 1), bug.__name__
        assert all(abs(len(text) - len(TEXT)) <= 8 for text in spoilt)
        assert bug("", rng) == ""
    assert repair.BUGS[5]("if a == b:\n    pass", rng) == "if a = b:\n    pass"


def test_planting_depends_on_the_numbers_alone() -> None:
    texts = [repair.plant(TEXT, np.random.default_rng(seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert TEXT not in texts
    assert repair.plant("", np.random.default_rng(0)) == ""


def test_snippets_are_whole_statements(corpus: Corpus, tokenizer: Any) -> None:
    data = repair.snippets(corpus.train, tokenizer, 64, seed=0)
    assert set(data.by_length) <= set(repair.lengths(64))
    listed = [text for texts in data.by_length.values() for text in texts]
    assert len(listed) == len(set(listed)) > 5
    for text in listed:
        ast.parse(text)
        assert len(tokenizer(text)["input_ids"]) <= 64 - 12
    assert data.tokens >= 64
    assert repair.snippets(corpus.train, tokenizer, 64, seed=0) == data
    with pytest.raises(InvalidRequest, match="no Python"):
        repair.snippets(("1 +", "prose, not code"), tokenizer, 64, seed=0)


def test_batches_resume_and_end_with_the_end_token(corpus: Corpus, tokenizer: Any) -> None:
    data = repair.snippets(corpus.train, tokenizer, 64, seed=0)
    first = list(islice(repair.batches(data, 256, seed=1), 5))
    again = next(repair.batches(data, 256, seed=1, start=4))
    assert all(torch.equal(a, b) for a, b in zip(first[4], again, strict=True))
    end = tokenizer.eos_token_id
    for labels, source, mask in first:
        assert labels.shape == source.shape == mask.shape
        for label, ids, counted in zip(labels, source, mask, strict=True):
            right, question = label[label != IGNORED], ids[counted]
            assert right[-1] == question[-1] == end
            assert (right == end).sum() == (question == end).sum() == 1
            ast.parse(tokenizer.decode(right[:-1]))


def test_an_input_that_exceeds_its_row_keeps_the_original(tokenizer: Any) -> None:
    labels, source, mask = repair.task_batch(tokenizer, [RepairTask("x = 1\n" * 20, "x = 1")], 16)
    assert torch.equal(source[mask], labels[labels != IGNORED])


def test_held_out_tasks_come_from_held_out_files(corpus: Corpus, tokenizer: Any) -> None:
    tasks = repair.held_out(8, 3, corpus, tokenizer, window=64)
    assert tasks == repair.held_out(8, 3, corpus, tokenizer, window=64) != repair.held_out(8, 4, corpus, tokenizer, 64)
    for broken, right in tasks:
        assert broken != right
        assert right in corpus.held_out[0]
        assert all(right not in text for text in corpus.train)
    batches = repair.held_out_batches(tokenizer, tasks, 64, 128)
    assert sum(len(labels) for labels, _, _ in batches) == len(tasks)


def test_the_packaged_tasks_are_of_that_kind(tokenizer: Any) -> None:
    tasks = [json.loads(line) for line in REPAIRS.read_text(encoding="utf-8").splitlines()]
    assert len(tasks) == 32
    for task in tasks:
        assert task["prompt"] != task["completion"]
        assert len(task["prompt"]) > 50
