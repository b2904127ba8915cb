"""The CUDA runner. Where there is no device, a stand-in for CUDA graphs repeats the captured work on the CPU."""

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from foretoken.core.draft import Draft
from foretoken.models.base import Handle, Scores
from foretoken.models.decoder import Decoder
from foretoken.models.families.architecture import Architecture
from foretoken.models.formats.checkpoint import load_config, open_weights
from foretoken.models.formats.layers import Layers, Source, read_ends
from foretoken.models.formats.quantize import Quantizer
from foretoken.models.runners import choose
from foretoken.models.runners.cuda import graphs, layout, runner
from foretoken.models.runners.cuda.graphs import CudaCapture, States
from foretoken.models.runners.cuda.layout import Bucket, paths
from foretoken.models.runners.cuda.runner import CudaRunner
from foretoken.models.runners.pass_plan import PassPlan
from foretoken.models.runners.torch_runner import TorchRunner
from foretoken.models.runners.triton_kernels.rows import UNIT, LayerPages, PassRows
from foretoken.models.state.pages import PAGE
from gpu import Repeated

from .dense import saved
from .test_conformance import text, tree
from .tiny import ARCHITECTURES, only_runner
from .trees import repeating

pytestmark = pytest.mark.slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NATIVE = [name for name, tiny in ARCHITECTURES.items() if tiny.native and tiny.torch]
META = torch.device("meta")  # no data: reading a value fails, as in a capture


class NothingMixed(TorchDispatchMode):
    """Refuses operators that see tensors of the host, numbers aside: a capture would wait for their copies."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor) and t.ndim]
        assert all(t.is_meta for t in tensors), f"{func.name()} reads the host's tensors"
        return result


class NothingListed(TorchFunctionMode):
    """Refuses tensors made of lists, which no operator shows."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        assert func not in (torch.tensor, torch.as_tensor) or not result.is_meta, "a list is copied to the device"
        return result


class Recorder:
    """Counts what is captured and replayed: CUDA graphs where there is a device."""

    def __init__(self, device: torch.device) -> None:
        self.captured = self.replayed = 0
        self._inner = CudaCapture(device) if device.type == "cuda" else Repeated(device)

    def capture(self, function: Callable[[], States]) -> Callable[[], States]:
        self.captured += 1
        inner = self._inner.capture(function)

        def replay() -> States:
            self.replayed += 1
            return inner()

        return replay


class Guarded(Recorder):
    """Looks at what is captured; on the meta device there is nothing to replay."""

    def capture(self, function: Callable[[], States]) -> Callable[[], States]:
        with NothingListed(), NothingMixed():
            states = function()
        return lambda: states


class InTorch:
    """Stands in for the kernels of ``triton_kernels/attention.py`` where there is no device."""

    @staticmethod
    def store(keys: torch.Tensor, values: torch.Tensor, cache: LayerPages, rows: PassRows) -> None:
        if keys.is_meta:
            return
        stored = rows.counts.nonzero()[:, 0]
        places = rows.places[stored]
        pages = rows.pages[places // PAGE, stored]
        for page in pages.unique().tolist():
            here = stored[pages == page]
            place = rows.places[here] % PAGE
            for half, fresh in enumerate((keys, values)[: 1 + (cache.values != cache.keys)]):
                written, scales = block(cache, page, half)
                numbers = fresh[here].float().transpose(0, 1)
                if scales is not None:
                    scales[:, place] = numbers.abs().amax(-1) / 127
                    numbers = (numbers / scales[:, place, None].clamp(min=1e-30)).round()
                written[:, place] = numbers.to(written.dtype)

    @staticmethod
    def attend_rows(
        queries: torch.Tensor,
        cache: LayerPages,
        rows: PassRows,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        biases: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if queries.is_meta:
            return torch.empty_like(queries[..., : cache.dim])
        result, used = torch.zeros_like(queries[..., : cache.dim]), rows.counts.nonzero()[:, 0]  # without padding
        fields = ("counts", "ends", "prefixes", "pages", "paths")
        queries, rows = queries[used], replace(rows, **{name: getattr(rows, name)[..., used] for name in fields})
        count, end, depth = rows.counts[:, None], rows.ends[:, None], len(rows.paths)
        longest = min(rows.longest, PAGE * max(1, -(-int(rows.ends.max()) // PAGE)))  # behind it no row sees a key
        position = torch.arange(longest)[None]
        place, behind = position.expand(len(queries), -1), position - rows.prefixes[:, None]
        if depth:
            place = torch.where(behind >= 0, rows.paths.t().gather(1, behind.clamp(0, depth - 1)), place)
        first = count - window if window > 0 else (count - 1) // (-window or 1) * -window
        seen = (position < end) & (position >= first)
        k, v = (of_rows(cache, rows, half, place) for half in range(2))
        grouped = queries.float().unflatten(1, (cache.heads, -1))
        scores = (grouped @ k.transpose(2, 3)).flatten(1, 2) * scale
        scores = (scores / softcap).tanh() * softcap if softcap else scores
        if biases is not None:
            own = biases[:, (rows.counts - 1).clamp(min=0)].t()
            scores = scores + biases[:, :longest] - own[..., None]
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.float().expand(len(queries), -1)[..., None]), -1)
        shares = scores.softmax(-1)[..., : position.shape[1]].nan_to_num()
        result[used] = (shares.unflatten(1, (cache.heads, -1)) @ v).flatten(1, 2)[..., : cache.dim].to(queries.dtype)
        return result

    @staticmethod
    def read_nodes(
        nodes: torch.Tensor,
        strides: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        counts: torch.Tensor,
        ends: torch.Tensor,
        places: torch.Tensor,
        prefixes: torch.Tensor,
        paths: torch.Tensor,
    ) -> torch.Tensor:
        result = torch.zeros(len(nodes), 4, dtype=torch.int64, device=nodes.device)
        for row in [] if nodes.is_meta else nodes.nonzero()[:, 0].tolist():
            address, stride = int(nodes[row]), int(strides[row])
            values = [int(memory(address + field * stride, (1,), torch.int32)) for field in range(3)]
            path, at = list[int](), row
            while nodes[at]:
                path.insert(0, int(places[at]))
                at -= int(memory(int(nodes[at] + strides[at]), (1,), torch.int32))
            result[row] = torch.tensor([*values, len(path)])
            tokens[row], positions[row] = values[0], positions[at] + len(path)
            counts[row] = ends[row] = positions[row] + 1
            if len(paths) and prefixes[row] <= positions[row]:
                paths[: len(path), row] = torch.tensor(path)
        return result

    @staticmethod
    def read_states(addresses: torch.Tensor, width: int, held: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
        if addresses.is_meta:
            return torch.empty(len(addresses), addresses.shape[1] * width, dtype=dtype, device=addresses.device)
        zeros = torch.zeros(width, dtype=held)
        rows = [memory(at, (width,), held) if at else zeros for at in addresses.flatten().tolist()]
        return torch.stack(rows).view(len(addresses), -1).to(dtype)

    @staticmethod
    def write_states(addresses: torch.Tensor, states: torch.Tensor) -> None:
        for at, state in zip([] if addresses.is_meta else addresses.tolist(), states, strict=False):
            if at:
                memory(at, (len(state),), state.dtype).copy_(state)

    @staticmethod
    def move(firsts: torch.Tensor, moves: torch.Tensor, blocks: torch.Tensor, widest: int) -> None:
        if firsts.is_meta:
            return
        for to, row, page, source in moves[:, : firsts.max()].T.tolist():
            for start, size in blocks.T.tolist():
                ctypes.memmove(to + start + row * size, page + start + source * size, size)


def block(cache: LayerPages, place: int, half: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns a layer's keys (``half`` 0) or values in a page, [heads, PAGE, D], and their scales [heads, PAGE]."""
    page = cache.base.data_ptr() + place * UNIT
    item, shape = cache.base.element_size(), (cache.heads, PAGE, cache.width)
    numbers = memory(page + (cache.keys, cache.values)[half] * item, shape, cache.base.dtype)
    if cache.scales_at is None:
        return numbers, None
    return numbers, memory(page + 4 * cache.scales_at[half], shape[:2], torch.float32)


def memory(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size = math.prod(shape) * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype).view(shape)


def of_rows(cache: LayerPages, rows: PassRows, half: int, place: torch.Tensor) -> torch.Tensor:
    """Returns the keys or values at cache rows ``place`` [R, n], [R, heads, n, D]."""
    used, index = rows.pages.unique(return_inverse=True)
    held = []
    for page in used.tolist():
        if not page:  # of padding, and behind the end
            held.append(torch.zeros(cache.heads, PAGE, cache.width))
            continue
        numbers, scales = block(cache, page, half)
        held.append(numbers.float() if scales is None else numbers.float() * scales[..., None])
    pages = index.t().gather(1, place // PAGE)
    return torch.stack(held)[pages, :, place % PAGE].transpose(1, 2)


@pytest.fixture(autouse=True)
def stand_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type != "cuda" or "needs_the_host" in request.node.name:
        monkeypatch.setattr(layout, "attention_kernels", lambda: InTorch)


class Two:
    """The same model on the torch runner and on graphs, taken through the same calls."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32, quantize: bool = False, **options: Any) -> None:
        self.recorders: list[Recorder] = []
        with only_runner("torch"):
            self.plain, self.graphed = (
                Decoder(load_config(path), open_weights(path), dtype, DEVICE, None, "int8" if quantize else None)
                for _ in "ab"
            )
        architecture = Architecture.of(load_config(path))
        source = Source(open_weights(path), architecture, dtype, Quantizer(8) if quantize else None)
        parts = architecture, Layers(source), read_ends(source), dtype, DEVICE
        self.plain.runner = TorchRunner(*parts)
        self.runner = self.graphed.runner = CudaRunner(*parts, capture=self._recorder, **options)
        self.tolerance = (
            2e-5  # products of other numbers of rows add in another order, on processors with AMX by 1.2e-5
        )

    def _recorder(self, device: torch.device) -> Recorder:
        self.recorders.append(Recorder(device))
        return self.recorders[-1]

    @property
    def captured(self) -> int:
        return sum(recorder.captured for recorder in self.recorders)

    @property
    def replayed(self) -> int:
        return sum(recorder.replayed for recorder in self.recorders)

    def open(self, prompt: Sequence[int]) -> tuple[Handle, Handle]:
        return self.plain.open(prompt), self.graphed.open(prompt)

    def score(
        self, pairs: Sequence[tuple[Handle, Handle]], drafts: Sequence[Draft], taps: Sequence[int] = ()
    ) -> list[Scores]:
        expected = self.plain.score([a for a, _ in pairs], drafts, taps)
        results = self.graphed.score([b for _, b in pairs], drafts, taps)
        for one, other in zip(expected, results, strict=True):
            torch.testing.assert_close(other.logits, one.logits, rtol=self.tolerance, atol=self.tolerance)
            assert set(other.taps) == set(taps)
            for layer in taps:
                torch.testing.assert_close(other.taps[layer], one.taps[layer], rtol=self.tolerance, atol=self.tolerance)
        return results

    def commit(self, pairs: Sequence[tuple[Handle, Handle]], tokens: Sequence[Sequence[int]]) -> None:
        self.plain.commit([a for a, _ in pairs], tokens)
        self.graphed.commit([b for _, b in pairs], tokens)

    def close(self, *pairs: tuple[Handle, Handle]) -> None:
        for a, b in pairs:
            self.plain.close(a)
            self.graphed.close(b)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ARCHITECTURES["llama"].save(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def two(path: Path) -> Two:
    return Two(path)


def deep_tree(size: int, seed: int) -> Draft:
    """A long path with a leaf beside every node: deeper than the windows of the tiny models."""
    parents = [-1, -1, *(i - 2 if i % 2 == 0 else i - 3 for i in range(2, size))]
    return repeating(parents, 3 + seed % 30)


def run_steps(two: Two) -> None:
    """A ragged batch of chains, trees and nothing, taps, commits that keep a tree's path, a tree that grows."""
    pairs = [two.open(text(n, n)) for n in (3, 12, 1, 7)]
    every = range(two.plain.num_layers + 1)
    two.score(pairs, [Draft.chain(text(4, 20)), Draft.empty(), Draft.chain(text(1, 21)), tree(22)], every)
    two.commit(pairs, [[5], [6], [7], [8]])
    drafts = [tree(30), deep_tree(16, 31), Draft.chain(text(7, 32)), Draft.empty()]
    two.score(pairs, drafts)
    paths = [draft.path(len(draft) - 1) for draft in drafts]
    two.commit(pairs, [[*(d.ids[i] for i in p), 9] for d, p in zip(drafts, paths, strict=True)])
    whole = deep_tree(18, 40)
    for end in (2, 5, 18):
        two.score(pairs[1:3], [Draft(whole.ids[:end], whole.parents[:end]), Draft.chain(text(end, 41))])
    two.close(pairs[1])
    two.score([pairs[3], pairs[0]], [deep_tree(14, 50), Draft.chain(text(3, 51))], (1,))  # an idle slot in between
    two.close(pairs[0], pairs[2], pairs[3])


@pytest.mark.parametrize("name", NATIVE)
def test_equals_the_torch_runner(name: str, tmp_path: Path) -> None:
    path = ARCHITECTURES[name].save(tmp_path)
    architecture = Architecture.of(load_config(path))
    two = Two(path)
    run_steps(two)
    if architecture.has_experts:
        return  # nothing is captured
    assert two.captured > 0
    before = two.captured
    run_steps(two)
    assert two.captured == before and two.replayed >= 2 * 6  # the second time everything is known


@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon, alibi"])
def test_biases_by_distance_equal_the_torch_runner(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path)
    run_steps(Two(tmp_path))


@pytest.mark.parametrize(
    "dtype, quantize, tolerance",
    [(torch.float16, False, 0.02), (torch.bfloat16, False, 0.2), (torch.float32, True, 0.2)],
    ids=["float16", "bfloat16", "int8"],
)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_all_dtypes_equal_the_torch_runner(name, dtype, quantize, tolerance, tmp_path):
    two = Two(ARCHITECTURES[name].save(tmp_path), dtype, quantize)
    two.tolerance = tolerance
    run_steps(two)


@pytest.mark.parametrize("size", [31, 32, 33, 60, 100])
def test_trees_beyond_one_word(two: Two, size: int) -> None:
    pairs = [two.open(text(5, 1)), two.open(text(40, 2))]
    two.score(pairs, [Draft.empty(), Draft.empty()])
    two.commit(pairs, [[3], [4]])
    two.score(pairs, [deep_tree(size, 3), tree(4, size)])
    part = Draft(deep_tree(size, 3).ids, deep_tree(size, 3).parents)
    grown = Draft.tree([*part.ids, 7, 8], (*part.parents, size - 1, 0))
    two.score(pairs, [grown, Draft.chain(text(2, 5))])


@pytest.mark.parametrize("quantize", [False, True], ids=["float16", "int8"])
@pytest.mark.parametrize("name", NATIVE)
def test_captured_work_never_needs_the_host(name: str, quantize: bool, tmp_path: Path) -> None:
    path = ARCHITECTURES[name].save(tmp_path)
    if Architecture.of(load_config(path)).has_experts:
        pytest.skip("models with experts are not captured: runners/choose.py")
    architecture = Architecture.of(load_config(path))
    source = Source(open_weights(path), architecture, torch.float16, Quantizer(8) if quantize else None)
    runner = CudaRunner(architecture, Layers(source), read_ends(source), torch.float16, META, capture=Guarded)
    assert [runner.acquire(), runner.acquire()] == [(0, 0), (1, 0)]
    result = runner.run(plan((0, 300, 1, deep_tree(9, 1)), (1, 7, 1, CHAIN)), (0, 1), True)
    assert result.logits is not None and result.logits.shape == (14, architecture.vocab)


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x.tolist(),
        lambda x: x[torch.tensor([0, 1])],
        lambda x: x + torch.tensor([1.0, 2.0], device=META),
        lambda x: x + torch.ones(2).to(META),
    ],
    ids=["item", "mask", "list", "index", "tensor", "to"],
)
def test_the_guard_refuses_synchronizations(waits: Callable[[torch.Tensor], Any]) -> None:
    with torch.inference_mode(), pytest.raises((AssertionError, RuntimeError)), NothingListed(), NothingMixed():
        waits(torch.zeros(2, device=META))


def test_results_of_a_pass_outlive_later_passes(two: Two) -> None:
    pair = two.open(text(4, 1))
    kept = two.score([pair], [Draft.chain(text(3, 2))], (0, 1, 2))[0]
    copies = kept.logits.clone(), {layer: state.clone() for layer, state in kept.taps.items()}
    two.commit([pair], [[9]])
    two.score([pair], [Draft.chain(text(3, 3))], (0, 1, 2))
    assert torch.equal(kept.logits, copies[0])
    assert all(torch.equal(kept.taps[layer], copies[1][layer]) for layer in copies[1])


def test_each_bucket_is_captured_once(two: Two) -> None:
    pair = two.open(text(1, 1))
    for step, nodes in enumerate([1, 0, 2, 7, 30, 0]):
        two.score([pair], [Draft.chain(text(nodes, step))])
        two.commit([pair], [[step + 3]])
        assert two.captured == 1, "chains of up to 64 rows share a graph"
    two.score([pair], [Draft.chain(text(1, 20))], (1,))
    assert two.captured == 2  # taps are another graph
    two.commit([pair], [[3]])
    two.score([pair], [tree(21, 3)], (1,))
    assert two.captured == 3  # and so are trees
    two.commit([pair], [[3]])
    two.score([pair], [Draft.chain(text(64, 20))])
    assert two.captured == 4  # and more rows


def test_graphs_are_kept_while_the_cache_and_its_tables_grow(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "MIN_KEYS", 64)
    pair = two.open(text(20, 1))
    two.score([pair], [Draft.chain(text(1, 2))])
    before = two.captured
    others = [two.open(text(70, 10 + i)) for i in range(3)]
    two.score(others, [Draft.empty()] * 3)
    long = two.open(text(300, 3))
    two.score([long], [tree(5)])
    captured = two.captured
    assert captured > before
    two.commit([pair], [[5]])
    two.score([pair], [Draft.chain(text(2, 2))])
    assert two.captured == captured and len(two.recorders) == 1


def test_long_passes_are_not_captured(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MAX_ROWS", 256)
    pairs = [two.open(text(n, n)) for n in (100, 40, 60)]
    two.score(pairs, [tree(1, 260), Draft.empty(), Draft.empty()])
    assert two.captured == 0
    two.score(pairs[:1], [tree(1, 60)])
    assert two.captured == 1


def test_few_rows_without_logits_are_captured(two: Two) -> None:
    """A head whose logits are the target's drafts by such passes."""
    slot, _ = two.runner.acquire()
    result = two.runner.run(plan((slot, 0, 3, CHAIN)), (1,), False)
    assert result.logits is None and result.taps[1].shape[0] == 6
    assert two.captured == two.replayed == 1


def test_other_sequences_keep_their_rows(two: Two) -> None:
    pairs = [two.open(text(n, n)) for n in (5, 9, 6)]
    two.score(pairs, [Draft.empty()] * 3)
    two.commit([pairs[0], pairs[2]], [[3], [4]])
    two.score([pairs[2], pairs[0]], [tree(1), Draft.chain(text(2, 2))])
    two.commit([pairs[1]], [[7]])
    kept = two.score([pairs[1]], [Draft.empty()])[0].logits
    assert torch.equal(two.score([two.open([*text(9, 9), 7])], [Draft.empty()])[0].logits, kept)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_a_prompt_reuses_the_rows_of_an_earlier_one(path: Path, kv_cache_dtype: str) -> None:
    two = Two(path, kv_cache_dtype=kv_cache_dtype)
    two.tolerance = 1e-5 if kv_cache_dtype == "auto" else 0.3
    assert two.graphed.enable_prefix_cache(2**24) and not two.plain.enable_prefix_cache(2**24)
    prompt, end = text(150, 1), Draft.chain(text(3, 2))
    first = two.open(prompt)
    kept = two.score([first], [end])[0].logits
    two.commit([first], [[end.ids[0], 9]])
    second = two.open([*prompt[:70], *text(30, 3)])  # while the first still runs
    assert second[1].cached == 64
    two.score([second, first], [tree(4), Draft.empty()])
    two.close(first, second)
    again = two.open(prompt)
    assert again[1].cached == 128
    torch.testing.assert_close(two.score([again], [end])[0].logits, kept, rtol=1e-5, atol=1e-5)
    two.graphed.check()
    two.close(again)
    two.graphed.check()


@pytest.mark.parametrize("length", [57, 62, 64])
def test_accepted_paths_move_across_pages(two: Two, length: int) -> None:
    pair, draft = two.open(text(length, 1)), deep_tree(16, 2)
    two.score([pair], [draft])
    two.commit([pair], [[*(draft.ids[i] for i in draft.path(len(draft) - 1)), 9]])
    two.score([pair], [Draft.chain(text(2, 3))])


def test_too_many_graphs_are_dropped(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    pair = two.open(text(1, 1))
    drafts = {"chain": Draft.chain([5]), "tree": tree(3, 4), "long": Draft.chain(text(70, 5))}
    steps = [("chain", [1]), ("tree", [2]), ("chain", [2]), ("tree", [2]), ("long", [2, 1]), ("chain", [2, 2])]
    for step, (name, captured) in enumerate(steps):
        two.score([pair], [drafts[name]])
        two.commit([pair], [[step + 3]])
        assert [recorder.captured for recorder in two.recorders] == captured


def plan(*parts: tuple[int, int, int, Draft]) -> PassPlan:
    """parts: (slot, cached, pending, draft)"""
    handles = [Handle(slot, [5] * (cached + pending), cached) for slot, cached, pending, _ in parts]
    return PassPlan.of(handles, [draft for *_, draft in parts], [0] * len(parts))


CHAIN = Draft.chain([3, 4, 5])
BUCKETS = [
    (plan((0, 7, 1, Draft.empty())), Bucket(64, 512, 0, (), False, 64, 0)),
    (plan((2, 7, 1, CHAIN), (0, 0, 1, Draft.empty())), Bucket(64, 512, 0, (), False, 64, 0)),
    (plan((3, 7, 60, CHAIN)), Bucket(64, 512, 0, (), False, 64, 0)),
    (plan((3, 7, 62, CHAIN)), Bucket(128, 512, 0, (), False, 64, 0)),
    (plan((0, 511, 1, Draft.empty())), Bucket(64, 512, 0, (), False, 64, 0)),
    (plan((0, 512, 1, Draft.empty())), Bucket(64, 1024, 0, (), False, 64, 0)),
    (plan((0, 7, 1, deep_tree(16, 1))), Bucket(64, 512, 8, (), False, 64, 0, moved=1)),
    (
        plan((0, 500, 1, deep_tree(16, 1))),
        Bucket(64, 1024, 8, (), False, 64, 0, moved=1),
    ),  # its rows reach beyond its depth
    (plan((0, 7, 1, deep_tree(18, 1)), (1, 7, 1, CHAIN)), Bucket(64, 512, 16, (), False, 64, 0, moved=2)),
]


@pytest.mark.parametrize("plan, expected", BUCKETS, ids=range(len(BUCKETS)))
def test_the_smallest_bucket_is_chosen(plan: PassPlan, expected: Bucket) -> None:
    assert Bucket.of(plan, (), True) == expected


def test_logits_are_computed_of_the_rows_that_are_read() -> None:
    (outputs,) = {Bucket.of(plan((3, 7, 200, draft)), (), True).outputs for draft in (CHAIN, Draft.chain([3] * 63))}
    assert outputs == 64 and Bucket.of(plan((3, 7, 200, CHAIN)), (), False).outputs == 0


def test_taps_in_any_order_are_one_bucket() -> None:
    one = plan((0, 7, 1, CHAIN))
    assert Bucket.of(one, (2, 0, 2), True) == Bucket.of(one, (0, 2), True)


def test_paths_of_draft_nodes() -> None:
    for draft in (deep_tree(11, 1), tree(2, 40)):
        (part,) = plan((0, 7, 1, draft)).parts
        for node, row in enumerate(paths(part, 64).tolist()):
            path = draft.path(node)
            assert row == [8 + i for i in path] + [0] * (64 - len(path))


def test_rows_are_batch_invariant(two: Two) -> None:
    assert two.runner.batch_invariant


def test_cuda_takes_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(choose, "CudaRunner", lambda *arguments, **options: made.append((arguments, options)))
    monkeypatch.setattr(choose, "has_kernels", lambda device: device.type == "cuda")
    a = Architecture.of(ARCHITECTURES["llama"].build().config.to_dict())
    choose.build_runner(a, None, None, torch.float16, torch.device("cuda"), kv_cache_dtype="int8")  # type: ignore[arg-type]
    arguments = a, None, None, torch.float16, torch.device("cuda"), None
    assert made == [(arguments, {"kv_cache_dtype": "int8"})]
