"""Our proposers behind vLLM's custom proposer class, called as vLLM calls it, by a small stand-in for its runner."""

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.interop_vllm import VllmProposer, best_path, predict

VOCAB, LONGEST = 24, 160
CONFIGS = [
    {"method": "suffix"},
    {"method": "ngram", "prompt_lookup_max": 3},
    {"method": "recycling"},
    {"method": "prediction"},
    {},
    {"method": "mixture", "members": [{"method": "suffix"}, {"method": "ngram"}]},
]


class Target:
    """A second-order table: what follows two tokens is fixed. Like a module of vLLM's it computes logits when asked."""

    def __init__(self, seed: int = 0) -> None:
        self.table = torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))

    def compute_logits(self, ends: list[tuple[int, int]]) -> torch.Tensor:
        return torch.stack([self.table[a, b] for a, b in ends])

    def plain(self, prompt: list[int], count: int) -> list[int]:
        text = list(prompt)
        for _ in range(count):
            text.append(int(self.table[text[-2], text[-1]].argmax()))
        return text[len(prompt) :]


def vllm_config(options: dict[str, Any], depth: int = 4, stages: int = 1) -> SimpleNamespace:
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=depth),
        model_config=SimpleNamespace(max_model_len=LONGEST, get_vocab_size=lambda: VOCAB),
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        additional_config={"foretoken": options} if options else {},
    )


@dataclass
class Row:
    name: str
    text: list[int]
    goal: int  # tokens of the whole text
    unread: int = 0  # passes that only read the prompt
    draft: list[int] = field(default_factory=list)


class Runner:
    """Rows side by side in one array, the last one moved into a gap, as vLLM condenses its batch."""

    def __init__(self, options: dict[str, Any], depth: int = 4, stages: int = 1) -> None:
        self.target = Target()
        self.drafter = VllmProposer(vllm_config(options, depth, stages))
        self.drafter.load_model(self.target)
        self.rows: list[Row] = []
        self.done: dict[str, list[int]] = {}
        self.passes = 0

    def add(self, name: str, prompt: list[int], count: int, unread: int = 0) -> None:
        self.rows.append(Row(name, list(prompt), len(prompt) + count, unread))

    def step(self) -> None:
        self.passes += 1
        ends, sizes = [], []
        for row in self.rows:
            text = row.text + row.draft
            first = len(row.text)
            ends += [(text[at - 2], text[at - 1]) for at in range(first, len(text) + 1)]
            sizes.append(len(row.draft) + 1)
        best = self.target.compute_logits(ends).argmax(-1).split(sizes)
        sampled = [self._judged(row, own.tolist()) for row, own in zip(self.rows, best, strict=True)]
        ids = np.zeros((8, LONGEST + 8), np.int32)
        lengths = np.zeros(8, np.int32)
        for at, row in enumerate(self.rows):
            ids[at, : len(row.text)], lengths[at] = row.text, len(row.text)
        for row, draft in zip(self.rows, self.drafter.propose(sampled, lengths, ids), strict=True):
            assert len(draft) <= self.drafter.depth
            row.draft = draft
        for at in [at for at, row in enumerate(self.rows) if len(row.text) >= row.goal][::-1]:
            row = self.rows[at]
            self.done[row.name] = row.text[: row.goal]
            last = self.rows.pop()
            if at < len(self.rows):
                self.rows[at] = last

    def _judged(self, row: Row, best: list[int]) -> list[int]:
        if row.unread:
            row.unread -= 1
            return []
        kept = 0
        while kept < len(row.draft) and row.draft[kept] == best[kept]:
            kept += 1
        new = [*row.draft[:kept], best[kept]]
        row.text += new
        return new

    def finish(self) -> None:
        while self.rows:
            self.step()


@pytest.mark.parametrize("options", CONFIGS, ids=lambda options: options.get("method", "default"))
def test_greedy_text_is_the_same_and_takes_fewer_passes(options):
    runner = Runner(options)
    prompts = {"a": [1, 2, 3], "b": [4, 5], "c": [1, 2, 3], "d": [7, 8, 9, 10]}
    lengths = {"a": 70, "b": 20, "c": 60, "d": 90}
    for name, prompt in prompts.items():
        runner.add(name, prompt, lengths[name], unread=2 if name == "d" else 0)
    runner.step()
    runner.add("late", [11, 12], 60)
    runner.finish()
    for name, prompt in (prompts | {"late": [11, 12]}).items():
        assert runner.done[name][len(prompt) :] == runner.target.plain(prompt, len(runner.done[name]) - len(prompt))
    # A prompt of a few tokens is a useless prediction.
    assert runner.passes < 80 or options == {"method": "prediction"}, "plain decoding takes 92"
    assert runner.drafter.unlearned == 0 and runner.drafter.inner.failures == 0


def test_recycling_learns_from_the_targets_logits():
    runner = Runner({"method": "recycling"})
    runner.add("a", [1, 2], 40)
    runner.finish()
    table = runner.drafter.inner.inner.table
    assert (table[:, 0] >= 0).sum() > 5
    before = table.copy()
    runner.target.compute_logits([(0, 0)] * 17)  # another number of rows than were drafted
    ids = np.array([[3, 4, 5]], np.int32)
    runner.drafter.propose([[5]], np.array([3]), ids)
    assert runner.drafter.unlearned == 1
    assert (runner.drafter.inner.inner.table != before).sum() <= 2, "the prompt's own successions alone"


def test_finished_texts_serve_as_drafts_for_the_same_prompt():
    runner = Runner({"method": "suffix"}, depth=8)
    runner.add("first", [1, 2, 3], 60)
    runner.finish()
    first = runner.passes
    runner.add("again", [1, 2, 3], 60)
    runner.finish()
    assert runner.passes - first < first
    assert runner.done["again"] == runner.done["first"]
    assert runner.drafter.num_requests == 1, "the next call ends the last one"


def test_pipeline_batches_take_turns():
    drafter = VllmProposer(vllm_config({"method": "suffix"}, stages=2))
    texts = [[1, 2, 3, 1, 2], [5, 6, 7, 5, 6]]
    for turn in range(6):
        text = texts[turn % 2]
        drafts = drafter.propose([[text[-1]]], np.array([len(text)]), np.array([text], np.int32))
        assert drafts[0][:1] == [text[len(text) % 3]]
        text.append(drafts[0][0])
    assert drafter.num_requests == 2
    for _ in range(5):
        drafter.propose([[]], np.array([3]), np.array([[1, 2, 3]], np.int32))
    assert drafter.num_requests == 0


def test_a_prediction_is_followed_from_the_first_token_on():
    text = Target().plain([1, 2], 30)
    predict([1, 2], [1, 2, *text])
    runner = Runner({"method": "prediction"}, depth=8)
    runner.add("a", [1, 2], 30)
    runner.finish()
    assert runner.done["a"] == [1, 2, *text] and runner.passes < 15


def test_no_draft_goes_beyond_the_longest_text():
    drafter = VllmProposer(vllm_config({"method": "suffix"}))
    text = ([1, 2, 3] * LONGEST)[: LONGEST - 2]
    for size, maximum in ((LONGEST - 2, 1), (LONGEST - 1, 0)):
        row = np.array([[*text, 3][:size]], np.int32)
        assert len(drafter.propose([[int(row[0, -1])]], np.array([size]), row)[0]) <= maximum


def test_best_path_has_the_largest_sum_of_probabilities():
    scores = list(map(math.log, (0.5, 0.4, 0.1, 0.4, 0.3)))
    tree = Draft.tree([1, 2, 3, 4, 5], (-1, -1, 0, 1, 3), scores=scores)
    assert best_path(tree, 4) == [2, 4, 5]
    assert best_path(tree, 2) == [2, 4] and best_path(tree, 1) == [1] and best_path(tree, 0) == []
    assert best_path(Draft.chain([4, 5, 6]), 2) == [4, 5] and best_path(Draft.empty(), 3) == []


@pytest.mark.parametrize(
    "options, words",
    [
        ({"method": "draft_model"}, "does not draft inside vLLM"),
        ({"method": "mixture", "members": [{"method": "medusa"}]}, "does not draft inside vLLM"),
        ({"method": "mixture", "members": ["suffix"]}, "method None"),
        ("suffix", "must be a speculative configuration"),
        ({"method": "suffix", "num_speculative_tokens": 3}, "set the draft length in vLLM's"),
        ({"method": "suffix", "wrong": 1}, "unknown key"),
        ({"method": "recycling", "model": "/nowhere.safetensors"}, "cannot read"),
    ],
)
def test_unsupported_configurations_are_refused(options, words):
    with pytest.raises((InvalidRequest, OSError), match=words):
        VllmProposer(vllm_config(options))


def test_methods_that_learn_from_logits_need_a_target_that_has_them():
    with pytest.raises(InvalidRequest, match="shows no logits"):
        VllmProposer(vllm_config({"method": "recycling"})).load_model(object())
    VllmProposer(vllm_config({"method": "suffix"})).load_model(object())
