"""Chains and trees that a head drafts in one call of the compiled kernels."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.heads import blocks, tiny
from tests.models.heads.mtp_files import MTP_FAMILIES, MtpReference
from tests.models.tiny import ARCHITECTURES, only_runner
from tests.models.trees import repeating
from tests.propose.test_eagle import context, seen

from foretoken.core.context import Exactness
from foretoken.core.draft import Draft, PointMass
from foretoken.models.base import Model
from foretoken.models.formats.quantize import Quantizer
from foretoken.models.heads.block import read_block
from foretoken.models.heads.block_net import BlockNet
from foretoken.models.heads.eagle import EagleNet, read_eagle
from foretoken.models.heads.loading import load_mtp
from foretoken.models.heads.weights import TargetHead
from foretoken.models.loading import load_model
from foretoken.propose.dflash import BlockProposer, DFlashConfig, DSpark, DSparkConfig
from foretoken.propose.eagle import Eagle, EagleConfig, ParallelEagle
from foretoken.propose.hidden_states import HiddenStateProposer
from foretoken.propose.mtp import Mtp, MtpConfig

Request = tuple[Exactness, dict[str, float]]
REQUESTS: dict[str, Request] = {
    "greedy": (Exactness.DISTRIBUTION, {"temperature": 0.0}),
    "drawn": (Exactness.DISTRIBUTION, {"temperature": 0.8, "top_k": 9}),
    "raced": (Exactness.TRAJECTORY, {"temperature": 1.3, "top_p": 0.9}),
}
PENALIZED = Exactness.DISTRIBUTION, {"temperature": 0.9, "frequency_penalty": 2.0, "repetition_penalty": 1.5}
CONFIGS: dict[str, dict[str, Any]] = {
    "chain": {"tree": "chain"},
    "tree": {"tree": "at_once"},
    "wide tree": {"tree": "at_once", "num_steps": 3, "top_k": 5},
    "narrow tree": {"tree": "at_once", "top_k": 1},
    "ranked tree": {"tree": "top_k", "top_k": 4},
    "sampled tree": {"tree": "sampled", "num_steps": 4, "top_k": 3},
    "greedy_multi tree": {"tree": "greedy_multi", "top_k": 3},
}


@lru_cache(2)  # for all proposers of one test
def target(folder: Path, **options: str) -> Model:
    ARCHITECTURES["llama"].build().save_pretrained(folder)
    return load_model(folder, "float32", "cpu", "native", **options)


def eagle3(folder: Path, config: dict[str, Any], quantizer: Quantizer | None = None, **sizes: Any) -> Eagle:
    head = read_eagle(tiny.save(folder, *tiny.eagle3(**sizes)))
    embedding = head.tensors["embed_tokens.weight"]
    net = EagleNet(head, embedding, torch.float32, torch.device("cpu"), 512, quantizer=quantizer)
    return Eagle(net, (1, 2, 2), EagleConfig(**config))


def eagle1(folder: Path, config: dict[str, Any], **options: str) -> Eagle:
    head = read_eagle(tiny.save(folder / "head", *tiny.eagle1()))
    embedding, borrowed = head.tensors["embed_tokens.weight"], TargetHead(target(folder / "target", **options))
    return Eagle(
        EagleNet(head, embedding, torch.float32, torch.device("cpu"), 512, borrowed), (2,), EagleConfig(**config)
    )


@lru_cache(2)
def mtp_target(folder: Path, family: str, layers: int, **options: str) -> Model:
    MtpReference(MTP_FAMILIES[family], layers).save(folder)
    return load_model(folder, "float32", "cpu", "native", **options)


def mtp(folder: Path, config: dict[str, Any], family: str, chained: bool, layers: int = 1, **options: str) -> Mtp:
    net = load_mtp(mtp_target(folder, family, layers, **options), None, None, folder, True, chained).net
    return Mtp(net, (2,), MtpConfig(**config))


def p_eagle(folder: Path, config: dict[str, Any]) -> Eagle:
    net = eagle3(folder, config, mask=7).net
    return ParallelEagle(net, (1, 2, 2), EagleConfig(**config))


def block(
    folder: Path,
    config: dict[str, Any],
    written: dict[str, Any],
    tensors: tiny.Tensors,
    quantizer: Quantizer | None = None,
    **options: str,
) -> BlockProposer:
    head = read_block(tiny.save(folder / "head", written, tensors))
    model = target(folder / "target", **options)
    embedding = tensors.get("embed_tokens.weight", torch.randn(101, 64, generator=torch.Generator().manual_seed(1)))
    net = BlockNet(head, embedding, torch.float32, torch.device("cpu"), 512, TargetHead(model), quantizer=quantizer)
    if head.method == "dspark":
        return DSpark(net, (1, 2), DSparkConfig(**config))
    return BlockProposer("dflash", net, (1, 2), DFlashConfig(**config))


HEADS: dict[str, Callable[[Path, dict[str, Any]], HiddenStateProposer]] = {
    "EAGLE-3": lambda folder, config: eagle3(folder, config, draft_vocab=101),
    "EAGLE-3, few tokens": lambda folder, config: eagle3(folder, config, draft_vocab=37),
    "EAGLE-3, int8": lambda folder, config: eagle3(folder, config, Quantizer(8), draft_vocab=37),
    "EAGLE-3, int4": lambda folder, config: eagle3(folder, config, Quantizer(4, 32), draft_vocab=37),
    "EAGLE 3.1": lambda folder, config: eagle3(folder, config, fc_norm=True, norm_output=True),
    "EAGLE-3, sliding": lambda folder, config: eagle3(
        folder, config, layer_types=["sliding_attention"], sliding_window=8
    ),
    "EAGLE-1": eagle1,
    "EAGLE-1, int8": lambda folder, config: eagle1(folder, config, quantization="int8"),
    "P-EAGLE": p_eagle,
    "DFlash": lambda folder, config: block(folder, config, *blocks.dflash(block=7)),
    "DFlash, sliding": lambda folder, config: block(
        folder, config, *blocks.dflash(layer_types=["sliding_attention", "full_attention"], sliding_window=5, block=7)
    ),
    "JetSpec": lambda folder, config: block(folder, config, *blocks.jetspec(block=7)),
    "DSpark": lambda folder, config: block(folder, config, *blocks.dspark(rank=32, block=6)),
    "DSpark, int8": lambda folder, config: block(
        folder, config, *blocks.dspark(rank=32, block=6), Quantizer(8), quantization="int8"
    ),
    "DSpark, int4": lambda folder, config: block(
        folder, config, *blocks.dspark(rank=32, block=6), Quantizer(4, 32), quantization="int4"
    ),
    "DSpark, few tokens": lambda folder, config: block(
        folder, config, *blocks.speculators(*blocks.dspark(rank=32, block=6))
    ),
    "MTP": lambda folder, config: mtp(folder, config, "qwen3.5", chained=True),
    "MTP, latent attention": lambda folder, config: mtp(folder, config, "deepseek-v3", chained=False),
    "MTP, two layers": lambda folder, config: mtp(folder, config, "mimo", chained=True, layers=2),
    "MTP, three layers, int8": lambda folder, config: mtp(
        folder, config, "glm4-moe", chained=False, layers=3, quantization="int8"
    ),
    "MTP, three layers, int4": lambda folder, config: mtp(
        folder, config, "glm4-moe", chained=False, layers=3, quantization="int4"
    ),
    "MTP, latent attention, int4": lambda folder, config: mtp(
        folder, config, "deepseek-v3", chained=False, quantization="int4"
    ),
    "MTP, experts, int8": lambda folder, config: mtp(folder, config, "glm4-moe", chained=True, quantization="int8"),
}

# The compiled kernels draft by these level by level.
GATED: dict[str, Callable[[Path, dict[str, Any]], HiddenStateProposer]] = {
    "DSpark, gated": lambda folder, config: block(folder, config, *blocks.dspark(rank=32, block=6, gated=True)),
}


def drafts(
    folder: Path, config: dict[str, Any], head: str, at_once: bool, runner: AbstractContextManager[Any], *more: Request
) -> list[Draft]:
    """Two steps of a batch, with texts of several lengths, budgets and ways to draw."""
    with runner:
        proposer = {**HEADS, **GATED}[head](folder, config)
        net: Any = proposer.net
        assert net.drafts_chains
        for layer in () if at_once else getattr(net, "nets", (net,)):
            layer.vocabulary = None
        grown: list[bool] = []
        passes = {name: getattr(net, name) for name in ("grow", "look_ahead") if hasattr(net, name)}
        for name, call in passes.items():
            setattr(net, name, lambda *arguments, call=call: (grown.append(True), call(*arguments))[1])
        found = two_steps(proposer, (*REQUESTS.values(), REQUESTS["greedy"], *more))
    assert bool(grown) != at_once
    return found


def two_steps(proposer: HiddenStateProposer, requests: Sequence[Request]) -> list[Draft]:
    contexts = [
        context(i, [1 + at % 90 for at in range(3 + 30 * i)], grade, **law) for i, (grade, law) in enumerate(requests)
    ]
    found = []
    proposer.observe(contexts, [seen((3,), Draft.empty(), (), 0, len(c.tokens) - 1) for c in contexts])
    for budgets in ([9, 7, 1, 4, 6], [2, 5, 6, 24, 7]):
        found += proposer.propose(contexts, budgets[: len(contexts)])
        for c in contexts:
            first = len(c.tokens) - 1
            c.tokens += [8, 9]
            proposer.observe([c], [seen((8, 9), repeating((-1,), 8), (0,), first, 2)])
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda head: tmp_path_factory.mktemp("head"))


@pytest.mark.parametrize(
    "config", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("chain", "tree"))) for name in CONFIGS]
)
@pytest.mark.parametrize("head", HEADS)
def test_drafts_in_one_call_are_those_of_a_pass_for_each_level(
    head: str, config: str, folders: Callable[[str], Path]
) -> None:
    once, levels = (
        drafts(folders(head), CONFIGS[config], head, at_once, only_runner("compiled"), PENALIZED)
        for at_once in (True, False)
    )
    same_drafts(once, levels)


def same_drafts(once: Sequence[Draft], levels: Sequence[Draft], tolerance: float = 0.0) -> None:
    for one, other in zip(once, levels, strict=True):
        assert (one.ids, one.parents) == (other.ids, other.parents)
        assert isinstance(one.law, type(other.law))
        if not isinstance(one.law, PointMass) and not isinstance(other.law, PointMass):
            torch.testing.assert_close(one.law.probs, other.law.probs, rtol=tolerance, atol=tolerance)
        if other.scores is not None:
            assert one.scores is not None
            assert one.scores == pytest.approx(other.scores, rel=1e-5, abs=1e-5)
