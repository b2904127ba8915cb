"""Recurrent states: whatever is drafted, accepted, truncated, evicted or resumed, a row sees its own text's state."""

import ctypes
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from foretoken.core.draft import Draft
from foretoken.models.base import Handle, growing
from foretoken.models.runners.pass_plan import PassPlan
from foretoken.models.state.hybrid import HybridState
from foretoken.models.state.pages import PAGE
from foretoken.models.state.recurrent import FLOAT, StateShape
from foretoken.models.state.replay import NOTHING, NOWHERE, OWN, ZEROS, ReplayPlan

pytestmark = pytest.mark.slow

LAYERS, WINDOW = 2, 2
SHAPE = StateShape(LAYERS, 1, 1, WINDOW)
PAGE_BYTES = 64
PRIME = 65521  # states stay whole numbers that float32 holds


@dataclass
class Heap:
    """Memory by address."""

    held: dict[int, ctypes.Array[ctypes.c_char]] = field(default_factory=dict)

    def allocate(self, size: int) -> int:
        block = ctypes.create_string_buffer(max(size, 1))
        self.held[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def free(self, address: int) -> None:
        del self.held[address]

    def copy(self, to: int, source: int, size: int) -> None:
        ctypes.memmove(to, source, size)


def change(state: float, tokens: Sequence[float], layer: int) -> float:
    """A state after one more token; ``tokens`` begins with it and goes back."""
    return (31 * state + sum((5 + 3 * i) * token for i, token in enumerate(tokens)) + layer) % PRIME


def after(tokens: Sequence[int], layer: int) -> float:
    """The state after a text."""
    state = 0.0
    for at in range(len(tokens)):
        state = change(state, [tokens[i] for i in range(at, max(-1, at - WINDOW - 1), -1)], layer)
    return state


def numbers(address: int) -> ctypes.Array[ctypes.c_float]:
    return (ctypes.c_float * (1 << 20)).from_address(address)


def run(plan: ReplayPlan, tokens: Sequence[int], layer: int) -> dict[int, float]:
    """Does what the kernels do in one layer. Returns the state after each row of the pass."""
    rows: dict[int, float] = {}
    copies: dict[int, float] = {}
    steps, ends = range(len(plan.sources)), list(plan.first_step[1:])
    sequence_of = [next(s for s, end in enumerate(ends) if step < end) for step in steps]

    def inputs(code: int, sequence: int) -> float | None:
        if code == NOTHING:
            return None
        if code >= 0:
            return tokens[code]
        return numbers(plan.logs[sequence])[layer * plan.log_rows[sequence] + ~code]

    read = []
    for step, sequence in zip(steps, sequence_of, strict=True):
        codes = plan.inputs[step * (WINDOW + 1) : (step + 1) * (WINDOW + 1)]
        read.append([value for code in codes if (value := inputs(code, sequence)) is not None])
    moved = [inputs(code, sequence) for code, sequence in zip(plan.moved, plan.moved_of, strict=True)]
    for value, address, stride in zip(moved, plan.moved_to, plan.moved_stride, strict=True):
        assert value is not None
        numbers(address)[layer * stride] = value
    for step, sequence in zip(steps, sequence_of, strict=True):
        own = numbers(plan.states[sequence])
        source, target = plan.sources[step], plan.targets[step]
        state = change(own[layer] if source == OWN else 0.0 if source == ZEROS else copies[source], read[step], layer)
        if target == OWN:
            own[layer] = state
        elif target != NOWHERE:
            assert target < plan.copies
            copies[target] = state
        if plan.saves[step] >= 0:
            numbers(plan.snapshots[plan.saves[step]])[layer] = state
        row = plan.inputs[step * (WINDOW + 1)]
        if row >= 0:
            rows[row] = state
    return rows


@dataclass
class Sequences:
    """A model whose logits are its states."""

    state: HybridState = field(default_factory=lambda: HybridState(Heap(), PAGE_BYTES, SHAPE))
    computed: int = 0

    def open(self, prompt: Sequence[int]) -> Handle:
        slot, known = self.state.acquire(prompt)
        return Handle(slot, list(prompt), known)

    def close(self, handle: Handle) -> None:
        self.state.release(handle.slot)

    def score(self, handles: Sequence[Handle], drafts: Sequence[Draft], fails: bool = False) -> None:
        for handle in handles:
            handle.cached = self.state.resume(handle.slot, handle.cached)
        done = [growing(handle, draft) for handle, draft in zip(handles, drafts, strict=True)]
        plan = PassPlan.of(handles, drafts, done)
        for part in plan.parts:
            self.state.reserve(part.slot, part.first, part.first + part.count)
        steps = self.state.plan(plan.parts)
        if fails:
            return
        results = [run(steps, plan.tokens, layer) for layer in range(LAYERS)]
        self.state.finish()
        self.computed += len(plan.tokens)
        base = 0
        for handle, draft, part in zip(handles, drafts, plan.parts, strict=True):
            for row in range(part.count):
                place = part.first + row
                node = place - len(handle.tokens)
                text = handle.tokens[: place + 1] + [draft.ids[i] for i in draft.path(node)]
                for layer, states in enumerate(results):
                    assert states[base + row] == after(text, layer)
            base += part.count
            handle.cached = len(handle.tokens)
            handle.nodes[:], handle.parents[:] = draft.ids, draft.parents
        self.state.check()

    def commit(self, handle: Handle, tokens: Sequence[int]) -> None:
        self.state.accept(handle.slot, *handle.advance(tokens))
        self.state.publish(handle.slot, handle.tokens, handle.cached)
        self.state.check()


def random_tree(chance: random.Random, size: int) -> Draft:
    parents = [chance.randrange(-1, i) for i in range(size)]
    return Draft.tree([chance.randrange(50) for _ in parents], tuple(parents))


def accepted(chance: random.Random, draft: Draft) -> list[int]:
    """The tokens of a random path, and perhaps one more."""
    path = draft.path(chance.randrange(-1, len(draft)))
    return [*(draft.ids[i] for i in path), *([chance.randrange(50)] if chance.random() < 0.8 else [])]


@pytest.mark.parametrize("seed", range(8))
def test_every_row_sees_the_state_of_its_own_text(seed: int) -> None:
    """Random trees, growing drafts, commits, truncations and failed passes, with and without prefix caching."""
    chance, model = random.Random(seed), Sequences()
    if seed % 2:
        model.state.enable_prefix_cache(chance.choice((10, 100)) * PAGE_BYTES)
    shared = [chance.randrange(50) for _ in range(3 * PAGE)]
    handles = [model.open(shared[: chance.choice((1, 5, PAGE, 2 * PAGE + 3))]) for _ in range(3)]
    for _ in range(60):
        batch = [handle for handle in handles if chance.random() < 0.7] or handles[:1]
        drafts = [random_tree(chance, chance.choice((0, 1, 4, 9))) for _ in batch]
        if chance.random() < 0.1:
            model.score(batch, drafts, fails=True)
        for size in {0, len(drafts[0]) // 2}:  # the drafts grow, or are replaced
            grown = [Draft(draft.ids[:size], draft.parents[:size]) for draft in drafts]
            if chance.random() < 0.3:
                model.score(batch, grown)
        model.score(batch, drafts)
        for handle, draft in zip(batch, drafts, strict=True):
            model.commit(handle, accepted(chance, draft))
            if chance.random() < 0.1:
                model.commit(handle, [chance.randrange(50) for _ in range(chance.choice((1, PAGE)))])
            if chance.random() < 0.1:
                handle.truncate(chance.randrange(1, len(handle.tokens) + 1))
        if chance.random() < 0.2:
            index = chance.randrange(len(handles))
            model.close(handles[index])
            text = [*shared[: chance.randrange(1, len(shared))], *([7] if chance.random() < 0.5 else [])]
            handles[index] = model.open(text)
    for handle in handles:
        model.close(handle)
    model.state.check()


def decode(model: Sequences, handle: Handle, count: int) -> None:
    for step in range(count):
        model.score([handle], [Draft.empty()])
        model.commit(handle, [step % 50])


def test_a_prompt_reuses_states_and_keys_together() -> None:
    model = Sequences()
    model.state.enable_prefix_cache(1000 * PAGE_BYTES)
    prompt = list(range(3 * PAGE + 10))
    first = model.open(prompt)
    assert first.cached == 0
    decode(model, first, 2)
    second = model.open(prompt)
    assert second.cached == 3 * PAGE
    model.computed = 0
    decode(model, second, 1)
    assert model.computed == 10
    other = model.open([*prompt[: 2 * PAGE], *([49] * 70)])
    decode(model, other, 1)  # its rows are checked against its own text


def test_without_a_state_no_keys_are_reused() -> None:
    model = Sequences()
    model.state.enable_prefix_cache(1000 * PAGE_BYTES)
    prompt = list(range(2 * PAGE + 1))
    first = model.open(prompt)
    decode(model, first, 1)
    for page in model.state._slots[first.slot].pages:
        model.state.snapshots.drop(page.serial)
    assert model.open(prompt).cached == 0


def test_snapshots_stay_within_their_bound() -> None:
    model = Sequences()
    model.state.enable_prefix_cache(8 * (PAGE_BYTES + SHAPE.snapshot_bytes))
    for start in range(6):
        handle = model.open([start, *range(4 * PAGE)])
        decode(model, handle, 3)
        model.close(handle)
    assert 0 < model.state.snapshots.allocated <= model.state.snapshots.limit
    model.state.check()


def test_a_sequence_that_is_preempted_resumes_at_its_last_page() -> None:
    model = Sequences()
    model.state.enable_prefix_cache(1000 * PAGE_BYTES)
    handle = model.open(list(range(10)))
    decode(model, handle, 2 * PAGE)
    model.close(handle)
    again = model.open(handle.tokens)
    assert again.cached == 2 * PAGE
    decode(model, again, 1)


def test_a_snapshot_follows_a_sequence() -> None:
    """With snapshots as large as many pages, a sequence keeps one at the end of its prompt and one at its last page."""
    state = HybridState(Heap(), 2, SHAPE)
    model = Sequences(state)
    state.enable_prefix_cache(10_000)
    handle = model.open(list(range(2 * PAGE)))
    decode(model, handle, 5 * PAGE)
    pages = state._slots[handle.slot].pages
    assert [at + 1 for at, page in enumerate(pages) if page.serial in state.snapshots] == [1, 6]


def test_a_log_needs_no_more_than_its_rows() -> None:
    model = Sequences()
    handle = model.open([1])
    for _ in range(50):
        draft = Draft.chain([1, 2, 3, 4])
        model.score([handle], [draft])
        model.commit(handle, [1, 2, 9])
    assert model.state.states.slot(handle.slot).capacity <= 16
    assert array("i", model.state.states.slot(handle.slot).window) and model.state.nbytes() > 0
    assert SHAPE.bytes == LAYERS * (1 + 16) * FLOAT
