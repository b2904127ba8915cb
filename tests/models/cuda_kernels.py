"""Triton's kernels against torch, on a CUDA device or by Triton's interpreter: ``test_cuda_kernels.py`` runs this."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.models import recurrent_in_torch
from tests.models.recurrent_kernels import SIZES, Sequences
from tests.models.sampled_rows import LAWS, Steps, compare_drafts
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.models.families.layers import RecurrentMixer
from foretoken.models.formats.quantize import Int8, quantize_rows
from foretoken.models.runners.cuda import choice
from foretoken.models.runners.cuda.graphs import CudaCapture, Graphs
from foretoken.models.runners.linear import FIXED_ROWS, by_fixed_rows
from foretoken.models.runners.triton_kernels import attention, has_kernels, recurrent, steps
from foretoken.models.runners.triton_kernels.attention import attend_rows, move, store
from foretoken.models.runners.triton_kernels.experts import ExpertStack, Routes, combine
from foretoken.models.runners.triton_kernels.rows import STRETCH, UNIT, LayerPages, PassRows
from foretoken.models.runners.triton_kernels.rowwise import int8_linear, rms_norm, rotate_heads, silu_mul
from foretoken.models.state.pages import PAGE

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, KV_HEADS, DIM, SLOTS, LENGTH = 6, 2, 24, 3, 600


@pytest.fixture(scope="session", autouse=True)
def _row_invariant_dot() -> Iterator[None]:
    """Replaces the interpreter's matrix products: BLAS may sum a row in an order that depends on others."""
    if DEVICE.type != "cpu":
        yield
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def dot(_: Any, a: Any, b: Any, sums: Any, *_options: Any) -> Any:
        left, right = (operand.data.astype(sums.data.dtype) for operand in (a, b))
        return TensorHandle(sums.data + (left.T[:, :, None] * right[:, None, :]).sum(axis=0), sums.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", dot)
        yield


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def ints(values: list[int] | list[list[int]]) -> Tensor:
    return torch.tensor(values, device=DEVICE)


class Paged:
    """A cache of one layer whose pages lie in any order.

    Args:
        keys: what it holds, [slots, kv_heads, length, D].
        values: likewise.
        scaled: whether it is one of int8, which holds any numbers then.
    """

    def __init__(self, keys: Tensor, values: Tensor, scaled: bool = False) -> None:
        slots, heads, length, dim = keys.shape
        per_slot = -(-length // PAGE)
        dtype = torch.int8 if scaled else keys.dtype
        half = heads * PAGE * dim * dtype.itemsize
        self._size = 2 * half + scaled * 2 * 4 * heads * PAGE
        memory = torch.zeros(slots * per_slot * self._size, dtype=torch.uint8, device=DEVICE)
        order = torch.randperm(slots * per_slot, generator=torch.Generator().manual_seed(5))
        self.places = (order * self._size // UNIT).view(slots, per_slot).to(DEVICE)
        self._memory, self._order, self._half, self._dim = memory, order, half, dim
        at = (2 * half // 4, 2 * half // 4 + heads * PAGE) if scaled else None
        typed, scales = memory.view(dtype), memory.view(torch.float32)
        self.layer = LayerPages(typed, scales, heads, dim, dim, 0, half // dtype.itemsize, at)
        self._shape = slots, per_slot, heads, PAGE
        if scaled:
            memory.copy_(torch.randint(0, 256, memory.shape, generator=torch.Generator().manual_seed(6)))
            scales.view(-1, self._size // 4)[:, 2 * half // 4 :] = 0.01
        else:
            self.write(keys, values)

    def write(self, keys: Tensor, values: Tensor) -> None:
        slots, per_slot, heads, _ = self._shape
        pages = self._memory.view(-1, self._size)
        for half, numbers in enumerate((keys, values)):
            whole = F.pad(numbers, (0, 0, 0, per_slot * PAGE - numbers.shape[2]))
            by_page = whole.view(slots, heads, per_slot, PAGE, -1).transpose(1, 2).reshape(slots * per_slot, -1)
            pages[self._order.to(DEVICE), half * self._half : (half + 1) * self._half] = by_page.view(torch.uint8)

    def read(self, length: int) -> list[Tensor]:
        """Returns keys and values as numbers, [slots, kv_heads, length, D]."""
        slots, per_slot, heads, _ = self._shape
        pages = self._memory.view(-1, self._size)[self._order.to(DEVICE)]
        parts = []
        for half in range(2):
            own = pages[:, half * self._half : (half + 1) * self._half].contiguous().view(self.layer.base.dtype)
            numbers = own.view(slots, per_slot, heads, PAGE, self._dim)
            if self.layer.scales_at is not None:
                start = self.layer.scales_at[half] * 4
                scales = pages[:, start : start + 4 * heads * PAGE].contiguous().view(torch.float32)
                numbers = numbers.float() * scales.view(slots, per_slot, heads, PAGE, 1)
            parts.append(numbers.transpose(1, 2).reshape(slots, heads, per_slot * PAGE, -1)[:, :, :length])
        return parts

    def rows(self, counts: list[int], slots: list[int]) -> PassRows:
        """Returns the layout of rows of chains."""
        return PassRows(
            counts=ints(counts),
            ends=ints(counts),
            pages=self.places[slots].t().contiguous(),
            places=ints([max(0, count - 1) for count in counts]),
            prefixes=ints(counts),
            paths=torch.zeros((0, len(counts)), dtype=torch.int64, device=DEVICE),
            tiles=torch.arange(len(counts), device=DEVICE),
            sizes=torch.ones(len(counts), dtype=torch.int64, device=DEVICE),
            longest=LENGTH,
        )


def expected(query: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float, sinks: Tensor | None) -> Tensor:
    """Returns attention of one row, [heads, D], over the keys that it sees, [kv_heads, n, D]."""
    k, v = (each.double().repeat_interleave(HEADS // KV_HEADS, 0) for each in (keys, values))
    scores = (k @ query.double()[..., None])[..., 0] * scale
    scores = (scores / softcap).tanh() * softcap if softcap else scores
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None]), -1)
    shares = scores.softmax(-1)[:, : k.shape[1]]
    return (shares[:, None] @ v)[:, 0].float()


def first_key(count: int, window: int) -> int:
    if window < 0:
        return (count - 1) // -window * -window
    return max(0, count - window) if window else 0


def test_a_gpu_has_kernels_and_a_cpu_none() -> None:
    assert has_kernels(DEVICE) == (DEVICE.type == "cuda")


def cached(slots: int = SLOTS, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Returns keys and values of a layer."""
    return [numbers(slots, KV_HEADS, LENGTH, DIM, seed=seed).to(dtype) for seed in (0, 1)]


@pytest.mark.parametrize("window", [0, 7, 300, -64, -500])
@pytest.mark.parametrize("softcap, sink", [(0.0, False), (5.0, False), (0.0, True)])
def test_attention_of_rows(window: int, softcap: float, sink: bool) -> None:
    counts, slots = [1, 70, STRETCH, STRETCH + 1, 0, LENGTH], [0, 1, 2, 0, 0, 1]
    keys, values = cached()
    queries, sinks = numbers(len(counts), HEADS, DIM, seed=2), numbers(HEADS, seed=3) if sink else None
    cache = Paged(keys, values)
    mixed = attend_rows(queries, cache.layer, cache.rows(counts, slots), 0.3, window, softcap, sinks)
    for row, (count, slot) in enumerate(zip(counts, slots, strict=True)):
        if not count:
            assert not mixed[row].any()
            continue
        seen = slice(first_key(count, window), count)
        right = expected(queries[row], keys[slot, :, seen], values[slot, :, seen], 0.3, softcap, sinks)
        torch.testing.assert_close(mixed[row], right, rtol=1e-5, atol=1e-5)


def test_biases_by_position() -> None:
    counts, slots = [1, 70, LENGTH], [0, 1, 2]
    keys, values = cached()
    queries, biases = numbers(3, HEADS, DIM, seed=2), numbers(HEADS, LENGTH, seed=3)
    cache = Paged(keys, values)
    mixed = attend_rows(queries, cache.layer, cache.rows(counts, slots), 0.3, biases=biases)
    for row, (count, slot) in enumerate(zip(counts, slots, strict=True)):
        k, v = (each[slot, :, :count].double().repeat_interleave(HEADS // KV_HEADS, 0) for each in (keys, values))
        scores = (k @ queries[row].double()[..., None])[..., 0] * 0.3 + biases[:, :count] - biases[:, count - 1 : count]
        right = (scores.softmax(-1)[:, None] @ v)[:, 0].float()
        torch.testing.assert_close(mixed[row], right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [3, 20])
def test_values_that_are_the_first_numbers_of_keys(heads: int) -> None:
    """Latent attention: one key for all heads, of which more than sixteen are shared out among programs."""
    width, dim, count = 40, 24, 70
    latents, queries = numbers(1, 1, 128, width), numbers(1, heads, width, seed=2)
    memory = latents.reshape(2, PAGE, width).clone()
    memory[0, 9] = 0.0
    size = PAGE * width * 4
    cache = LayerPages(memory.view(-1), memory.view(-1), 1, width, dim, 0, 0)
    rows = Paged(latents, latents).rows([count], [0])
    rows = replace(rows, pages=ints([[0], [size // UNIT]]))
    fresh = latents[0, 0, 9].view(1, 1, width)
    store(fresh, fresh, cache, replace(rows, places=ints([9])))
    assert torch.equal(memory.view(1, 1, 128, width), latents)
    mixed = attend_rows(queries, cache, rows, 0.3)
    scores = (queries[0].double() @ latents[0, 0, :count].double().T) * 0.3
    right = (scores.softmax(-1) @ latents[0, 0, :count, :dim].double()).float()
    torch.testing.assert_close(mixed[0], right, rtol=1e-5, atol=1e-5)


def test_rows_that_see_each_other() -> None:
    """Three rows of a block see all of it; the window of the second call counts from their own positions."""
    keys, values = cached(1)
    cache, queries = Paged(keys, values), numbers(3, HEADS, DIM, seed=2)
    rows = replace(cache.rows([298, 299, 300], [0, 0, 0]), ends=ints([300] * 3))
    for window in (0, 5):
        mixed = attend_rows(queries, cache.layer, rows, 0.3, window)
        for row, count in enumerate((298, 299, 300)):
            seen = slice(first_key(count, window), 300)
            right = expected(queries[row], keys[0, :, seen], values[0, :, seen], 0.3, 0.0, None)
            torch.testing.assert_close(mixed[row], right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_path_in_any_cache_rows_has_the_bits_of_plain_decoding(dtype: torch.dtype) -> None:
    """A row at the depth of three sees a prefix and three nodes, which lie in the order of a tree."""
    prefix, path = 250, [252, 250, 257]
    keys, values = cached(1, dtype)
    queries, cache = numbers(1, HEADS, DIM, seed=2).to(dtype), Paged(keys, values)
    plain = cache.rows([prefix + 3], [0])
    tree = replace(plain, prefixes=ints([prefix]), paths=ints([[place] for place in [*path, 0, 0, 0, 0, 0]]))
    got = attend_rows(queries, cache.layer, tree, 0.3)
    for buffer in (keys, values):
        buffer[:, :, prefix : prefix + 3] = buffer[:, :, path].clone()
    cache.write(keys, values)
    assert torch.equal(got, attend_rows(queries, cache.layer, plain, 0.3))


@pytest.mark.parametrize("scaled", [False, True])
def test_bits_of_a_row_do_not_depend_on_other_rows_and_the_length_of_the_cache(scaled: bool) -> None:
    counts, slots = [300, 0, 9, 300], [0, 0, 1, 2]
    keys, values = cached()
    cache, queries = Paged(keys, values, scaled), numbers(4, HEADS, DIM, seed=2)
    together = attend_rows(queries, cache.layer, cache.rows(counts, slots), 0.3)
    for row in (0, 2, 3):
        alone = replace(cache.rows([counts[row]], [slots[row]]), longest=counts[row])
        assert torch.equal(attend_rows(queries[row : row + 1], cache.layer, alone, 0.3)[0], together[row])
    assert together[0].any()


TILED: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "window": {"window": 40},
    "chunks": {"window": -64},
    "softcap": {"softcap": 5.0},
    "biases": {"biases": numbers(HEADS, LENGTH, seed=3)},
}


@pytest.mark.parametrize("name", TILED)
def test_rows_of_a_tile_have_the_bits_of_single_rows(name: str) -> None:
    """Two sequences; tiles of up to five rows of three heads, one of which begins a stretch, and padding at the end."""
    options = dict(TILED[name])
    dtype = options.pop("dtype", torch.float32)
    counts, slots = [1, 2, *range(254, 260), 0], [0] * 2 + [1] * 6 + [0]
    cache, queries = Paged(*cached(2, dtype)), numbers(len(counts), HEADS, DIM, seed=2).to(dtype)
    single = cache.rows(counts, slots)
    tiled = replace(single, tiles=ints([0, 2, 7, 0]), sizes=ints([2, 5, 2, 0]))
    each = attend_rows(queries, cache.layer, single, 0.3, **options)
    assert torch.equal(attend_rows(queries, cache.layer, tiled, 0.3, **options), each)


def test_sums_over_stretches_are_computed_for_some_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Paged(*cached(1))
    queries, rows = numbers(5, HEADS, DIM, seed=2), cache.rows([300, 1, 600, 0, 257], [0] * 5)
    whole = attend_rows(queries, cache.layer, rows, 0.3)
    monkeypatch.setattr(attention, "PARTIAL", 2 * 4 * HEADS * 3 * DIM)  # two rows
    assert torch.equal(attend_rows(queries, cache.layer, rows, 0.3), whole)
    chain = cache.rows([300, 301, 302, 303, 304], [0] * 5)
    whole = attend_rows(queries, cache.layer, chain, 0.3)
    tiled = replace(chain, tiles=ints([0, 0, 0, 0, 0]), sizes=ints([5, 0, 0, 0, 0]))  # one tile in three parts
    assert torch.equal(attend_rows(queries, cache.layer, tiled, 0.3), whole)


def test_store_writes_finite_numbers_and_no_padding() -> None:
    cache = Paged(*[torch.zeros(SLOTS, KV_HEADS, 8, DIM, device=DEVICE) for _ in "kv"])
    keys, values = numbers(3, KV_HEADS, DIM), numbers(3, KV_HEADS, DIM, seed=1)
    keys[0, 0, 0], values[1, 1, 1] = torch.inf, torch.nan
    store(keys, values, cache.layer, cache.rows([3, 5, 0], [1, 2, 0]))
    for buffer, fresh in zip(cache.read(8), (keys, values), strict=True):
        right = torch.zeros_like(buffer)
        right[1, :, 2], right[2, :, 4] = fresh[0].nan_to_num(0, 0, 0), fresh[1].nan_to_num(0, 0, 0)
        assert torch.equal(buffer, right)


def test_accepted_rows_move_in_order() -> None:
    """Row 7 moves and is then overwritten; the last sequence moves a row to another page."""
    size, blocks = 2048, [(0, 24), (64 * 24, 4)]  # starts of blocks of 64 rows, and bytes of a row
    memory = torch.randint(0, 256, (2, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    expected, start = memory.clone(), memory.data_ptr()
    moves = [(0, 5, 0, 7), (0, 6, 0, 8), (0, 7, 0, 9), (0, 63, 1, 2)]
    for page, row, source_page, source in moves:
        for at, width in blocks:
            source_row = expected[source_page, at + source * width : at + (source + 1) * width].clone()
            expected[page, at + row * width : at + (row + 1) * width] = source_row
    columns = [[start + size * page, row, start + size * other, source] for page, row, other, source in moves]
    move(ints([0, 3, 4]), ints(columns).T.contiguous(), ints([list(block) for block in blocks]).T.contiguous(), 24)
    assert torch.equal(memory, expected)


@pytest.mark.parametrize("name", ["chain", "tree"])
def test_nodes_that_lie_elsewhere_complete_the_rows_of_a_pass(name: str) -> None:
    """Rows of two sequences: two pending tokens and a draft, then one pending token and a draft."""
    drafts = {"chain": [(-1, 0, 1), (-1, 0)], "tree": [(-1, -1, 1, 2, 1), (-1, 0, -1)]}[name]
    prefixes, rows, nodes_of = (8, 5), list[dict[str, int]](), list[Tensor]()
    expected = list[list[int]]()
    for parents, prefix, pending in zip(drafts, prefixes, (2, 1), strict=True):
        tokens = [30 + prefix + node for node in range(len(parents))]
        up = [node - parent for node, parent in enumerate(parents)]
        nodes_of.append(torch.tensor([tokens, up, [7 + node for node in up]], dtype=torch.int32, device=DEVICE))
        first, stride = nodes_of[-1].data_ptr(), 4 * len(parents)
        rows += [{"position": prefix - pending + row, "place": prefix - pending + row} for row in range(pending)]
        expected += [[0, 0, 0, 0]] * pending
        depths = list[int]()
        for node, parent in enumerate(parents):
            depths.append(1 + depths[parent] if parent >= 0 else 1)
            rows.append({"node": first + 4 * node, "stride": stride, "place": prefix + node, "prefix": prefix})
            expected.append([tokens[node], up[node], 7 + up[node], depths[node]])
    columns = {
        key: ints([row.get(key, 0) for row in rows]) for key in ("node", "stride", "position", "place", "prefix")
    }
    tokens, counts, ends = (torch.zeros_like(columns["node"]) for _ in "abc")
    paths = torch.zeros(4 if name == "tree" else 0, len(rows), dtype=torch.int64, device=DEVICE)
    order = columns["node"], columns["stride"], tokens, columns["position"], counts, ends, columns["place"]
    result = attention.read_nodes(*order, columns["prefix"], paths)
    assert result.tolist() == expected
    at = 0
    for parents, prefix, pending in zip(drafts, prefixes, (2, 1), strict=True):
        at += pending
        for node, parent in enumerate(parents):
            above = paths[:, at + parent].tolist()[: expected[at + node][3] - 1] if parent >= 0 else []
            position = prefix - 1 + expected[at + node][3]
            assert int(tokens[at + node]) == expected[at + node][0]
            assert [int(each[at + node]) for each in (columns["position"], counts, ends)] == [
                position,
                position + 1,
                position + 1,
            ]
            if name == "tree":
                assert paths[: len(above) + 1, at + node].tolist() == [*above, prefix + node]
        at += len(parents)


@pytest.mark.parametrize("held", [torch.float32, torch.float16])
def test_states_that_lie_elsewhere_are_read_in_the_order_of_their_addresses(held: torch.dtype) -> None:
    states = numbers(5, 2, 40).to(held)
    addresses = [[states[row, layer].data_ptr() for row, layer in ((3, 1), (0, 0))], [states[1, 0].data_ptr(), 0]]
    result = attention.read_states(ints([*addresses, [0, 0]]), 40, held, torch.float32)
    zeros = torch.zeros(40, device=DEVICE)
    first, second = torch.cat((states[3, 1], states[0, 0])), torch.cat((states[1, 0].float(), zeros))
    assert torch.equal(result, torch.stack((first.float(), second, torch.cat((zeros, zeros)))))


def test_states_are_written_to_their_addresses() -> None:
    states, memory = numbers(3, 40).half(), torch.zeros(3, 40, dtype=torch.float16, device=DEVICE)
    attention.write_states(ints([memory[2].data_ptr(), 0, memory[0].data_ptr()]), states)
    assert torch.equal(memory, torch.stack((states[2], torch.zeros_like(states[1]), states[0])))


@pytest.mark.parametrize("dtype, near", [(torch.float32, 1e-5), (torch.float16, 0.02)])
def test_int8_keys_and_values_have_a_scale_for_each_head_and_row(dtype: torch.dtype, near: float) -> None:
    count = 70
    cache = Paged(*[torch.zeros(1, KV_HEADS, count, DIM, device=DEVICE) for _ in "kv"], scaled=True)
    fresh = [numbers(count, KV_HEADS, DIM, seed=seed).to(dtype) for seed in (0, 1)]
    fresh[0][3], fresh[1][4, 0] = 0.0, 1e4
    store(*fresh, cache.layer, cache.rows(list(range(1, count + 1)), [0] * count))
    held = [each[0].transpose(0, 1) for each in cache.read(count)]
    for numbers_held, written in zip(held, fresh, strict=True):
        scale = written.float().abs().amax(-1, keepdim=True) / 127
        assert ((numbers_held - written.float()).abs() <= 0.501 * scale).all()
    queries = numbers(1, HEADS, DIM, seed=2).to(dtype)
    mixed = attend_rows(queries, cache.layer, cache.rows([count], [0]), 0.3)
    right = expected(queries[0], *(each.transpose(0, 1) for each in held), 0.3, 0.0, None)
    torch.testing.assert_close(mixed[0].float(), right, rtol=near, atol=near)


def test_row_wise_kernels_equal_torch() -> None:
    x, weight = numbers(5, 96), numbers(96, seed=1)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), F.rms_norm(x, (96,), weight, 1e-6))
    wide = numbers(5, 2600)
    gate, up = wide.chunk(2, -1)
    torch.testing.assert_close(silu_mul(wide), F.silu(gate) * up, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("paired", [False, True])
def test_rotation_of_a_part_of_each_head(paired: bool) -> None:
    x, cos, sin = numbers(5, 3, DIM), numbers(5, 1, 16, seed=1), numbers(5, 1, 16, seed=2)
    turned = x[..., :16]
    other = turned.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if paired else turned.roll(8, -1)
    right = torch.cat((turned * cos + other * sin, x[..., 16:]), -1)
    torch.testing.assert_close(rotate_heads(x, cos, sin, paired), right)


def test_int8_products_are_those_of_rounded_rows() -> None:
    weight = Int8(torch.randint(-127, 128, (40, 48), dtype=torch.int8, device=DEVICE), numbers(40).abs())
    x, bias = numbers(20, 48, seed=1), numbers(40, seed=2)
    values, scales = quantize_rows(x)
    right = (values.double() @ weight.values.double().T * scales * weight.scales + bias).float()
    torch.testing.assert_close(int8_linear(x, weight.values, weight.scales, bias), right, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("own_inputs", [False, True])
def test_experts_of_rows(own_inputs: bool) -> None:
    weights, biases = numbers(5, 40, 48), numbers(5, 40, seed=1)
    chosen = torch.tensor([[0, 3, 2], [4, 1, 0], [2, 2, 2], [1, 0, 4]], device=DEVICE)
    counts = ints([4, 0, 1, 9])
    x = numbers(4, 3, 48, seed=2) if own_inputs else numbers(4, 48, seed=2)
    outputs = ExpertStack(weights, biases)(x, Routes.of(chosen, counts, 5))
    each = x if own_inputs else x[:, None].expand(-1, 3, -1)
    right = torch.einsum("rtoi,rti->rto", weights[chosen], each) + biases[chosen]
    right[1] = 0.0
    torch.testing.assert_close(outputs, right, rtol=1e-4, atol=1e-4)
    shares = numbers(4, 3, seed=3)
    torch.testing.assert_close(combine(outputs, shares), (outputs * shares[..., None]).sum(1))


def test_a_row_has_the_same_bits_for_any_number_of_rows_of_its_experts() -> None:
    weights, x = numbers(3, 40, 48), numbers(20, 48, seed=2)
    chosen, counts = torch.tensor([[1, 2]] * 20, device=DEVICE), ints([1] * 20)
    together = ExpertStack(weights, None)(x, Routes.of(chosen, counts, 3))  # a tile and a part of one
    for row in (0, 15, 16, 19):
        own = slice(row, row + 1)
        alone = ExpertStack(weights, None)(x[own], Routes.of(chosen[own], counts[own], 3))
        assert torch.equal(alone[0], together[row])


def test_products_are_computed_by_fixed_rows() -> None:
    seen: list[int] = []

    def multiply(x: Tensor) -> Tensor:
        seen.append(len(x))
        return x * 2.0

    for count in (1, FIXED_ROWS, FIXED_ROWS + 1, 3 * FIXED_ROWS):
        x = numbers(count, 8)
        assert torch.equal(by_fixed_rows(multiply, x), x * 2.0)
    assert set(seen) == {FIXED_ROWS}


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small arrays for the interpreter, and several programs for each head."""
    monkeypatch.setattr(steps, "MIN_SEQUENCES", 2)
    monkeypatch.setattr(steps, "MIN_STEPS", 4)
    monkeypatch.setattr(recurrent, "TILE", 256)


TREE = Draft.tree([7, 8, 11, 12, 9], (-1, -1, 1, 1, 2))  # 8, 11, 9 is a path


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("kind", SIZES)
def test_recurrent_layers_equal_torch(kind: RecurrentMixer) -> None:
    both = [
        Sequences(kind, DEVICE, recurrent.mix, torch.float32, 2),
        Sequences(kind, torch.device("cpu"), recurrent_in_torch.mix, torch.float32, 2),
    ]
    results: list[list[Tensor]] = [[], []]
    for own, outputs in zip(both, results, strict=True):
        handles = [own.open([3, 4, 5]), own.open([30])]
        outputs += own.score(handles, [TREE, Draft.chain([31])])
        own.commit(handles[0], [8, 11, 9])
        own.commit(handles[1], [33])
        outputs += own.score(handles, [Draft.empty(), Draft.empty()])
        outputs.append(own.snapshot())
        assert own.snapshot().any()
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("kind", SIZES)
def test_drafts_neighbours_and_chunks_change_no_bit_of_recurrent_layers(kind: RecurrentMixer) -> None:
    own = Sequences(kind, DEVICE, recurrent.mix, torch.bfloat16)
    prompt, follows = [3, 4], [8, 11, 9, 20]
    wanted = own.one_by_one(prompt, follows)
    (whole,) = own.score([own.open([*prompt, *follows[:3]])], [Draft.empty()])
    assert torch.equal(whole[0], wanted[3])
    handle, beside = own.open(prompt), own.open([40])
    scored, _ = own.score([handle, beside], [TREE, Draft.chain([42])])
    assert all(torch.equal(scored[row], wanted[depth]) for depth, row in enumerate((0, 2, 3, 5)))
    own.commit(handle, follows[:2])
    own.score([handle], [Draft.chain([30])])  # it is rejected
    own.commit(handle, [])
    (scored,) = own.score([handle], [Draft.chain(follows[2:3])])
    assert all(torch.equal(scored[row], wanted[2 + row]) for row in range(2))
    own.states.check()


class Again:
    """Runs the work anew in the place of a graph."""

    def __init__(self, device: torch.device) -> None:
        """Takes what ``CudaCapture`` takes."""

    def capture(self, function: Any) -> Any:
        return function


def chooser() -> choice.DeviceChooser:
    return choice.DeviceChooser(Graphs(DEVICE, Again if DEVICE.type == "cpu" else CudaCapture))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter
@pytest.mark.parametrize("logprobs", [None, 3])
def test_tokens_of_all_laws_are_those_of_the_host(logprobs: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "ROWS_AT_ONCE", 16)
    steps = Steps(chooser(), 70, [*LAWS, "plain", "top_p"], logprobs, DEVICE)
    accepted = steps.compare([0] * 12, 1) + steps.compare([3, 0, 1, 4, 2, 0, 3, 4, 5, 3, 1, 2], 2)
    assert accepted > 3


def test_tokens_of_a_vocabulary_of_several_chunks_are_those_of_the_host() -> None:
    Steps(chooser(), 4300, ["min_p", "top_p"], 2, DEVICE).compare([0, 0], 4)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter
@pytest.mark.parametrize(
    "kind, vocabulary, seeds",
    [
        *product(["", "token", "sampled", "recursive", "greedy_multi"], [101], [range(4)]),
        *product(["", "sampled"], [5000], [[3]]),
    ],
)
def test_verdicts_on_sampled_drafts_are_those_of_the_host(
    kind: str, vocabulary: int, seeds: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "ROWS_AT_ONCE", 8)
    assert compare_drafts(chooser(), vocabulary, seeds, DEVICE, kind) > 2


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter
def test_no_token_is_chosen_where_none_is_possible() -> None:
    steps = Steps(chooser(), 20, ["plain", "top_p", "penalties", "plain"], None, DEVICE)
    steps.compare([0, 0, 0, 0], 5, [torch.nan, torch.inf, -torch.inf])
