"""Recurrent layers on the CUDA runner. Where there is no device, stand-ins take the place of kernels and graphs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.models.base import Handle
from foretoken.models.decoder import Decoder
from foretoken.models.families.architecture import Architecture
from foretoken.models.formats.checkpoint import load_config, open_weights
from foretoken.models.formats.layers import Layers, Source, read_ends
from foretoken.models.formats.quantize import Quantizer
from foretoken.models.runners import choose, torch_layers
from foretoken.models.runners.cuda import layout
from foretoken.models.runners.cuda.page_cache import DeviceMemory
from foretoken.models.runners.cuda.runner import CudaRunner
from foretoken.models.runners.triton_kernels.steps import ON, Steps, StepSizes, fill_steps, transfers
from foretoken.models.state.pages import PAGE
from foretoken.models.state.recurrent import RecurrentStates, StateShape
from foretoken.models.state.replay import NOWHERE, OWN, ZEROS, ReplayPlan

from . import recurrent_in_torch
from .plain import one_by_one, text
from .test_conformance import tree
from .test_graphs import DEVICE, META, Guarded, InTorch, Recorder, deep_tree, plan
from .tiny import ARCHITECTURES, only_runner
from .trees import repeating

pytestmark = pytest.mark.slow

HYBRIDS = [name for name, tiny in ARCHITECTURES.items() if tiny.native and not tiny.torch]
ONE_OF_EACH = ("qwen3.5", "lfm2", "falcon-h1")


@pytest.fixture(autouse=True)
def stand_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type != "cuda" or "needs_the_host" in request.node.name:
        monkeypatch.setattr(layout, "attention_kernels", lambda: InTorch)
        monkeypatch.setattr(torch_layers, "recurrent_kernels", lambda: recurrent_in_torch)


def parts(path: Path, quantizer: Quantizer | None = None, device: torch.device = DEVICE) -> tuple[Any, ...]:
    architecture, dtype = Architecture.of(load_config(path)), torch.float32
    source = Source(open_weights(path), architecture, dtype, quantizer)
    return architecture, Layers(source), read_ends(source), dtype, device


class Two:
    """The same model on the compiled runner and on the CUDA runner, taken through the same calls."""

    def __init__(self, path: Path) -> None:
        with only_runner("compiled"):
            self.compiled, self.cuda = (
                Decoder(load_config(path), open_weights(path), torch.float32, torch.device("cpu")) for _ in "ab"
            )
        self.recorder = Recorder(DEVICE)
        self.runner = self.cuda.runner = CudaRunner(*parts(path), capture=lambda _: self.recorder)
        self.pairs: list[tuple[Handle, Handle]] = []

    def open(self, *lengths: int) -> None:
        self.pairs += [(self.compiled.open(text(n, n)), self.cuda.open(text(n, n))) for n in lengths]

    def close(self, number: int) -> None:
        for model, handle in zip((self.compiled, self.cuda), self.pairs.pop(number), strict=True):
            model.close(handle)

    def score(self, drafts: list[Draft], taps: tuple[int, ...] = ()) -> None:
        """Both models compute the same logits and hidden states."""
        first, second = ([pair[side] for pair in self.pairs] for side in (0, 1))
        results = self.compiled.score(first, drafts, taps), self.cuda.score(second, drafts, taps)
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(other.logits, one.logits, rtol=1e-4, atol=1e-4)
            for layer in taps:
                torch.testing.assert_close(other.taps[layer].cpu(), one.taps[layer], rtol=1e-4, atol=1e-4)
        self.cuda.check()

    def commit(self, new: list[list[int]]) -> None:
        for side, model in enumerate((self.compiled, self.cuda)):
            model.commit([pair[side] for pair in self.pairs], new)


@pytest.mark.parametrize("name", HYBRIDS)
def test_equals_the_compiled_runner(name: str, tmp_path: Path) -> None:
    """Ragged batches of chains, trees and nothing, prompts in chunks, growing drafts, a slot that is used again."""
    two = Two(ARCHITECTURES[name].save(tmp_path))
    two.open(3, 40, 1, 300)
    two.score([Draft.chain(text(4, 20)), Draft.empty(), Draft.chain(text(1, 21)), tree(22)], (0, 1, 2))
    two.commit([[5], [6], [7], [8]])
    drafts = [tree(30), deep_tree(16, 31), Draft.chain(text(7, 32)), Draft.empty()]
    two.score(drafts)
    paths = [draft.path(len(draft) - 1) for draft in drafts]
    two.commit([[*(d.ids[i] for i in p), 9] for d, p in zip(drafts, paths, strict=True)])
    two.close(1)
    whole = deep_tree(18, 40)
    for end in (2, 5, 18):
        two.score([Draft(whole.ids[:end], whole.parents[:end]), Draft.chain(text(end, 41)), Draft.empty()])
        two.commit([[], [], [3]])
    two.open(6)
    two.score([deep_tree(14, 50), Draft.chain(text(3, 51)), tree(52), Draft.empty()])


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_drafts_leave_nothing_behind(name: str, tmp_path: Path) -> None:
    """The logits after rejected and accepted drafts are those of plain decoding."""
    two, follows = Two(ARCHITECTURES[name].save(tmp_path)), text(9, 2)
    wanted = one_by_one(two.cuda, text(7, 1), follows)
    handle = two.cuda.open(text(7, 1))
    for at in range(0, 9, 3):
        wrong = Draft.tree([50, 51, *follows[at : at + 2], 52], (-1, 0, -1, 2, 2))
        (scores,) = two.cuda.score([handle], [wrong])
        for row, depth in ((0, 0), (3, 1), (4, 2)):
            torch.testing.assert_close(scores.logits[row], wanted[at + depth], rtol=1e-5, atol=1e-5)
        two.cuda.commit([handle], [follows[at : at + 3]])


def test_a_graph_is_captured_without_changing_a_state(tmp_path: Path) -> None:
    """The pass that is captured has no step, since warming up computes it several times."""
    two = Two(ARCHITECTURES["qwen3.5"].save(tmp_path))
    two.open(5)
    two.score([Draft.empty()])
    for step in range(4):
        two.commit([[3 + step]])
        two.score([Draft.chain(text(step, step))])
    assert two.recorder.captured == 1 and two.recorder.replayed == 5
    two.commit([[9]])
    two.score([repeating((-1, -1, 0))])
    assert two.recorder.captured == 2  # a tree leaves copies of states behind


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_captured_work_never_needs_the_host(name: str, tmp_path: Path) -> None:
    path = ARCHITECTURES[name].save(tmp_path)
    runner = CudaRunner(*parts(path, device=META), capture=Guarded)
    assert [runner.acquire(), runner.acquire()] == [(0, 0), (1, 0)]
    result = runner.run(plan((0, 0, 20, deep_tree(9, 1)), (1, 0, 1, Draft.chain([3, 4, 5]))), (0, 1), True)
    assert result.logits is not None and result.logits.shape == (14, runner._architecture.vocab)


def test_a_pass_that_fails_spoils_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two = Two(ARCHITECTURES["qwen3.5"].save(tmp_path))
    two.open(20)
    two.score([Draft.empty()])
    two.commit([[4]])
    (handle,) = (pair[1] for pair in two.pairs)
    with monkeypatch.context() as patch:
        patch.setattr(two.runner._graphs, "run", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            two.cuda.score([handle], [Draft.empty()])
    two.score([Draft.chain([5, 6])])


def test_memory_of_states_is_counted_and_cleared(tmp_path: Path) -> None:
    two = Two(ARCHITECTURES["qwen3.5"].save(tmp_path))
    before = two.runner.nbytes()
    two.open(9, 9, 9)
    two.score([Draft.empty()] * 3)
    pages = 3 * PAGE * two.runner.kv_bytes_per_token
    assert two.runner.nbytes() - pages - before == 3 * two.runner.state_bytes > 0


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_prefix_is_found_with_its_state(name: str, tmp_path: Path) -> None:
    two, prompt = Two(ARCHITECTURES[name].save(tmp_path)), text(4 * PAGE + 20, 4)
    assert two.runner.enable_prefix_cache(1 << 26)
    for known in (False, True):
        pair = two.compiled.open(prompt), two.cuda.open(prompt)
        assert (pair[1].cached > 0) == known
        two.pairs.append(pair)
        two.score([tree(3)])
        two.commit([[7]])
        two.score([Draft.chain([8])])
        two.close(0)


def test_the_first_layers_have_states_of_their_own(tmp_path: Path) -> None:
    two = Two(ARCHITECTURES["qwen3.5"].save(tmp_path))
    two.open(6)
    two.score([Draft.empty()])
    first = two.runner.first(two.runner._architecture.first(1), None)
    assert first.acquire() == (0, 0) and first.state_bytes == two.runner.state_bytes // 2
    first.run(plan((0, 0, 6, Draft.empty())), (), True)
    two.commit([[7]])
    two.score([Draft.chain([8])])


def test_recurrent_layers_need_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    a = Architecture.of(ARCHITECTURES["lfm2"].build().config.to_dict())
    arguments = a, None, None, torch.float16, torch.device("cuda")
    monkeypatch.setattr(choose, "has_kernels", lambda device: False)
    with pytest.raises(InvalidRequest, match="Ampere"):
        choose.build_runner(*arguments)  # type: ignore[arg-type]
    monkeypatch.setattr(choose, "CudaRunner", lambda *given, **options: made.append(given))
    monkeypatch.setattr(choose, "has_kernels", lambda device: True)
    choose.build_runner(*arguments)  # type: ignore[arg-type]
    assert made == [(*arguments, None)]


def steps(*pairs: tuple[int, int]) -> ReplayPlan:
    """One sequence's steps of (source, target)."""
    result = ReplayPlan()
    for at, (source, target) in enumerate(pairs):
        result.step(source, target, -1, (at, -1))
    result.first_step.append(len(pairs))
    for words in (result.states, result.logs, result.log_rows):
        words.append(7)
    return result


def test_states_are_read_and_written_only_where_a_program_does_not_hold_them() -> None:
    chain = steps((ZEROS, OWN), (OWN, OWN), (OWN, 0), (0, 0), (0, NOWHERE))
    assert transfers(chain) == ([ZEROS, ON, ON, ON, ON], [NOWHERE, OWN, NOWHERE, NOWHERE, NOWHERE])
    branches = steps((OWN, 0), (0, 1), (1, NOWHERE), (1, NOWHERE), (0, NOWHERE))
    assert transfers(branches) == ([OWN, ON, ON, 1, 0], [0, 1, NOWHERE, NOWHERE, NOWHERE])
    leaves = steps((ZEROS, NOWHERE), (ZEROS, NOWHERE))
    assert transfers(leaves) == ([ZEROS, ZEROS], [NOWHERE, NOWHERE])


def test_a_table_holds_a_plan_and_zeros_are_a_pass_without_steps() -> None:
    given = steps((OWN, 0), (0, NOWHERE), (0, NOWHERE))
    given.move(2, 1 << 40, 16)
    sizes = StepSizes.of(given)
    assert sizes == StepSizes(sequences=8, steps=64, taps=2, copies=1)
    table = Steps.of(fill_steps(given, sizes, pinned=False), sizes)
    assert table.counts.tolist() == [3, 1] and table.ends.tolist() == [3] + [0] * 7
    assert table.inputs.view(-1, 2)[:3].tolist() == [[0, -1], [1, -1], [2, -1]]
    assert table.moved_to[0] == 1 << 40 and table.moved_stride[0] == 16
    idle = Steps.of(torch.zeros(sum(sizes.arrays), dtype=torch.int64), sizes)
    assert idle.counts.tolist() == [0, 0] and torch.equal(idle.firsts, idle.ends)


def test_device_memory_is_copied_by_address_and_given_back() -> None:
    memory = DeviceMemory(DEVICE)
    shape = StateShape(layers=2, state=0, inputs=4, window=2)
    states = RecurrentStates(memory, shape)
    one, other = memory.allocate(64), memory.allocate(64)
    memory._part(one, 64).copy_(torch.arange(64, dtype=torch.uint8))
    memory.copy(other + 8, one + 4, 16)
    assert memory._part(other, 64).tolist() == [0] * 8 + list(range(4, 20)) + [0] * 40
    memory.free(one)
    slot = states.slot(0)
    for rows in (3, 40):  # the log grows, and keeps its content
        states._allocate(slot, rows)
    assert slot.capacity == 48 and states.nbytes() == 2 * 48 * 4 * 4
