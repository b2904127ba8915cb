"""Chains and trees that a head drafts in one call of the compiled kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.models.heads import tiny
from tests.models.trees import repeating
from tests.propose.test_eagle import context, seen

from foretoken.core.context import Exactness
from foretoken.core.draft import Draft
from foretoken.core.law import Sampled
from foretoken.models.formats.quantize import Quantizer
from foretoken.models.heads.eagle import read_eagle
from foretoken.models.heads.eagle_net import EagleNet
from foretoken.propose.eagle import Eagle, EagleConfig

HEADS: dict[str, dict[str, int]] = {"few tokens": {"draft_vocab": 37}, "all tokens": {"draft_vocab": 101}}
REQUESTS: dict[str, tuple[Exactness, dict[str, float]]] = {
    "greedy": (Exactness.DISTRIBUTION, {"temperature": 0.0}),
    "drawn": (Exactness.DISTRIBUTION, {"temperature": 0.8, "top_k": 9}),
    "raced": (Exactness.TRAJECTORY, {"temperature": 1.3, "top_p": 0.9}),
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("quantizer", [None, Quantizer(8)], ids=["floats", "int8"])
@pytest.mark.parametrize(
    "config",
    [
        EagleConfig(tree="chain"),
        EagleConfig(tree="at_once"),
        EagleConfig(tree="at_once", num_steps=3, top_k=5),
        EagleConfig(tree="at_once", top_k=1),
    ],
    ids=["chain", "tree", "wide tree", "narrow tree"],
)
def test_drafts_in_one_call_are_those_of_a_pass_for_each_level(
    head: str, quantizer: Quantizer | None, config: EagleConfig, tmp_path: Path
) -> None:
    """Two steps of a batch, with texts of several lengths, budgets and ways to draw."""
    read = read_eagle(tiny.save(tmp_path, *tiny.eagle3(**HEADS[head])))
    requests = [*REQUESTS.values(), REQUESTS["greedy"]]

    def drafts(at_once: bool) -> list[Draft]:
        embedding = read.tensors["embed_tokens.weight"]
        net = EagleNet(read, embedding, torch.float32, torch.device("cpu"), 512, quantizer=quantizer)
        assert net.drafts_chains
        if not at_once:
            net.vocabulary = None
        grown: list[bool] = []
        net.grow = lambda *a, grow=net.grow: (grown.append(True), grow(*a))[1]  # type: ignore[method-assign, misc]
        proposer = Eagle(net, read.taps or (), config)
        contexts = [context(i, list(range(1, 4 + 30 * i)), grade, **law) for i, (grade, law) in enumerate(requests)]
        found = []
        proposer.observe(contexts, [seen((3,), Draft.empty(), (), 0, len(c.tokens) - 1) for c in contexts])
        for budgets in ([9, 7, 1, 4], [2, 5, 6, 24]):
            found += proposer.propose(contexts, budgets)
            for c in contexts:
                first = len(c.tokens) - 1
                c.tokens += [8, 9]
                proposer.observe([c], [seen((8, 9), repeating((-1,), 8), (0,), first, 2)])
        assert bool(grown) != at_once
        return found

    for one, other in zip(drafts(True), drafts(False), strict=True):
        assert (one.ids, one.parents) == (other.ids, other.parents)
        assert isinstance(one.law, Sampled) == isinstance(other.law, Sampled)
        if isinstance(one.law, Sampled) and isinstance(other.law, Sampled):
            assert torch.equal(one.law.probs, other.law.probs)
        if other.scores is not None:
            assert one.scores is not None
            assert one.scores == pytest.approx(other.scores, rel=1e-5, abs=1e-5)
