"""Mixtures of experts: how rows choose, every layout and kind of weights, and rows that nothing else changes."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.plain import text
from torch import Tensor

from foretoken.control.fixed import Fixed
from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.errors import ModelLoadError
from foretoken.core.native.build import SWITCH
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models.base import Model
from foretoken.models.decoder import Decoder
from foretoken.models.families.architecture import Architecture
from foretoken.models.families.experts import Experts, experts_of
from foretoken.models.formats.checkpoint import load_config, open_weights
from foretoken.models.formats.layers import Layers, Source, read_ends
from foretoken.models.formats.packed import PackedSettings, PackedWeights
from foretoken.models.runners.base import Runner
from foretoken.models.runners.native.runner import NativeRunner
from foretoken.models.runners.torch_experts import choose
from foretoken.models.runners.torch_runner import TorchRunner
from foretoken.propose.base import Proposer
from foretoken.propose.draft_model import DraftModel, DraftModelConfig
from foretoken.propose.suffix import Lookup

from .plain import check_chains, check_prefix_cache_hits, check_tree, one_by_one
from .test_native import needs_kernels
from .tiny import ARCHITECTURES
from .trees import repeating

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
KINDS = {
    "float32": (torch.float32, None, "raw"),
    "bfloat16": (torch.bfloat16, None, "raw"),
    "packed": (torch.bfloat16, None, "packed"),
    "int8": (torch.bfloat16, "int8", "raw"),
    "int4": (torch.bfloat16, "int4", "raw"),
}
if torch.cuda.is_available():
    KINDS |= {f"{kind}, cuda": KINDS[kind] for kind in ("float32", "bfloat16", "int8")}
FAMILIES = ("qwen3-moe", "qwen2-moe", "mixtral", "olmoe")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: ARCHITECTURES[name].save(tmp_path_factory.mktemp(name)) for name in FAMILIES}


def loaded(path: Path, kind: str) -> Decoder:
    dtype, quantization, weight_format = KINDS[kind]
    device = torch.device("cuda") if kind.endswith("cuda") else CPU
    return Decoder(load_config(path), open_weights(path), dtype, device, None, quantization, weight_format)


# rows


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["qwen2-moe", "mixtral"])
def test_a_row_does_not_depend_on_what_else_was_routed(family: str, kind: str, checkpoints: dict[str, Path]) -> None:
    """Chains of up to 33 rows, alone and beside eight other texts, have the bits of plain decoding."""
    model = loaded(checkpoints[family], kind)
    assert isinstance(model.runner, NativeRunner) == (model.device == CPU) and model.batch_invariant
    check_chains(model, text(20, 1), text(33, 2), (1, 2, 4, 7, 13, 32), (1, 3, 7, 12, 15, 21, 30, 64))


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_nodes_of_trees_have_the_bits_of_chains(kind: str, checkpoints: dict[str, Path]) -> None:
    check_tree(loaded(checkpoints["qwen3-moe"], kind), text(9, 3), repeating((-1, 0, -1, 2, 1, 3)), leaf=5)


@needs_kernels
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("float32", "packed")])
def test_prefix_cache_hits_and_prefill_give_the_same_bits(kind: str, checkpoints: dict[str, Path]) -> None:
    check_prefix_cache_hits(loaded(checkpoints["qwen2-moe"], kind), text(300, 4))


PROPOSERS: Mapping[str, Any] = {
    "lookup": lambda draft: Lookup(),
    "chain": lambda draft: DraftModel(draft),
    "tree": lambda draft: DraftModel(draft, DraftModelConfig(tree="top_k", top_k=2)),
}


def texts(
    target: Model, proposer: Proposer, depth: int, batch: int, capacity: int | None = None
) -> dict[int, list[int]]:
    engine = Engine(target, proposer, Fixed(depth), capacity=capacity, max_sequences=batch)
    for i in range(batch):
        prompt = text(20 + 5 * i, i) + [7, 8, 9] * 4
        engine.add(Context(i, prompt, len(prompt), SamplingLaw(temperature=0.0), Streams(i)), Length(32))
    while engine.busy:
        engine.step_or_raise()
        engine.check_integrity()
    assert capacity is None or engine.usage.preemptions
    return {i: sequence.context.tokens for i, sequence in engine.finished.items()}


@needs_kernels
@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
def test_speculation_gives_the_text_of_plain_decoding(kind: str, proposer: str, checkpoints: dict[str, Path]) -> None:
    """Batches of one and eight, and one in which sequences are preempted."""
    model, draft = loaded(checkpoints["qwen2-moe"], kind), loaded(checkpoints["qwen2-moe"], "int8")
    expected = texts(model, Proposer(), 0, 8)
    assert texts(model, PROPOSERS[proposer](draft), 4, 8) == expected
    assert texts(model, PROPOSERS[proposer](draft), 4, 8, capacity=320) == expected
    assert texts(model, PROPOSERS[proposer](draft), 4, 1) == {0: expected[0]}


# routing

ROUTERS = {
    "normalized": {},
    "not normalized": {"normalized": False, "scale": 1.7},
    "one expert": {"chosen": 1, "normalized": False},
    "all experts": {"chosen": 8},
    "sigmoid": {"scoring": "sigmoid", "scale": 2.5},
    "correction": {"scoring": "sigmoid", "correction": True},
    "correction of a softmax": {"correction": True, "normalized": False},
    "groups, best expert": {"groups": 4, "chosen_groups": 2},
    "groups, best two": {"groups": 2, "chosen_groups": 1, "best_two": True, "scoring": "sigmoid", "correction": True},
}


@needs_kernels
@pytest.mark.parametrize("change", ROUTERS)
def test_every_router_equals_the_torch_runner(change: str, checkpoints: dict[str, Path]) -> None:
    path = checkpoints["qwen2-moe"]
    whole = Architecture.of(load_config(path))
    experts = whole.stack[0].experts
    assert experts is not None
    changed = replace(experts, **ROUTERS[change])
    a = replace(whole, stack=tuple(replace(layer, experts=changed) for layer in whole.stack))
    generator = torch.Generator().manual_seed(5)
    biases = {
        f"model.layers.{i}.mlp.gate.e_score_correction_bias": torch.randn(8, generator=generator) for i in range(2)
    }
    source = Source({**open_weights(path), **biases}, a, torch.float32)
    runners = [
        NativeRunner(a, Layers(source), read_ends(source), torch.float32),
        TorchRunner(a, Layers(source), read_ends(source), torch.float32, CPU),
    ]
    compiled, reference = (logits_of(path, runner) for runner in runners)
    assert (compiled - reference).abs().max() < 1e-4


def logits_of(path: Path, runner: Runner) -> Tensor:
    model = loaded(path, "float32")
    model.runner = runner
    handle = model.open(text(30, 6))
    return model.score([handle], [repeating((-1, 0, -1))])[0].logits


def test_equal_scores_choose_the_lowest_expert() -> None:
    e = Experts(count=6, chosen=3, intermediate=8)
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0, 1.0], [0.0] * 6])
    chosen, weights = choose(e, logits, None)
    assert chosen.tolist() == [[1, 2, 4], [0, 1, 2]]
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3))


@needs_kernels
def test_equal_experts_are_taken_in_the_order_of_their_numbers(checkpoints: dict[str, Path]) -> None:
    """All logits of the router are equal, so the first experts compute, whatever the others hold."""
    path = checkpoints["mixtral"]
    weights = {
        name: torch.zeros_like(tensor) if name.endswith(".gate.weight") else tensor
        for name, tensor in open_weights(path).items()
    }
    last = {name: torch.full_like(t, 1e4) if "experts.4" in name else t for name, t in weights.items()}
    models = [Decoder(load_config(path), w, torch.float32, CPU) for w in (weights, last)]
    scores = [model.score([model.open(text(9, 7))], [Draft.empty()])[0].logits for model in models]
    assert torch.equal(*scores)


# checkpoints


def joined(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint with one tensor for gate and up of all experts, and one for down."""
    weights, config = dict(open_weights(path)), load_config(path)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}.mlp.experts"
        if f"{at}.0.down_proj.weight" not in weights:
            continue
        parts = {p: [weights.pop(f"{at}.{i}.{p}_proj.weight") for i in range(8)] for p in ("gate", "up", "down")}
        weights[f"{at}.gate_up_proj"] = torch.cat([torch.stack(parts["gate"]), torch.stack(parts["up"])], 1)
        weights[f"{at}.down_proj"] = torch.stack(parts["down"])
    return weights


def apart(path: Path) -> dict[str, Tensor]:
    """The same with one tensor for each of gate, up and down."""
    weights = joined(path)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "experts.down_proj"))]:
        stack = weights.pop(name)
        if name.endswith("down_proj"):
            weights[f"{name}.weight"] = stack
        else:
            at = name.removesuffix("gate_up_proj")
            weights |= {f"{at}{p}_proj.weight": half for p, half in zip(("gate", "up"), stack.chunk(2, 1), strict=True)}
    return weights


@needs_kernels
@pytest.mark.parametrize("layout", [joined, apart])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_every_layout_of_experts_gives_the_same_bits(layout, quantization, checkpoints):
    path, config = checkpoints["qwen3-moe"], load_config(checkpoints["qwen3-moe"])
    logits = []
    for weights in (open_weights(path), layout(path)):
        model = Decoder(config, weights, torch.bfloat16, CPU, quantization=quantization)
        logits.append(model.score([model.open(text(9, 8))], [Draft.empty()])[0].logits)
    assert torch.equal(*logits)


def test_a_missing_or_misshapen_expert_is_named(checkpoints: dict[str, Path]) -> None:
    path = checkpoints["qwen3-moe"]
    weights, config = dict(open_weights(path)), load_config(path)
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    with pytest.raises(ModelLoadError, match=r"experts\.5\.up_proj"):
        Decoder(config, {k: v for k, v in weights.items() if k != name}, torch.float32, CPU)
    with pytest.raises(ModelLoadError, match=r"experts\.5\.up_proj"):
        Decoder(config, weights | {name: torch.zeros(3, 64)}, torch.float32, CPU)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_experts_per_tok": 9}, "more than its 8 experts"),
        ({"num_experts": -1, "num_local_experts": None}, "num_experts"),
        ({"num_experts": 2000, "num_local_experts": None}, "num_experts"),
        ({"moe_intermediate_size": -1}, "moe_intermediate_size"),
        ({"mlp_only_layers": ["x"]}, "mlp_only_layers"),
    ],
)
def test_wrong_settings_are_named(change: dict[str, Any], message: str, checkpoints: dict[str, Path]) -> None:
    config = load_config(checkpoints["qwen3-moe"]) | change
    with pytest.raises(ModelLoadError, match=message):
        experts_of(config)


def packed_gpt_oss(folder: Path) -> tuple[Path, dict[str, Tensor], dict[str, Tensor]]:
    """A tiny gpt-oss: its folder, its tensors with random MXFP4 experts, and those that transformers unpacks."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tiny = ARCHITECTURES["gpt-oss"]
    path = replace(tiny, config={**tiny.config, "intermediate_size": 64}).save(folder)
    plain = dict(open_weights(path))
    packed, generator = dict(plain), torch.Generator().manual_seed(3)
    for name in [name for name in plain if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, out = plain[name].shape
        blocks = torch.randint(0, 256, (experts, out, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 125, (experts, out, inputs // 32), generator=generator, dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        del packed[name]
        plain[name] = convert_moe_packed_tensors(blocks, scales).float()
    return path, packed, plain


@needs_kernels
def test_packed_experts_of_gpt_oss_are_those_that_transformers_unpacks(tmp_path, monkeypatch):
    path, packed, floats = packed_gpt_oss(tmp_path)
    shapes = {name: tuple(tensor.shape) for name, tensor in packed.items()}
    weights = PackedWeights(packed, shapes, PackedSettings("mxfp4", group=32))
    config = load_config(path)
    compiled = Decoder(config, weights, torch.bfloat16, CPU)
    assert isinstance(compiled.runner, NativeRunner)
    expected = one_by_one(compiled, text(20, 1), text(9, 2))
    handle = compiled.open(text(20, 1))
    rows = compiled.score([handle], [Draft.chain(text(9, 2)[:8])])[0].logits
    assert all(torch.equal(row, alone) for row, alone in zip(rows, expected, strict=True))
    near = one_by_one(Decoder(config, weights, torch.float32, CPU), text(20, 1), [5])[0]  # only activations are rounded
    monkeypatch.setenv(SWITCH, "0")
    both = [Decoder(config, tensors, torch.float32, CPU) for tensors in (weights, floats)]
    logits = [model.score([model.open(text(20, 1))], [Draft.empty()])[0].logits for model in both]
    assert torch.equal(*logits)
    assert (near - logits[0][0]).abs().max() < 0.05 * logits[0].abs().max()
