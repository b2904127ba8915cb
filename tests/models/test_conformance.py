"""Every model, whatever is scored and whatever shares the pass, equals transformers' full forward pass."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.plain import text
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.models.base import Handle, Model, Scores
from foretoken.models.loading import load_model

from .tiny import ARCHITECTURES, Tiny, only_runner
from .trees import repeating

TOLERANCE = 1e-4
NATIVE = [
    (name, runner)
    for name, tiny in ARCHITECTURES.items()
    if tiny.native
    for runner in ("compiled", "torch")[: 1 + tiny.torch]
]
# The variants of one native family differ in nothing that transformers does not compute itself.
VARIANTS = ("llama-tied", "qwen2", "qwen2-sliding")
WRAPPED = [name for name, tiny in ARCHITECTURES.items() if tiny.torch and name not in (*VARIANTS, "llama4")]  # refused
DEVICES = ["cuda"] if torch.cuda.is_available() else []
ALL = NATIVE + [(name, "hf") for name in WRAPPED]
RECURRENT = [name for name, tiny in ARCHITECTURES.items() if tiny.native and not tiny.torch]
ON_DEVICES = [name for name, runner in NATIVE if runner == "torch"] + RECURRENT
ALL += [(name, device) for device in DEVICES for name in ON_DEVICES]
# One family of each kind is tested in seconds on every runner.
QUICK = ("llama", "gemma2", "qwen3.5", "mixtral", "gpt2")


class Reference:
    """transformers' module, and the folder where it is saved. What it said for one runner is kept for the next."""

    def __init__(self, tiny: Tiny, path: Path) -> None:
        self.path, self._module = path, tiny.build()
        self._module.save_pretrained(path)
        self._known: dict[Any, tuple[Tensor, dict[int, Tensor]]] = {}

    def __call__(
        self, paths: Sequence[Sequence[int]], first: int, layers: Sequence[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Plain causal forwards without any cache, over paths that share all rows but their last ones.

        Paths are padded on the right in one batch; no mask is needed, because rows do not attend to later ones.

        Returns:
            Logits after each path, [paths, V]. Hidden states of each layer: the rows from ``first`` on that are the
            last of no path, then the last row of each path.
        """
        asked = (tuple(map(tuple, paths)), first, tuple(layers))
        if asked not in self._known:
            self._known[asked] = self._forward(*asked)
        return self._known[asked]

    def _forward(
        self, paths: Sequence[Sequence[int]], first: int, layers: Sequence[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        width, shortest = max(map(len, paths)), min(map(len, paths))
        ids = torch.tensor([[*path] + [0] * (width - len(path)) for path in paths])
        with torch.no_grad():
            output = self._module(ids, output_hidden_states=bool(layers), use_cache=False)
        last = (torch.arange(len(paths)), torch.tensor([len(path) - 1 for path in paths]))
        hidden = {i: output.hidden_states[i] for i in layers}
        return output.logits[last], {i: torch.cat((h[0, first : shortest - 1], h[last])) for i, h in hidden.items()}


@dataclass
class Pair:
    """The model under test and what it must agree with."""

    model: Model
    reference: Reference

    def check(
        self, handle: Handle, draft: Draft, scores: Scores, nodes: Sequence[int], layers: Sequence[int] = ()
    ) -> None:
        """``scores`` holds one row for each of ``nodes`` (-1 the root), each equal to a forward on its own path."""
        assert scores.logits.shape == (len(nodes), self.model.vocab_size)
        paths = [[*handle.tokens, *(draft.ids[i] for i in draft.path(node))] for node in nodes]
        logits, hidden = self.reference(paths, scores.first, layers)
        assert (scores.logits.cpu() - logits).abs().max() < TOLERANCE
        for layer in layers:
            assert scores.taps[layer].shape == hidden[layer].shape
            difference = (scores.taps[layer].cpu() - hidden[layer]).abs().max()
            # In transformers' own float32, lfm2's numbers of up to 317 are 1e-4 away from float64.
            assert difference < TOLERANCE * max(1.0, float(hidden[layer].abs().max()) / 10), f"tap {layer}"


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    return cache(lambda name: Reference(ARCHITECTURES[name], tmp_path_factory.mktemp(name)))


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, id="-".join(each), marks=[pytest.mark.slow] * (each[0] not in QUICK)) for each in ALL],
)
def pair(request: pytest.FixtureRequest, references: Callable[[str], Reference]) -> Pair:
    name, runner = request.param
    reference = references(name)
    with only_runner(runner):
        device = runner if runner in DEVICES else "cpu"
        model = load_model(reference.path, "float32", device, "hf" if runner == "hf" else "native")
    return Pair(model, reference)


def tree(seed: int, size: int = 6) -> Draft:
    generator = random.Random(seed)
    parents = [-1, -1, *(generator.randrange(-1, i) for i in range(2, size))]
    return repeating(parents, 3 + seed % 50)


def rows(draft: Draft) -> list[int]:
    return list(range(-1, len(draft)))


def test_a_single_sequence_equals_transformers(pair: Pair) -> None:
    handle = pair.model.open(text(9, 0))
    (scores,) = pair.model.score([handle], [Draft.empty()])
    pair.check(handle, Draft.empty(), scores, [-1])
    pair.model.close(handle)


def test_single_token_prompt_then_single_steps(pair: Pair) -> None:
    handle = pair.model.open(text(1, 1))
    for token in text(9, 2):
        (scores,) = pair.model.score([handle], [Draft.empty()])
        pair.check(handle, Draft.empty(), scores, [-1])
        pair.model.commit([handle], [[token]])
    pair.model.close(handle)


def test_ragged_batch_with_drafts_of_all_sizes(pair: Pair) -> None:
    handles = [pair.model.open(text(n, n)) for n in (3, 12, 1, 7)]
    drafts = [Draft.chain(text(4, 20)), Draft.empty(), Draft.chain(text(1, 21)), tree(22)]
    for handle, draft, scores in zip(handles, drafts, pair.model.score(handles, drafts), strict=True):
        pair.check(handle, draft, scores, rows(draft))
        pair.model.close(handle)


@pytest.mark.slow
def test_prompt_longer_than_one_prefill_pass(pair: Pair) -> None:
    handles = [pair.model.open(text(300, 30)), pair.model.open(text(4, 31))]
    drafts = [Draft.chain(text(2, 32)), Draft.chain(text(3, 33))]
    for handle, draft, scores in zip(handles, drafts, pair.model.score(handles, drafts), strict=True):
        pair.check(handle, draft, scores, rows(draft))
        pair.model.close(handle)


@pytest.mark.slow
def test_taps_are_transformers_hidden_states(pair: Pair) -> None:
    layers = list(range(pair.model.num_layers + 1))
    handles = [pair.model.open(text(5, 40)), pair.model.open(text(300, 41))]
    drafts = [tree(42), Draft.chain(text(2, 43))]
    for handle, draft, scores in zip(handles, drafts, pair.model.score(handles, drafts, layers), strict=True):
        pair.check(handle, draft, scores, rows(draft), layers)
        pair.model.close(handle)


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_chain_commit_keeps_what_was_accepted(pair: Pair, accepted: int) -> None:
    handle = pair.model.open(text(6, 50))
    draft = Draft.chain(text(3, 51))
    pair.model.score([handle], [draft])
    pair.model.commit([handle], [[*draft.ids[:accepted], 7]])
    assert handle.cached == 6 + accepted and handle.pending == [7]
    after = Draft.chain(text(2, 52))
    (scores,) = pair.model.score([handle], [after])
    pair.check(handle, after, scores, rows(after))
    pair.model.close(handle)


def test_tree_commit_compacts_any_path(pair: Pair) -> None:
    draft = repeating((-1, 0, -1, 0, 2, 4))
    for node in range(-1, len(draft)):
        handle = pair.model.open(text(5, 60))
        pair.model.score([handle], [draft])
        pair.model.commit([handle], [[*(draft.ids[i] for i in draft.path(node)), 8]])
        assert handle.cached == 5 + len(draft.path(node))
        (scores,) = pair.model.score([handle], [tree(61)])
        pair.check(handle, tree(61), scores, rows(tree(61)))
        pair.model.close(handle)


def test_a_tree_deeper_than_the_window(pair: Pair) -> None:
    """A path of nine nodes with a leaf beside each: windows count positions, of which leaves take none of their own."""
    deep = repeating([-1, -1, *(i - 2 if i % 2 == 0 else i - 3 for i in range(2, 18))])
    assert max(deep.depths) == 9
    handles = [pair.model.open(text(n, 65 + n)) for n in (3, 10)]
    for handle, scores in zip(handles, pair.model.score(handles, [deep, deep]), strict=True):
        pair.check(handle, deep, scores, rows(deep))
        pair.model.close(handle)


def test_several_steps_of_a_batch(pair: Pair) -> None:
    handles = [pair.model.open(text(n, 70 + n)) for n in (2, 8, 5)]
    for step in range(4):
        drafts = [tree(80 + step), Draft.chain(text(step, 81)), tree(90 + step, 3)]
        for handle, draft, scores in zip(handles, drafts, pair.model.score(handles, drafts), strict=True):
            pair.check(handle, draft, scores, rows(draft))
        paths = [draft.path(len(draft) - 1) for draft in drafts]
        new = [[*(d.ids[i] for i in p), 9 + step] for d, p in zip(drafts, paths, strict=True)]
        pair.model.commit(handles, new)
    for handle in handles:
        pair.model.close(handle)


def test_growing_chain(pair: Pair) -> None:
    handles = [pair.model.open(text(4, 100)), pair.model.open(text(6, 101))]
    tokens = [text(4, 102), text(4, 103)]
    for size in range(5):
        drafts = [Draft.chain(t[:size]) for t in tokens]
        for handle, draft, scores in zip(handles, drafts, pair.model.score(handles, drafts), strict=True):
            pair.check(handle, draft, scores, [size - 1])
    pair.model.commit(handles, [[*tokens[0][:2], 5], [*tokens[1], 6]])
    assert [h.cached for h in handles] == [6, 10]
    for handle, scores in zip(handles, pair.model.score(handles, [Draft.empty()] * 2), strict=True):
        pair.check(handle, Draft.empty(), scores, [-1])
        pair.model.close(handle)


def test_growing_tree(pair: Pair) -> None:
    whole = repeating((-1, -1, 0, 0, 1, 3, 4), 10)
    handle = pair.model.open(text(7, 110))
    for start, end in ((0, 2), (2, 5), (5, 7)):
        part = Draft(whole.ids[:end], whole.parents[:end])
        (scores,) = pair.model.score([handle], [part])
        pair.check(handle, part, scores, ([-1] if start == 0 else []) + list(range(start, end)))
    pair.model.commit([handle], [[11, 11, 12, 50]])
    assert handle.cached == 10
    (scores,) = pair.model.score([handle], [Draft.empty()])
    pair.check(handle, Draft.empty(), scores, [-1])
    pair.model.close(handle)


def test_another_draft_replaces_the_first_and_starts_over(pair: Pair) -> None:
    handle = pair.model.open(text(5, 120))
    for draft in (
        Draft.chain(text(3, 121)),
        Draft.chain(text(4, 122)),
        tree(123),
        tree(123),
        Draft.chain([5, 6]),
        Draft.tree([5, 6, 7], (-1, -1, 1)),  # the same tokens below other parents
        Draft.empty(),
        Draft.empty(),
    ):
        (scores,) = pair.model.score([handle], [draft])
        pair.check(handle, draft, scores, rows(draft))
    pair.model.close(handle)


def test_pending_rows_are_computed_after_skipped_steps(pair: Pair) -> None:
    handles = [pair.model.open(text(5, 130)), pair.model.open(text(3, 131))]
    pair.model.score(handles, [Draft.chain(text(2, 132)), Draft.empty()])
    for step in range(3):
        pair.model.commit(handles, [text(3, 133 + step), text(1, 136 + step)])
    assert len(handles[0].pending) == 9
    drafts = [Draft.chain(text(2, 139)), tree(140)]
    for handle, draft, scores in zip(handles, drafts, pair.model.score(handles, drafts), strict=True):
        pair.check(handle, draft, scores, rows(draft))
        pair.model.close(handle)


def test_slots_are_reused_and_stale_rows_unseen(pair: Pair) -> None:
    first = [pair.model.open(text(30, 150 + i)) for i in range(3)]
    pair.model.score(first, [tree(153, 12)] * 3)
    pair.model.close(first[1])
    pair.model.close(first[1])
    again = pair.model.open(text(2, 154))
    batch = [first[2], again]  # neither neighbours nor in order
    drafts = [Draft.chain(text(2, 155)), tree(156)]
    pair.model.commit([first[2]], [[4]])
    for handle, draft, scores in zip(batch, drafts, pair.model.score(batch, drafts), strict=True):
        pair.check(handle, draft, scores, rows(draft))
    for handle in (*first, again):
        pair.model.close(handle)


def test_too_long_and_empty_are_refused(pair: Pair) -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        pair.model.open([])
    handle = pair.model.open(text(pair.model.max_length + 1, 160))
    with pytest.raises(InvalidRequest, match="max_model_len"):
        pair.model.score([handle], [Draft.empty()])
    pair.model.close(handle)
