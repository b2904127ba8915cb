"""Draft models that predict all positions in one pass (PARD): what they draft, and that texts stay the target's."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from tests.models.dense import module
from tests.models.tiny import ARCHITECTURES, Tiny

from foretoken import LLM, SamplingParams
from foretoken.core.context import Context, Exactness
from foretoken.core.draft import Draft, PointMass, Sampled, TopPlusSampled, WithoutReplacement
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams
from foretoken.models.base import Scores
from foretoken.models.heads.files import mask_token
from foretoken.models.toy import ToyModel
from foretoken.propose.draft_model import DraftMethodConfig, DraftModelConfig, ParallelDraftModel, _mask_token
from foretoken.propose.growers import TreeKind
from foretoken.propose.union import Union

MASK = 6


class Counted(ToyModel):
    """A toy that counts its passes."""

    passes = 0

    def score(self, *args: Any, **keys: Any) -> list[Scores]:
        self.passes += 1
        return super().score(*args, **keys)


def toy() -> Counted:
    return Counted(vocab_size=7, order=3, seed=1, sharpness=2.0)


def context(grade: Exactness = Exactness.DISTRIBUTION, **law: float) -> Context:
    return Context(0, [1, 2, 3], 3, SamplingLaw(**law), Streams(5), grade)  # type: ignore[arg-type]


def proposed(c: Context, budget: int, **config: Any) -> Draft:
    return ParallelDraftModel(toy(), MASK, DraftModelConfig(**config)).propose([c], [budget])[0]


def marginal(c: Context, depth: int, path: tuple[int, ...] = ()) -> torch.Tensor:
    """The draft's distribution at a depth, with the history of a path: what it predicts after mask tokens."""
    return c.law.probs(toy().logits([1, 2, 3, *[MASK] * depth])[None], [c.history(path)])[0]


def test_a_chain_carries_the_marginals_that_its_tokens_were_drawn_from() -> None:
    c = context(top_k=3, temperature=0.7, presence_penalty=0.5)
    draft = proposed(c, 4)
    assert isinstance(draft.law, Sampled)
    for depth in range(4):
        assert torch.equal(draft.law.probs[depth], marginal(c, depth, draft.ids[:depth]))
        assert draft.law.probs[depth, draft.ids[depth]] > 0


def test_a_greedy_chain_takes_the_likeliest_token_of_each_position() -> None:
    draft = proposed(context(temperature=0.0), 4)
    assert isinstance(draft.law, PointMass)
    assert list(draft.ids) == [int(toy().logits([1, 2, 3, *[MASK] * depth]).argmax()) for depth in range(4)]


@pytest.mark.parametrize("tree", [kind for kind in get_args(TreeKind) if "multi" in kind or kind == "sampled"])
def test_all_nodes_of_a_depth_are_drawn_from_one_distribution(tree: TreeKind) -> None:
    c = context()
    draft = proposed(c, 9, tree=tree, top_k=3)
    assert isinstance(draft.law, WithoutReplacement | TopPlusSampled)
    for node, parent in enumerate(draft.parents):
        depth = 0 if parent < 0 else draft.depths[parent]
        assert torch.equal(draft.law.probs[parent + 1], marginal(c, depth)), node
    assert len(draft) == 9


def test_a_ranked_tree_expands_every_level_alike() -> None:
    c = context(temperature=0.0)
    draft = proposed(c, 12, tree="top_k", top_k=2, num_steps=3)
    for node, parent in enumerate(draft.parents):
        depth = 0 if parent < 0 else draft.depths[parent]
        best = toy().logits([1, 2, 3, *[MASK] * depth]).topk(2).indices.tolist()
        assert draft.ids[node] in best


@pytest.mark.parametrize("tree", get_args(TreeKind))
def test_a_step_is_one_pass_for_all_sequences(tree: TreeKind) -> None:
    model = toy()
    proposer = ParallelDraftModel(model, MASK, DraftModelConfig(tree=tree, top_k=2))
    contexts = [Context(i, [1, 2, 3 + i], 3, SamplingLaw(), Streams(i)) for i in range(3)]
    drafts = proposer.propose(contexts, [5, 0, 3])
    assert model.passes == 1
    assert [len(draft) for draft in drafts] == [5, 0, 3]
    assert [len(draft) for draft in proposer.propose(contexts, [6, 2, 4])] == [6, 2, 4]  # the first step was abandoned


def test_the_mask_token_of_a_config() -> None:
    path = Path("draft")
    assert mask_token({"pard_token": 5}, 7, path) == 5
    assert mask_token({"ptd_token_id": "6"}, 7, path) == 6
    assert mask_token({}, 7, path) is None
    for wrong in (7, -1, "x", 1.5, True):
        with pytest.raises(ModelLoadError, match="below 7"):
            mask_token({"pard_token": wrong}, 7, path)


def test_a_wrong_mask_token_is_an_error_only_where_it_is_needed(tmp_path, caplog):
    (tmp_path / "config.json").write_text(json.dumps({"pard_token": 7}))
    assert _mask_token(DraftMethodConfig(), tmp_path, 7) is None
    assert "token by token" in caplog.text
    with pytest.raises(ModelLoadError, match="below 7"):
        _mask_token(DraftMethodConfig(parallel_drafting=True), tmp_path, 7)
    assert _mask_token(DraftMethodConfig(), tmp_path, 8) == 7


def test_a_stop_needs_several_passes() -> None:
    with pytest.raises(InvalidRequest, match="draft_stop"):
        ParallelDraftModel(toy(), MASK, DraftModelConfig(draft_stop="entropy"))


# through the whole engine

PROMPTS = ["x = 1", "for i in range", "a b a b a b a b", "import os\n" * 9, "def f(x):\n" * 5]
SAMPLING: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 1.0, "seed": 3}}


@pytest.fixture(scope="module")
def target(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 4, whose last layers read the keys and values of earlier ones."""
    folder = tmp_path_factory.mktemp("target")
    module("gemma4", vocab_size=400, vocab_size_per_layer_input=400).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def draft(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft")
    Tiny("Llama", {**ARCHITECTURES["llama"].config, "vocab_size": 400}).save(folder)
    tokenizer.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "pard_token": 399}))
    return folder


def texts(llm: LLM, sampling: str, speculative_tokens: int) -> list[str]:
    own: dict[str, Any] = {"max_tokens": 32, "speculative_tokens": speculative_tokens, **SAMPLING[sampling]}
    return [o.outputs[0].text for o in llm.generate(PROMPTS, SamplingParams(ignore_eos=True, **own))]


@pytest.mark.slow
@pytest.mark.parametrize("tree", ["chain", "top_k", "sampled"])
def test_every_text_is_that_of_plain_decoding(tree: str, target: Path, draft: Path) -> None:
    """Alone, and in batches with little memory, in which requests wait for each other."""
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 256}
    plain = LLM(target, max_num_seqs=1, **options)
    config = {"method": "draft_model", "model": str(draft), "tree": tree, "top_k": 2}
    memory = 400 * plain.target.kv_bytes_per_token
    several = LLM(target, speculative_config=config, max_num_seqs=8, kv_cache_memory_bytes=memory, **options)
    alone = LLM(target, speculative_config=config, max_num_seqs=1, **options)
    assert isinstance(alone.engine.proposer, Union)
    assert isinstance(alone.engine.proposer.sources[0].proposer, ParallelDraftModel)
    for sampling in SAMPLING:
        wanted = texts(plain, sampling, 0)
        for length in (1, 5):
            assert texts(alone, sampling, length) == wanted
            assert texts(several, sampling, length) == wanted


@pytest.mark.slow
def test_a_draft_without_a_mask_token_is_refused(target: Path, draft: Path) -> None:
    config = {"method": "draft_model", "model": str(draft)}
    slow = LLM(target, speculative_config={**config, "parallel_drafting": False}, dtype="float32")
    assert not isinstance(slow.engine.proposer, ParallelDraftModel)
    with pytest.raises(InvalidRequest, match="pard_token"):
        LLM(target, speculative_config={**config, "model": str(target), "parallel_drafting": True}, dtype="float32")
