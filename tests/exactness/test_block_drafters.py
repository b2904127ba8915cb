"""Block drafters keep the target's law, enumerated: chains, trees and confidence stops. Planted mistakes do not."""

from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from tests.models.heads import blocks, tiny
from torch import Tensor

from foretoken.control.fixed import Fixed
from foretoken.core.context import Context
from foretoken.core.step import StepOutput
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models.heads.block import read_block
from foretoken.models.heads.block_net import BlockNet
from foretoken.models.toy import ToyModel
from foretoken.propose import growers
from foretoken.propose.dflash import BlockProposer, DFlashConfig, DSpark, DSparkConfig
from foretoken.verify import choose

from .enumerate import Branching, Text, outcomes, total_variation
from .test_engine import LAWS, LIMIT, generate, reference

pytestmark = pytest.mark.slow

LENGTH = 4  # the first token has no draft, and the last is never drafted: two are
TARGET = ToyModel(3, order=2, seed=9, sharpness=1.0)
METHODS = ("dflash", "jetspec", "dspark")
SIZES = {"vocab": 3, "target_hidden": 8, "block": 3, "mask": 2, "layers": 1, "scale": 0.3}


class ExactNet(BlockNet):
    """Its logits in the toy's float64, so that rounding does not reach the bound of the comparison."""

    def to_target(self, logits: Tensor) -> Tensor:
        return super().to_target(logits).double()


def net(method: str, folder: Path) -> ExactNet:
    head = read_block(tiny.save(folder, *getattr(blocks, method)(**SIZES)))
    g = torch.Generator().manual_seed(4)
    embedding, unembed = torch.randn(3, 64, generator=g), torch.randn(3, 64, generator=g)
    return ExactNet(head, embedding, torch.float32, torch.device("cpu"), 256, lambda x: x @ unembed.T)


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ExactNet]:
    return {method: net(method, tmp_path_factory.mktemp(method)) for method in METHODS}


def proposer(nets: dict[str, ExactNet], method: str, **keys: object) -> BlockProposer:
    own = nets[method]
    if method == "dspark":
        return DSpark(own, own.head.taps, DSparkConfig(**keys))  # type: ignore[arg-type]
    return BlockProposer(method, own, own.head.taps, DFlashConfig(**keys))  # type: ignore[arg-type]


def gap(
    proposed: BlockProposer, law: str = "plain", rejection: str = "block", controller: Fixed | None = None
) -> float:
    """Returns the total variation between the engine's texts and the target's."""

    def run(streams: Branching) -> Text:
        verifiers = partial(choose, rejection=rejection)
        engine = Engine(TARGET, proposed, controller or Fixed(2), rule=verifiers)
        return generate(engine, LAWS[law], Length(LENGTH, (2,)), streams)

    return total_variation(outcomes(run), reference(TARGET, LAWS[law], LENGTH, 2))


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("tree", ["chain", "top_k", "sampled", "greedy_multi"])
@pytest.mark.parametrize("method", METHODS)
def test_law_of_the_engine(method: str, tree: str, law: str, nets: dict[str, ExactNet]) -> None:
    assert gap(proposer(nets, method, tree=tree, top_k=2), law) < LIMIT


@pytest.mark.parametrize("rejection", ["block", "token"])
def test_chains_that_end_by_confidence_keep_the_law(rejection: str, nets: dict[str, ExactNet]) -> None:
    lengths: set[int] = set()

    class Noting(Fixed):
        def observe(self, contexts: list[Context], steps: list[StepOutput]) -> None:  # type: ignore[override]
            lengths.update(len(step.draft) for step in steps if step.position == 1)  # where there is room for two

    stopping = proposer(nets, "dspark", tree="chain", confidence_threshold=0.2)
    assert gap(stopping, rejection=rejection, controller=Noting(2)) < LIMIT
    assert lengths == {1, 2}, lengths


class Marginal(growers.Chain):
    """Draws the second token as if it did not depend on the first, and says that it did."""

    __slots__ = ("first",)

    def extend(self, logits: Tensor, hidden: Tensor | None = None) -> None:
        if not self.tokens:
            self.first = logits
            return super().extend(logits, hidden)
        super().extend(self.first, hidden)
        self.rows[-1] = self._rows(self.law, self.widen(logits))[0]
        return None


class Late(growers.Chain):
    """Asks how confident it may be after the draw, and drops the token."""

    __slots__ = ()

    def extend(self, logits: Tensor, hidden: Tensor | None = None) -> None:
        super().extend(logits, hidden)
        if float(self.rows[-1][self.tokens[-1]]) < 0.4:
            self.tokens.pop()
            self.rows.pop()
            self.stopped = True


@pytest.mark.parametrize("mistake", [Marginal, Late])
def test_planted_mistakes_are_caught(mistake: type[growers.Chain], nets: dict[str, ExactNet]) -> None:
    with mock.patch.object(growers, "Chain", mistake):
        assert gap(proposer(nets, "dspark", tree="chain")) > 0.01
