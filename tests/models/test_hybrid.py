"""Models with recurrent layers: whatever is drafted, cached or resumed, rows have the bits of plain decoding."""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from tests.models.plain import text

from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.models.base import Handle, Model
from foretoken.models.loading import load_model
from foretoken.models.resumable import Resumable
from foretoken.models.state.hybrid import HybridState
from foretoken.models.state.pages import PAGE
from foretoken.models.state.recurrent import RecurrentStates
from foretoken.quantize.run import quantize_checkpoint

from .plain import one_by_one
from .tiny import ARCHITECTURES, VOCAB, only_runner
from .trees import repeating

pytestmark = pytest.mark.slow

HYBRID = ("qwen3.5", "qwen3-next", "lfm2", "bamba", "qwen3.5-experts")
NUMBERS = {"float32": ("float32", None), "bfloat16": ("bfloat16", None), "int8": ("bfloat16", "int8")}
CASES = [(name, numbers, "compiled") for name in HYBRID for numbers in NUMBERS]
CASES += [("falcon-h1", "float32", "compiled"), ("granite-hybrid", "bfloat16", "compiled")]
CASES += [("nemotron-h", "int8", "compiled")]
CASES += [(*case[:2], "cuda") for case in CASES if torch.cuda.is_available()]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the folder of an architecture."""
    return cache(lambda name: ARCHITECTURES[name].save(tmp_path_factory.mktemp(name)))


@pytest.fixture(params=CASES, ids=lambda case: "-".join(case))
def open_model(request: pytest.FixtureRequest, saved: Callable[[str], Path]) -> Callable[[], Model]:
    name, numbers, runner = request.param
    dtype, quantization = NUMBERS[numbers]
    path = saved(name)
    torch.set_num_threads(2)  # rows and heads are shared out among threads; ``conftest`` sets it back

    def build() -> Model:
        with only_runner(runner):
            device = "cuda" if runner == "cuda" else "cpu"
            return load_model(path, dtype, device, "native", quantization=quantization)

    return build


def test_drafts_and_batches_change_no_bit(open_model: Callable[[], Model]) -> None:
    """Three sequences with chains, growing drafts and trees, each following a text of its own through them."""
    model, texts, prompts = open_model(), [text(40, seed) for seed in range(3)], [text(n, 9 + n) for n in (1, 5, 300)]
    wanted = [one_by_one(model, prompt, follows) for prompt, follows in zip(prompts, texts, strict=True)]
    handles, done, chance = [model.open(prompt) for prompt in prompts], [0, 0, 0], random.Random(1)
    for _ in range(12):
        drafts, paths = [], []
        for at, follows in zip(done, texts, strict=True):
            draft, path = along(chance, follows[at : at + chance.randrange(4)])
            drafts.append(draft)
            paths.append(path)
        if chance.random() < 0.5:  # grow the drafts
            model.score(handles, [Draft(draft.ids[:1], draft.parents[:1]) for draft in drafts])
            model.commit(handles, [()] * 3)
        for number, scores in enumerate(model.score(handles, drafts)):
            for depth, node in enumerate([-1, *paths[number]]):
                assert torch.equal(scores.logits[node + 1], wanted[number][done[number] + depth])
        accepted = [chance.randrange(len(path) + 1) for path in paths]
        model.commit(handles, [t[d : d + n + 1] for t, d, n in zip(texts, done, accepted, strict=True)])
        done = [d + n + 1 for d, n in zip(done, accepted, strict=True)]
        model.check()


def states_of(model: Model) -> RecurrentStates:
    return pages_of(model).states


def pages_of(model: Model) -> HybridState:
    pages: HybridState = model.runner._pages  # type: ignore[attr-defined]
    return pages


def along(chance: random.Random, follows: list[int]) -> tuple[Draft, list[int]]:
    """A tree with a path of these tokens and other nodes at random places, and the nodes of the path."""
    tokens, parents, path = [], [], []
    for token in follows:
        for _ in range(chance.randrange(3)):
            tokens.append(chance.randrange(3, VOCAB))
            parents.append(chance.randrange(-1, len(tokens) - 1))
        parents.append(path[-1] if path else -1)
        path.append(len(tokens))
        tokens.append(token)
    return Draft.tree(tokens, tuple(parents)), path


def test_growing_drafts_change_no_bit(open_model: Callable[[], Model]) -> None:
    """A draft model's own chain and tree, a node or a level a pass."""
    model, prompt, follows = open_model(), text(7, 1), text(5, 2)
    wanted = one_by_one(model, prompt, follows)
    handle = model.open(prompt)
    for size in range(5):
        (scores,) = model.score([handle], [Draft.chain(follows[:size])])
        assert torch.equal(scores.logits[-1], wanted[size])
    model.commit([handle], [follows[:2]])
    whole = Draft.tree([9, follows[2], follows[3], 8, follows[4]], (-1, -1, 1, 1, 2))
    for size, row in ((0, 2), (2, 3), (3, 4)):
        (scores,) = model.score([handle], [Draft(whole.ids[:size], whole.parents[:size])])
        assert torch.equal(scores.logits[-1], wanted[row])


@pytest.mark.parametrize("cut", [1, 3, 64, 100, 256])
def test_a_prompt_may_be_cut_anywhere(open_model: Callable[[], Model], cut: int) -> None:
    model, prompt = open_model(), text(150, 3)
    handle = model.open(prompt)
    (whole,) = model.score([handle], [Draft.empty()])
    parts = model.open(prompt[:cut])
    while len(parts.tokens) < len(prompt):
        model.score([parts], [repeating((-1, -1, 0))])
        model.commit([parts], [prompt[len(parts.tokens) : len(parts.tokens) + cut]])
    (scores,) = model.score([parts], [Draft.empty()])
    assert torch.equal(scores.logits, whole.logits)


def test_prefix_cache_hits_change_no_bit(open_model: Callable[[], Model]) -> None:
    """Hits in the middle of a prompt, and at the end of a preempted sequence."""
    prompt, follows = text(3 * PAGE + 20, 4), text(PAGE + 30, 5)
    fresh, model = open_model(), open_model()
    wanted = one_by_one(fresh, prompt, follows)
    assert model.enable_prefix_cache(1 << 26)
    handle = model.open(prompt)
    for at, token in enumerate(follows[: PAGE + 10]):
        (scores,) = model.score([handle], [Draft.empty()])
        assert torch.equal(scores.logits[0], wanted[at])
        model.commit([handle], [[token]])
    model.close(handle)  # as in a preemption
    handle = model.open(handle.tokens)
    assert handle.cached == 4 * PAGE
    for at in range(PAGE + 10, PAGE + 30):
        (scores,) = model.score([handle], [Draft.empty()])
        assert torch.equal(scores.logits[0], wanted[at])
        model.commit([handle], [[follows[at]]])
    half = [*prompt[: 2 * PAGE + 9], *text(80, 6)]
    again = model.open(half)
    every = pages_of(model)._every
    assert again.cached == 2 * PAGE // (every * PAGE) * every * PAGE  # snapshots may be as large as several pages
    (scores,) = model.score([again], [Draft.empty()])
    assert torch.equal(scores.logits[0], one_by_one(fresh, half, [1])[0])
    model.check()


def test_truncated_and_resumed_sequences_change_no_bit(open_model: Callable[[], Model]) -> None:
    """A state cannot be rewound, so what was truncated too far is computed again."""
    model = open_model()
    resumable, prompt, follows = Resumable(model), text(90, 7), text(4, 8)
    wanted = one_by_one(model, prompt[:80], follows)
    handle = resumable.open(prompt)
    resumable.score([handle], [repeating((-1, 0, -1))])
    with resumable.parked(1):
        resumable.close(handle)
    handle = resumable.open([*prompt[:80]])
    for at, token in enumerate(follows):
        (scores,) = resumable.score([handle], [Draft.empty()])
        assert torch.equal(scores.logits[0], wanted[at])
        resumable.commit([handle], [[token]])


def test_a_pass_that_fails_spoils_no_state(open_model: Callable[[], Model], monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt, follows = open_model(), text(20, 9), text(4, 10)
    wanted = one_by_one(model, prompt, follows)
    handle = model.open(prompt)
    model.score([handle], [Draft.empty()])
    model.commit([handle], [follows[:1]])
    with monkeypatch.context() as patch:
        patch.setattr(states_of(model), "finish", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.score([handle], [Draft.empty()])
    model.commit([handle], [()])
    (scores,) = model.score([handle], [Draft.chain(follows[1:3])])
    assert all(torch.equal(row, wanted[1 + at]) for at, row in enumerate(scores.logits))


def test_without_kernels_recurrent_layers_are_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = ARCHITECTURES["lfm2"].save(tmp_path_factory.mktemp("lfm2"))
    with only_runner("torch"), pytest.raises(InvalidRequest, match="kernels alone"):
        load_model(path, "float32", "cpu")


def test_quantizing_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="recurrent layers"):
        quantize_checkpoint(ARCHITECTURES["lfm2"].save(tmp_path / "a"), tmp_path / "b", "int8")


def test_the_state_of_a_sequence_is_known(open_model: Callable[[], Model]) -> None:
    model = open_model()
    handles: list[Handle] = [model.open(text(9, seed)) for seed in range(3)]
    model.score(handles, [Draft.empty()] * 3)
    assert states_of(model).nbytes() == 3 * model.state_bytes > 0
