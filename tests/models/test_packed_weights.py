"""bfloat16 weights stored in 12 bits: the same bits come out, in products and in rows of an embedding."""

import ctypes
from dataclasses import replace

import numpy as np
import pytest
import torch

from foretoken import LLM, SamplingParams, zoo
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.core.native import cpu
from foretoken.models.base import Handle
from foretoken.models.families.architecture import Architecture
from foretoken.models.formats.checkpoint import open_weights
from foretoken.models.formats.layers import Layers, Source, read_ends
from foretoken.models.formats.weights import Ends, NormWeight
from foretoken.models.loading import load_model
from foretoken.models.runners.native import support
from foretoken.models.runners.native.bindings import Matrix, UpperBytes
from foretoken.models.runners.native.build import Kind, packing_library
from foretoken.models.runners.native.packing import PAIR_BYTES, Arena, pack
from foretoken.models.runners.native.runner import NativeRunner
from foretoken.models.runners.pass_plan import PassPlan

from .test_native import CONFIG, needs_kernels, weights
from .trees import repeating

INPUTS, OUTPUTS = 72, 131


def runner(compress: bool, rare: float = 0.0, head: torch.Tensor | None = None) -> NativeRunner:
    """rare: share of the weights that have an exponent of their own. head: an untied vocabulary head."""
    tensors = weights()
    generator = torch.Generator().manual_seed(2)
    for tensor in tensors.values():
        chosen = torch.rand(tensor.shape, generator=generator) < rare
        tensor[chosen] *= 2.0 ** -torch.randint(20, 60, (int(chosen.sum()),), generator=generator).float()
    architecture = Architecture.of(CONFIG, None)
    source = Source(tensors, architecture, torch.bfloat16)
    ends = read_ends(source)
    if head is not None:
        architecture, ends = replace(architecture, vocab=len(head)), Ends(ends.embedding, ends.norm, head)
    return NativeRunner(architecture, Layers(source), ends, torch.bfloat16, compress=compress)


def numbers_at(address: int, shape: tuple[int, ...], dtype: type[np.generic]) -> np.ndarray:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype).reshape(shape)


def restored(matrix: Matrix) -> np.ndarray:
    """Returns the numbers of a packed matrix as the raw one stores them: [units, blocks, steps, 32].

    Written from the description in csrc/packed.hpp, apart from the kernels.
    """
    units, pairs = matrix.units, matrix.steps // 2
    stored = numbers_at(matrix.data, (units, pairs, PAIR_BYTES), np.uint8)
    upper = UpperBytes.from_address(matrix.upper)
    table = numbers_at(upper.bytes, (units, 16), np.uint8)
    codes = np.stack([stored[..., 128:] & 15, stored[..., 128:] >> 4], axis=2)
    high = table[np.arange(units)[:, None, None, None], codes].astype(np.uint16)
    numbers = high << 8 | stored[..., :128].reshape(units, pairs, 2, 64)
    numbers = numbers.reshape(units, pairs * 2, 4, 2, 8).transpose(0, 3, 1, 2, 4).reshape(units, 2, pairs * 2, 32)
    starts = numbers_at(upper.from_unit, (units + 1,), np.int32)
    rare = numbers_at(upper.pairs, (max(1, int(starts[-1])),), np.int32)
    words = numbers_at(upper.words, (max(1, int(starts[-1])), 2, 2, 32), np.uint16)
    for unit in range(units):
        for at in range(starts[unit], starts[unit + 1]):
            numbers[unit, :, rare[at] * 2 : rare[at] * 2 + 2] = words[at].transpose(1, 0, 2)
    return numbers


def assert_restored(weight: torch.Tensor) -> bool:
    """Packs a matrix raw and in 12 bits and compares all bits. Returns whether the packed form was chosen."""
    arena = Arena(packing_library())
    raw, packed = pack(arena, [weight]), pack(arena, [weight], compress=True)
    if packed.matrix.kind == Kind.BFLOAT16:
        return False
    assert packed.nbytes < raw.nbytes
    expected = numbers_at(raw.matrix.data, (raw.matrix.units, 2, raw.matrix.steps, 32), np.uint16)
    assert np.array_equal(restored(packed.matrix), expected)
    return True


def all_patterns() -> torch.Tensor:
    """Returns all 65,536 bit patterns, shuffled: infinities, NaN and subnormals among them."""
    order = torch.randperm(2**16, generator=torch.Generator().manual_seed(3))
    return (order - 2**15).to(torch.int16).view(torch.bfloat16)


@needs_kernels
@pytest.mark.parametrize("rare", [0.0, 0.0005])
def test_passes_have_the_bits_of_raw_weights(rare: float) -> None:
    """Each number of rows up to 34, and a chunk of a prompt."""
    models = [runner(compress, rare) for compress in (False, True)]
    for model, kinds in zip(models, ({Kind.BFLOAT16}, {Kind.PACKED}), strict=True):
        assert model.kinds == kinds
        model.acquire()
    assert models[1].weight_bytes < 0.85 * models[0].weight_bytes
    for rows in (*range(1, 35), 90):
        plan = PassPlan.of([Handle(0, [3 + at for at in range(9)], 0)], [repeating((-1,) * (rows - 1))], [0])
        raw, packed = (model.run(plan, (0, 1), logits=True) for model in models)
        assert raw.logits is not None and packed.logits is not None
        assert torch.equal(raw.logits, packed.logits), rows
        for layer in (0, 1):
            assert torch.equal(raw.taps[layer], packed.taps[layer]), rows


@needs_kernels
def test_every_bit_pattern_is_restored() -> None:
    common = torch.randn(2**14, 64).bfloat16()
    assert assert_restored(torch.cat([common, all_patterns().view(-1, 64)]))
    scattered = torch.randn(2048, 1024).bfloat16()
    scattered.view(-1)[torch.randperm(scattered.numel())[:1000]] = all_patterns()[:1000]
    assert assert_restored(scattered)


@needs_kernels
def test_products_with_every_bit_pattern_have_the_bits_of_raw_weights() -> None:
    patterns = all_patterns()[: 2**16 // INPUTS * INPUTS].view(-1, INPUTS)
    head = torch.cat([torch.randn(2**14, INPUTS).bfloat16(), patterns])
    models = [runner(compress, head=head) for compress in (False, True)]
    assert models[1].kinds >= {Kind.PACKED}
    for rows in (1, 5, 13, 34):
        hidden = torch.randn(rows, INPUTS, generator=torch.Generator().manual_seed(rows))
        raw, packed = (model.unembed(hidden).contiguous().view(torch.int32) for model in models)
        assert torch.equal(raw, packed)


@needs_kernels
def test_rows_of_an_embedding_are_restored() -> None:
    """All finite numbers, as rows of a tied and of an untied embedding."""
    common = torch.randn(4096, INPUTS).bfloat16()
    patterns = all_patterns()
    patterns = patterns[patterns.isfinite()]
    patterns = torch.nn.functional.pad(patterns.view(torch.int16), (0, -len(patterns) % INPUTS)).view(torch.bfloat16)
    table = torch.cat([common, patterns.view(-1, INPUTS)])
    architecture = Architecture.of(dict(CONFIG, vocab_size=len(table)), None)
    for head in (table, torch.randn(len(table), INPUTS).bfloat16()):
        layers = Layers(Source(weights(), architecture, torch.bfloat16))
        ends = Ends(table, NormWeight(torch.ones(INPUTS)), head)
        model = NativeRunner(architecture, layers, ends, torch.bfloat16, compress=True)
        model.acquire()
        for tokens in torch.arange(4096, len(table)).split(200):
            plan = PassPlan.of([Handle(0, tokens.tolist(), 0)], [Draft.empty()], [0])
            rows = model.run(plan, (0,), logits=True).taps[0]
            assert torch.equal(rows.bfloat16().view(torch.int16), table[tokens].view(torch.int16))


@needs_kernels
def test_a_matrix_of_many_exponents_stays_raw() -> None:
    arena = Arena(packing_library())
    wild = (torch.randn(64, 64) * 2.0 ** torch.randint(-60, 60, (64, 64)).float()).bfloat16()
    stored = [pack(arena, [wild], compress=compress).matrix for compress in (True, False)]
    assert [matrix.kind for matrix in stored] == [Kind.BFLOAT16] * 2
    assert len({ctypes.string_at(matrix.data, 2**13) for matrix in stored}) == 1
    tame = pack(arena, [torch.randn(64, 64).bfloat16()], compress=True)
    assert tame.matrix.kind == Kind.PACKED
    assert pack(arena, [torch.randn(64, 64)], compress=True).matrix.kind == Kind.FLOAT32


@needs_kernels
@pytest.mark.parametrize("name", ["target", "draft"])
def test_every_matrix_of_the_bundled_models_is_packed_and_restored(name: str) -> None:
    for tensor, weight in open_weights(zoo.path(name)).items():
        if weight.dim() == 2:
            assert assert_restored(weight.bfloat16()), tensor


@needs_kernels
def test_texts_are_those_of_raw_weights() -> None:
    texts = []
    for name in ("raw", "packed"):
        llm = LLM(dtype="bfloat16", weight_format=name)
        kinds = llm.target.runner.kinds  # type: ignore[attr-defined]
        assert (Kind.PACKED in kinds) == (name == "packed")
        params = [SamplingParams(max_tokens=24, temperature=t, seed=1, speculative_tokens=4) for t in (0.0, 1.0)]
        outputs = llm.generate(["def read(path):", "import os\n"], params, use_tqdm=False)
        texts.append([output.outputs[0].token_ids for output in outputs])
    assert texts[0] == texts[1]


@needs_kernels
def test_auto_packs_weights_that_no_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    a = Architecture.of(CONFIG, None)
    size = support.matrix_bytes(a, torch.bfloat16)
    levels = {level.name: level for level in cpu.LEVELS}
    monkeypatch.setattr(cpu, "chosen", lambda: levels["avx512-bf16"])
    monkeypatch.setattr(support, "last_level_cache", lambda: size)
    assert support.packing_is_faster(a, torch.bfloat16)
    assert not support.packing_is_faster(a, torch.float32)
    monkeypatch.setattr(support, "last_level_cache", lambda: size + 1)
    assert not support.packing_is_faster(a, torch.bfloat16)
    monkeypatch.setattr(support, "last_level_cache", lambda: 1)
    for name, pays in {"amx": False, "avx512": False, "avx2": False, "generic": False}.items():
        monkeypatch.setattr(cpu, "chosen", lambda name=name: levels[name])
        assert support.packing_is_faster(a, torch.bfloat16) == pays


def test_the_last_level_cache_is_read_from_the_system(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "CACHES", tmp_path)
    read = support.last_level_cache.__wrapped__
    assert read() == 32 * 2**20
    for index, size in enumerate(("32K", "1024K", "8M")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n", encoding="ascii")
    assert read() == 8 * 2**20


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weight_format": "zip"}, "'zip' is not known; known: auto, raw, packed"),
        ({"weight_format": "packed", "dtype": "float32"}, "bfloat16 weights on a CPU, not torch.float32"),
        ({"weight_format": "packed", "quantization": "int8"}, "omit quantization='int8'"),
        ({"weight_format": "packed", "backend": "hf"}, "needs the compiled decoder"),
    ],
)
def test_unavailable_formats_are_refused(options: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        load_model(zoo.path("draft"), **options)


def test_freed_memory_leaves_its_neighbours_alone() -> None:
    arena = Arena(packing_library(), 2**22)
    first, second, large = arena.allocate(9000), arena.allocate(9000), arena.allocate(2**22)
    assert second - first >= 9000 and arena.nbytes == 2 * 9000 + 2**22
    ctypes.memset(second, 7, 9000)
    arena.free(first)
    arena.free(large)
    assert arena.allocate(0) != arena.allocate(0)
    assert arena.held[:-2] == ((second, 9000),) and ctypes.string_at(second, 9000) == bytes([7]) * 9000


@needs_kernels
def test_matrices_in_12_bits_lie_side_by_side() -> None:
    arena, weight = Arena(packing_library(), 2**22), torch.randn(64, 64).bfloat16()
    packed = [pack(arena, [weight], compress=True).matrix for _ in range(3)]
    assert [matrix.data - packed[0].data for matrix in packed] == [0, 64 * 64 * 3 // 2, 64 * 64 * 3]
