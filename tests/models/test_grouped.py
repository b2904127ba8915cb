"""Matrices quantized in groups: their layouts, and the compiled product of each against float64."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from foretoken.core.draft import Draft
from foretoken.models.base import Handle
from foretoken.models.decoder import Decoder
from foretoken.models.families.architecture import Architecture
from foretoken.models.formats.layers import Layers, Source
from foretoken.models.formats.quantize import (
    CENTRE,
    Grouped,
    GroupLayout,
    Groups,
    Matrix,
    Quantizer,
    TwoLevels,
    joinable,
    quantize_groups,
)
from foretoken.models.formats.weights import Ends, NormWeight
from foretoken.models.runners.native.runner import NativeRunner
from foretoken.models.runners.pass_plan import PassPlan

from .test_native import CONFIG, needs_kernels, weights

INPUTS, OUTPUTS = 72, 131  # of the head of CONFIG; multiples of nothing
WIDE = 744  # several records
TABLE = tuple(range(0, 64, 4))
CODES = {"Q5_0": 32, "Q5_1": 32, "Q3_K": 8}  # codes of a layout, if they are fewer than its bits allow
LAYOUTS = {
    "Q4_0": GroupLayout(4, 32, 8),
    "Q4_1": GroupLayout(4, 32, offsets=True),
    "int4-g128": GroupLayout(4, 128, 8),
    "g16": GroupLayout(4, 16, 8),
    "table": GroupLayout(4, 32, 30, TABLE),
    "Q8_0": GroupLayout(8, 32, CENTRE),
    "Q5_1": GroupLayout(6, 32, offsets=True),
    "Q4_K": GroupLayout(4, 32, offsets=True, block=8),
    "Q6_K": GroupLayout(6, 16, 32, block=16),
    "Q3_K": GroupLayout(4, 16, 4, block=16),
    "Q5_0": GroupLayout(6, 32, 16),
    "Q4_K beside Q6_K": GroupLayout(6, 16, 32, offsets=True, block=16),
    "Q4_K beside Q8_0": GroupLayout(8, 32, CENTRE, offsets=True),
}


def random_matrix(name: str, half: bool = True, outputs: int = OUTPUTS, inputs: int = INPUTS) -> Grouped:
    layout, generator = replace(LAYOUTS[name], half=half), torch.Generator().manual_seed(3)
    codes = torch.randint(0, CODES.get(name, 2**layout.bits), (outputs, inputs), generator=generator, dtype=torch.uint8)
    groups = -(-inputs // layout.group)

    def numbers() -> torch.Tensor | TwoLevels:
        wholes = torch.randn(outputs, -(-groups // layout.block), generator=generator)
        if layout.block > 1:
            parts = torch.randint(-32, 64, (outputs, groups), generator=generator, dtype=torch.int8)
            return TwoLevels(wholes.half().float(), parts)
        return wholes.half().float() if half else wholes

    return Grouped.of(Groups(codes, numbers(), numbers() if layout.offsets else None), layout)


def runner_with(head: Matrix, embedding: torch.Tensor | Grouped, inputs: int = INPUTS) -> NativeRunner:
    """A decoder's runner with this vocabulary head and embedding; without layers if theirs have other inputs."""
    architecture = Architecture.of(CONFIG, None)
    layers = list(Layers(Source(weights(), architecture, torch.float32)))
    if inputs != INPUTS:
        architecture, layers = replace(architecture, hidden=inputs, stack=()), []
    return NativeRunner(architecture, layers, Ends(embedding, NormWeight(torch.ones(inputs)), head), torch.float32)


def expected(x: torch.Tensor, matrix: Grouped) -> torch.Tensor:
    """The product in float64, with activations quantized by row and group of inputs as the kernels do it."""
    inputs, group = x.shape[1], matrix.layout.group
    parts = F.pad(x, (0, -inputs % group)).unflatten(1, (-1, group))
    largest = parts.abs().amax(-1, keepdim=True)
    scales = torch.where(largest > 0, largest / 127, 1.0)
    rounded = ((parts * (1 / scales)).round() * scales).flatten(1)[:, :inputs]
    return rounded.double() @ matrix.dequantize().double().T


@needs_kernels
@pytest.mark.parametrize(
    "inputs, half",
    [(INPUTS, True), (WIDE, True), pytest.param(WIDE, False, marks=pytest.mark.slow)],
    ids=["short", "half", "single"],
)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_product_of_every_layout_is_that_of_float64(name: str, inputs: int, half: bool) -> None:
    matrix = random_matrix(name, half, inputs=inputs)
    x = torch.randn(34, inputs, generator=torch.Generator().manual_seed(5)) * torch.linspace(0.01, 3, inputs)
    x[4] = 0
    runner, reference = runner_with(matrix, torch.zeros(OUTPUTS, inputs), inputs), expected(x, matrix)
    ours = runner.unembed(x).clone()
    assert (ours - reference).abs().max() < 1e-5 * reference.abs().max()
    for rows in range(1, 35):
        assert torch.equal(runner.unembed(x[:rows]), ours[:rows]), rows


@needs_kernels
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("scheme", [Quantizer(8), Quantizer(4, 32)])
def test_a_row_that_is_not_finite_stays_so_alone(scheme: Quantizer, value: float) -> None:
    head = scheme(weights()["model.embed_tokens.weight"])
    runner = runner_with(head, torch.zeros(OUTPUTS, INPUTS))
    x = torch.randn(6, INPUTS)
    whole = runner.unembed(x).clone()
    x[3, 17] = value
    rows = runner.unembed(x)
    assert not rows[3].isfinite().any()
    assert torch.equal(rows[[0, 1, 2, 4, 5]], whole[[0, 1, 2, 4, 5]])


@needs_kernels
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_of_a_quantized_embedding_are_those_of_its_floats(name: str, tied: bool) -> None:
    matrix, head = random_matrix(name), random_matrix("Q8_0")
    plan = PassPlan.of([Handle(0, [3, 130, 17, 64], 0)], [Draft.empty()], [0])
    results = []
    for embedding in (matrix, matrix.dequantize()):
        runner = runner_with(matrix if tied else head, embedding)
        runner.acquire()
        result = runner.run(plan, (0,), logits=True)
        results.append((result.taps[0], result.logits))
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("first, second", list(itertools.combinations(LAYOUTS, 2)))
def test_joined_layouts_hold_the_same_weights(first: str, second: str) -> None:
    parts = [random_matrix(name, outputs=48) for name in (first, second)]
    joined = joinable(parts)
    assert len({part.layout for part in joined}) == 1
    for before, after in zip(parts, joined, strict=True):
        assert torch.equal(after.dequantize(), before.dequantize())
    assert torch.equal(Grouped.cat(parts).dequantize(), torch.cat([part.dequantize() for part in parts]))


@pytest.mark.parametrize("group", [16, 32, 64, 128])
def test_quantized_groups_are_near_the_weight(group: int) -> None:
    weight = torch.randn(50, 200)
    weight[3, :group] = 0
    matrix = quantize_groups(weight, group)
    error = (matrix.dequantize() - weight).abs()
    scales = matrix.rows(0, 50).scales.abs().repeat_interleave(group, 1)[:, :200]
    assert (error <= 0.51 * scales + 1e-3).float().mean() > 0.9  # the largest of the other sign may be clipped
    assert (error <= 1.01 * scales + 1e-3).all()
    assert torch.equal(matrix.part(10, 30).dequantize(), matrix.dequantize()[10:30])


@pytest.mark.parametrize(
    "name, scheme", [("int8", Quantizer(8)), ("int4", Quantizer(4, 32)), ("int4-g64", Quantizer(4, 64)), (None, None)]
)
def test_schemes_by_name(name: str | None, scheme: Quantizer | None) -> None:
    assert Quantizer.of(name) == scheme


@needs_kernels
def test_int4_computes_the_dequantized_model() -> None:
    """The compiled int4 model is near the float32 model that holds the same weights: activations have eight bits."""
    tensors, tied = weights(), dict(CONFIG, tie_word_embeddings=False)
    head = quantize_groups(tensors["model.embed_tokens.weight"], 32).dequantize()
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and "embed" not in name:
            tensors[name] = quantize_groups(tensor, 32).dequantize()
    reference = Decoder(tied, {**tensors, "lm_head.weight": head}, torch.float32, torch.device("cpu"))
    ours = Decoder(CONFIG, weights(), torch.float32, torch.device("cpu"), quantization="int4")
    tokens = list(range(3, 40))
    results = [model.score([model.open(tokens)], [Draft.empty()])[0].logits for model in (ours, reference)]
    assert (results[0] - results[1]).abs().max() < 0.03 * results[1].abs().max()
