"""bfloat16 weights stored in 12 bits: the same bits come out, in products and in rows of a tied embedding."""

from __future__ import annotations

import pytest
import torch

from foretoken.core.draft import Draft
from foretoken.models.base import Handle
from foretoken.models.families.architecture import Architecture
from foretoken.models.formats.weights import Ends, Layers, Source, read_ends
from foretoken.models.runners.native.build import Kind, packing_library
from foretoken.models.runners.native.memory import Arena, pack
from foretoken.models.runners.native.runner import NativeRunner
from foretoken.models.runners.pass_plan import PassPlan

from .test_native import CONFIG, needs_kernels, weights
from .trees import repeating

INPUTS, OUTPUTS = 72, 131


def runner(compress: bool, rare: float = 0.0) -> NativeRunner:
    """rare: share of the weights that have an exponent of their own."""
    tensors = weights()
    generator = torch.Generator().manual_seed(2)
    for tensor in tensors.values():
        chosen = torch.rand(tensor.shape, generator=generator) < rare
        tensor[chosen] *= 2.0 ** -torch.randint(20, 60, (int(chosen.sum()),), generator=generator).float()
    architecture = Architecture.of(CONFIG, None)
    source = Source(tensors, architecture, torch.bfloat16)
    return NativeRunner(architecture, Layers(source), read_ends(source), torch.bfloat16, compress=compress)


@needs_kernels
@pytest.mark.parametrize("rare", [0.0, 0.0005])
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 8, 12, 13, 16, 20, 21, 33])
def test_passes_have_the_bits_of_raw_weights(rows: int, rare: float) -> None:
    results = []
    for compress in (False, True):
        model = runner(compress, rare)
        model.acquire()
        plan = PassPlan.of([Handle(0, [3 + at for at in range(9)], 0)], [repeating((-1,) * (rows - 1))], [0])
        results.append(model.run(plan, (0, 1), logits=True))
        assert {*model.kinds} & {Kind.PACKED} == ({Kind.PACKED} if compress else set())
    raw, packed = results
    assert raw.logits is not None and packed.logits is not None
    assert torch.equal(raw.logits, packed.logits)
    for layer in (0, 1):
        assert torch.equal(raw.taps[layer], packed.taps[layer])


@needs_kernels
def test_every_bit_pattern_is_restored() -> None:
    """All 65,536 numbers, among which few exponents are common, as rows of a tied embedding."""
    common = torch.randn(4096, INPUTS).bfloat16()
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    patterns = patterns[patterns.view(torch.bfloat16).isfinite()]
    table = torch.cat(
        [common, torch.nn.functional.pad(patterns, (0, -len(patterns) % INPUTS)).view(torch.bfloat16).view(-1, INPUTS)]
    )
    config = dict(CONFIG, vocab_size=len(table))
    architecture = Architecture.of(config, None)
    layers = Layers(Source(weights(), architecture, torch.bfloat16))
    model = NativeRunner(architecture, layers, Ends(table, torch.ones(INPUTS), table), torch.bfloat16, compress=True)
    model.acquire()
    for tokens in torch.arange(4096, len(table)).split(200):
        plan = PassPlan.of([Handle(0, tokens.tolist(), 0)], [Draft.empty()], [0])
        rows = model.run(plan, (0,), logits=True).taps[0]
        assert torch.equal(rows.bfloat16().view(torch.int16), table[tokens].view(torch.int16))


@needs_kernels
def test_a_matrix_of_many_exponents_stays_raw() -> None:
    arena = Arena(packing_library())
    wild = (torch.randn(64, 64) * 2.0 ** torch.randint(-60, 60, (64, 64)).float()).bfloat16()
    assert pack(arena, [wild], compress=True).matrix.kind == Kind.BFLOAT16
    tame = pack(arena, [torch.randn(64, 64).bfloat16()], compress=True)
    assert tame.matrix.kind == Kind.PACKED
    assert pack(arena, [torch.randn(64, 64)], compress=True).matrix.kind == Kind.FLOAT32
