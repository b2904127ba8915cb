"""Triton's kernels against torch, on a CUDA device or by Triton's interpreter: ``test_cuda_kernels.py`` runs this."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tests.models import recurrent_in_torch
from tests.models.recurrent_kernels import SIZES, Sequences
from torch import Tensor

from foretoken.core.draft import Draft
from foretoken.models.families.layers import RecurrentMixer
from foretoken.models.formats.quantize import Int8, quantize_rows
from foretoken.models.runners.linear import FIXED_ROWS, by_fixed_rows
from foretoken.models.runners.triton_kernels import attention, recurrent, steps
from foretoken.models.runners.triton_kernels.attention import attend_rows, store
from foretoken.models.runners.triton_kernels.available import has_kernels
from foretoken.models.runners.triton_kernels.experts import ExpertStack, combine
from foretoken.models.runners.triton_kernels.rows import STRETCH, PassRows
from foretoken.models.runners.triton_kernels.rowwise import int8_linear, rms_norm, rotate_heads, silu_mul

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, KV_HEADS, DIM, SLOTS, LENGTH = 6, 2, 24, 3, 600


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def ints(values: list[int] | list[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def rows_of(counts: list[int], slots: list[int]) -> PassRows:
    """Returns the layout of rows of chains."""
    return PassRows(
        counts=ints(counts),
        slots=ints(slots),
        places=ints([max(0, count - 1) for count in counts]),
        prefixes=ints(counts),
        paths=torch.zeros((len(counts), 0), dtype=torch.int32, device=DEVICE),
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


@pytest.mark.parametrize("window", [0, 7, 300, -64, -500])
@pytest.mark.parametrize("softcap, sink", [(0.0, False), (5.0, False), (0.0, True)])
def test_attention_of_rows(window: int, softcap: float, sink: bool) -> None:
    counts, slots = [1, 70, STRETCH, STRETCH + 1, 0, LENGTH], [0, 1, 2, 0, 0, 1]
    keys, values, queries = numbers(SLOTS, KV_HEADS, LENGTH, DIM), numbers(SLOTS, KV_HEADS, LENGTH, DIM, seed=1), None
    queries, sinks = numbers(len(counts), HEADS, DIM, seed=2), numbers(HEADS, seed=3) if sink else None
    mixed = attend_rows(queries, keys, values, rows_of(counts, slots), 0.3, window, softcap, sinks)
    for row, (count, slot) in enumerate(zip(counts, slots, strict=True)):
        if not count:
            assert not mixed[row].any()
            continue
        seen = slice(first_key(count, window), count)
        right = expected(queries[row], keys[slot, :, seen], values[slot, :, seen], 0.3, softcap, sinks)
        torch.testing.assert_close(mixed[row], right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_path_in_any_cache_rows_has_the_bits_of_plain_decoding(dtype: torch.dtype) -> None:
    """A row at the depth of three sees a prefix and three nodes, which lie in the order of a tree."""
    prefix, path = 250, [252, 250, 257]
    keys, values = (numbers(1, KV_HEADS, LENGTH, DIM, seed=seed).to(dtype) for seed in (0, 1))
    queries = numbers(1, HEADS, DIM, seed=2).to(dtype)
    plain = rows_of([prefix + 3], [0])
    tree = replace(plain, prefixes=ints([prefix]), paths=ints([[*path, 0, 0, 0, 0, 0]]))
    got = attend_rows(queries, keys, values, tree, 0.3)
    for buffer in (keys, values):
        buffer[:, :, prefix : prefix + 3] = buffer[:, :, path].clone()
    assert torch.equal(got, attend_rows(queries, keys, values, plain, 0.3))


def test_rows_have_the_same_bits_whatever_shares_the_pass_and_however_long_the_cache_is() -> None:
    counts, slots = [300, 0, 9, 300], [0, 0, 1, 2]
    keys, values = numbers(SLOTS, KV_HEADS, LENGTH, DIM), numbers(SLOTS, KV_HEADS, LENGTH, DIM, seed=1)
    queries = numbers(4, HEADS, DIM, seed=2)
    together = attend_rows(queries, keys, values, rows_of(counts, slots), 0.3)
    for row in (0, 2, 3):
        alone = replace(rows_of([counts[row]], [slots[row]]), longest=counts[row])
        assert torch.equal(attend_rows(queries[row : row + 1], keys, values, alone, 0.3)[0], together[row])


def test_sums_over_stretches_are_computed_for_some_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, values = numbers(1, KV_HEADS, LENGTH, DIM), numbers(1, KV_HEADS, LENGTH, DIM, seed=1)
    queries, rows = numbers(5, HEADS, DIM, seed=2), rows_of([300, 1, 600, 0, 257], [0] * 5)
    whole = attend_rows(queries, keys, values, rows, 0.3)
    monkeypatch.setattr(attention, "PARTIAL", 2 * 4 * HEADS * 3 * DIM)  # two rows
    assert torch.equal(attend_rows(queries, keys, values, rows, 0.3), whole)


def test_store_writes_finite_numbers_and_no_padding() -> None:
    cache = [torch.zeros(SLOTS, KV_HEADS, 8, DIM, device=DEVICE) for _ in "kv"]
    keys, values = numbers(3, KV_HEADS, DIM), numbers(3, KV_HEADS, DIM, seed=1)
    keys[0, 0, 0], values[1, 1, 1] = torch.inf, torch.nan
    store(keys, values, *cache, rows_of([3, 5, 0], [1, 2, 0]))
    for buffer, fresh in zip(cache, (keys, values), strict=True):
        right = torch.zeros_like(buffer)
        right[1, :, 2], right[2, :, 4] = fresh[0].nan_to_num(0, 0, 0), fresh[1].nan_to_num(0, 0, 0)
        assert torch.equal(buffer, right)


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
    outputs = ExpertStack(weights, biases)(x, chosen, counts)
    each = x if own_inputs else x[:, None].expand(-1, 3, -1)
    right = torch.einsum("rtoi,rti->rto", weights[chosen], each) + biases[chosen]
    right[1] = 0.0
    torch.testing.assert_close(outputs, right, rtol=1e-4, atol=1e-4)
    shares = numbers(4, 3, seed=3)
    torch.testing.assert_close(combine(outputs, shares), (outputs * shares[..., None]).sum(1))


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


TREE = Draft(torch.tensor([7, 8, 11, 12, 9]), (-1, -1, 1, 1, 2))  # 8, 11, 9 is a path


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
