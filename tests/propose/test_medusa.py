"""Medusa and blockwise heads: the nets against plain torch, their drafts, and that nothing they draft shows."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.models.heads import tiny
from tests.models.trees import repeating
from tests.propose.heads import check_texts
from torch import Tensor

from foretoken import LLM
from foretoken.core.context import Context, Exactness
from foretoken.core.draft import Draft, PointMass
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.core.sampling import SamplingLaw
from foretoken.core.step import StepOutput, Timings
from foretoken.core.streams import Streams
from foretoken.core.verdict import Verdict
from foretoken.models.base import Scores
from foretoken.models.heads.medusa import BlockwiseNet, MedusaNet, read_blockwise, read_medusa
from foretoken.propose.base import Observation
from foretoken.propose.medusa import BlockwiseConfig, MedusaConfig, Parallel

CPU, F32 = torch.device("cpu"), torch.float32
HEAD = torch.randn(101, 64, generator=torch.Generator().manual_seed(0)) * 0.3


def unembed(x: Tensor) -> Tensor:
    return x.float() @ HEAD.T


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("own", [0, 1, 3])
def test_medusa_heads_follow_the_paper(own: int, layers: int, tmp_path: Path) -> None:
    config, t = tiny.medusa(own=own, layers=layers)
    config["original_lm_head"] = own < 3
    heads = read_medusa(tiny.save(tmp_path, config, t))
    net = MedusaNet(heads, F32, CPU, unembed)
    for rows in (1, 4):
        x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
        logits = net(x)
        for i in range(3):
            y = x
            for j in range(layers):
                y = y + F.silu(F.linear(y, t[f"blocks.{i}.layers.{j}.weight"], t[f"blocks.{i}.layers.{j}.bias"]))
            matrix = HEAD if own == 0 else t[f"lm_heads.{i if own == 3 else 0}.weight"]
            torch.testing.assert_close(logits[:, i], y @ matrix.T, rtol=1e-4, atol=1e-4)


def test_a_reduced_vocabulary_is_mapped_to_the_targets(tmp_path: Path) -> None:
    config, tensors = tiny.medusa(own=3)
    ids = torch.tensor([5, 1, 77])
    tensors = {n: t[ids].clone() if n.startswith("lm_heads") else t for n, t in tensors.items()} | {"token_map": ids}
    whole = MedusaNet(read_medusa(tiny.save(tmp_path / "w", *tiny.medusa(own=3))), F32, CPU, unembed)
    heads = read_medusa(tiny.save(tmp_path / "r", config | {"truncated_vocab_size": 3}, tensors))
    x = torch.randn(2, 64)
    logits = MedusaNet(heads, F32, CPU, unembed)(x)
    assert logits.shape == (2, 3, 101)
    torch.testing.assert_close(logits[..., ids], whole(x)[..., ids], rtol=1e-4, atol=1e-4)
    assert int((logits > -torch.inf).sum()) == 18


def test_blockwise_heads_follow_the_paper(tmp_path: Path) -> None:
    config, t = tiny.blockwise()
    net = BlockwiseNet(read_blockwise(tiny.save(tmp_path, config, t)), F32, CPU, unembed)
    for rows in (1, 5):
        x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
        for i, logits in enumerate(net(x).unbind(1)):
            inner = F.relu(F.linear(x, t[f"heads.{i}.up.weight"], t[f"heads.{i}.up.bias"]))
            y = x + F.linear(inner, t[f"heads.{i}.down.weight"], t[f"heads.{i}.down.bias"])
            torch.testing.assert_close(logits, y @ HEAD.T, rtol=1e-4, atol=1e-4)


class Table:
    """A net whose logits are those of a row, so that it is seen which row was given."""

    depth = 3

    def __call__(self, x: Tensor) -> Tensor:
        return torch.stack([x[:, :6], x[:, :6].roll(1, 1), x[:, :6].roll(2, 1)], dim=1)


def observed(proposer: Parallel, c: Context, draft: Draft, path: tuple[int, ...], tokens: tuple[int, ...]) -> None:
    rows = F.one_hot(torch.arange(2 + len(draft)) % 6, 8).float() * 5  # one pending row, the root, the nodes
    step = StepOutput(c.id, 0, draft, Verdict(path, tokens[-1]), tokens, Timings(0, 0, 0, 0, 1))
    proposer.observe([c], [Observation(step, Scores(torch.zeros(1, 6), {4: rows}))])


def test_heads_use_the_row_that_emitted_the_newest_token() -> None:
    proposer = Parallel("medusa", Table(), 4, MedusaConfig(top_k=1))
    c = Context(0, [1, 2], 2, SamplingLaw(temperature=0.0), Streams(1))
    assert proposer.propose([c], [3]) == [Draft.empty()]
    observed(proposer, c, Draft.empty(), (), (3,))
    assert proposer.propose([c], [3])[0].ids == (1, 2, 3)  # the root's row, 1
    tree = repeating((-1, 0, -1, 2), 7)
    observed(proposer, c, tree, (2, 3), (8, 8, 4))
    assert proposer.propose([c], [2])[0].ids == (5, 0)  # node 3's row, 5
    observed(proposer, c, tree, (2, 3), (8, 8))  # the text was cut before the target's own token
    assert proposer.propose([c], [2])[0].ids == (4, 5)  # node 2's
    proposer.forget(c)
    proposer.forget(c)
    assert proposer.propose([c], [3]) == [Draft.empty()]


def test_budgets_and_heads_bound_the_tree() -> None:
    contexts = [Context(i, [1, 2], 2, SamplingLaw(), Streams(1)) for i in range(3)]
    for steps, depth in ((None, 3), (2, 2)):
        proposer = Parallel("medusa", Table(), 4, MedusaConfig(top_k=3, num_steps=steps))
        for c in contexts:
            observed(proposer, c, Draft.empty(), (), (3,))
        drafts = proposer.propose(contexts, [7, 0, 1])
        assert [len(d) for d in drafts] == [7, 0, 1]
        assert max(drafts[0].depths) == depth
        assert all(isinstance(d.law, PointMass) for d in drafts)


def test_the_trajectory_grade_leads_with_the_targets_noise() -> None:
    proposer = Parallel("medusa", Table(), 4, MedusaConfig(top_k=1))
    c = Context(0, [1, 2], 2, SamplingLaw(temperature=0.7), Streams(4), Exactness.TRAJECTORY)
    observed(proposer, c, Draft.empty(), (), (3,))
    ids = proposer.propose([c], [3])[0].ids
    logits = Table()(F.one_hot(torch.tensor([1]), 8).float() * 5)[0]
    rows = c.law.probs(logits, ())
    assert list(ids) == [c.streams.shared(0).categorical(row, i) for i, row in enumerate(rows)]


def test_wrong_keys_are_refused() -> None:
    for wrong in ({"num_steps": 0}, {"top_k": 0}, {"top_k": None}):
        with pytest.raises(InvalidRequest, match=next(iter(wrong))):
            MedusaConfig(**wrong)  # type: ignore[arg-type]
    assert BlockwiseConfig().top_k == 1


KINDS: dict[str, Callable[..., tuple[dict[str, object], tiny.Tensors]]] = {
    "medusa": tiny.medusa,
    "blockwise": lambda vocab, **sizes: tiny.blockwise(**sizes),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_heads_in_the_targets_folder_are_found_and_change_nothing(kind, tiny_pair, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    target = tiny.linked(tiny_pair.target, tmp_path / "target")
    plain = LLM(target, dtype="float32")
    tiny.save(target / "heads" / kind, *KINDS[kind](vocab=plain.target.vocab_size))
    llm = LLM(target, dtype="float32", speculative_config={"method": kind, "num_speculative_tokens": 6, "top_k": 3})
    assert isinstance(llm.engine.proposer, Parallel)
    for temperature in (0.0, 1.0):
        check_texts(llm, plain, temperature)
    tiny.save(target / "heads" / kind, *KINDS[kind](vocab=plain.target.vocab_size, hidden=32))
    with pytest.raises(ModelLoadError, match="hidden size 32"):
        LLM(target, speculative_config={"method": kind})
