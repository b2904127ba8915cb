"""DFlash and DSpark as proposers: one pass for each draft, and texts that do not depend on them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.heads import blocks, tiny
from tests.propose.heads import PROMPTS, check_texts

from foretoken import LLM, SamplingParams
from foretoken.core.context import Context
from foretoken.core.draft import Draft, PointMass, Sampled, WithoutReplacement
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.core.sampling import SamplingLaw
from foretoken.core.step import StepOutput, Timings
from foretoken.core.streams import Streams
from foretoken.core.verdict import Verdict
from foretoken.models.base import Scores
from foretoken.models.chains import ScoredRows
from foretoken.models.heads.block import read_block
from foretoken.models.heads.block_net import BlockNet
from foretoken.propose.base import Observation
from foretoken.propose.dflash import BlockProposer, DFlashConfig, DSpark, DSparkConfig


def proposer(folder: Path, method: str, **keys: Any) -> BlockProposer:
    head = read_block(tiny.save(folder, *getattr(blocks, method)()))
    g = torch.Generator().manual_seed(4)
    embedding, unembed = torch.randn(101, 64, generator=g), torch.randn(101, 64, generator=g)
    net = BlockNet(head, embedding, torch.float32, torch.device("cpu"), 64, lambda x: x @ unembed.T)
    if method == "dspark":
        return DSpark(net, head.taps, DSparkConfig(**keys))
    return BlockProposer(method, net, head.taps, DFlashConfig(**keys))


def ready(proposed: BlockProposer, count: int, temperature: float = 0.0, length: int = 6) -> list[Context]:
    """Returns sequences whose hidden states the proposer has seen."""
    contexts = []
    for i in range(count):
        tokens = [(i + 3 * j) % 99 for j in range(length)]
        contexts.append(Context(i, tokens, 2, SamplingLaw(temperature=temperature), Streams(i)))
        states = torch.randn(length - 1, 64, generator=torch.Generator().manual_seed(i))
        step = StepOutput(0, 0, Draft.empty(), Verdict((), tokens[-1]), (tokens[-1],), Timings(0, 0, 0, 0, 1))
        scores = Scores(torch.zeros(1, 101), dict.fromkeys((1, 2), states))
        proposed.observe([contexts[-1]], [Observation(step, scores)])
    return contexts


def test_a_draft_of_any_depth_is_one_pass_for_all_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proposed = proposer(tmp_path, "dspark", tree="chain")
    contexts = ready(proposed, 3)
    passes: list[int] = []
    predict = proposed.net._predict
    monkeypatch.setattr(proposed.net, "_predict", lambda handles: (passes.append(len(handles)), predict(handles))[1])
    drafts = proposed.propose(contexts, [4, 2, 9])
    assert passes == [3]
    assert [len(draft) for draft in drafts] == [4, 2, 4]  # a block of four rows predicts four tokens
    assert all(draft.is_chain and isinstance(draft.law, PointMass) for draft in drafts)


def test_marginals_and_conditionals_are_what_was_drawn_from(tmp_path: Path) -> None:
    """If siblings exist, a DFlash node's children have the same distribution whatever the node; DSpark's do not."""
    for method, same in (("dflash", True), ("dspark", False)):
        proposed = proposer(tmp_path / method, method, tree="sampled", top_k=3)
        (context,) = ready(proposed, 1, temperature=1.0)
        (draft,) = proposed.propose([context], [12])
        assert isinstance(draft.law, WithoutReplacement)
        parents = [n for n, depth in enumerate(draft.depths) if depth == 1 and n in draft.parents]
        rows = [draft.law.probs[n + 1] for n in parents]
        assert len(rows) > 1 and torch.equal(rows[0], rows[1]) == same


def test_drawn_chains_carry_their_distributions(tmp_path: Path) -> None:
    proposed = proposer(tmp_path, "dspark", tree="chain")
    (context,) = ready(proposed, 1, temperature=0.8)
    (draft,) = proposed.propose([context], [4])
    assert isinstance(draft.law, Sampled) and draft.law.probs.shape == (4, 101)
    assert all(row[token] > 0 for row, token in zip(draft.law.probs, draft.ids, strict=True))


def test_a_chain_ends_where_its_confidence_falls_below_the_threshold(tmp_path: Path) -> None:
    longest = proposer(tmp_path / "a", "dspark", tree="chain", confidence_threshold=1e-9)
    (context,) = ready(longest, 1)
    (draft,) = longest.propose([context], [4])
    handle, before = longest._handles[0], torch.tensor([*context.tokens[-1:], *draft.ids[:3]])
    scored = ScoredRows(torch.empty(0), handle.states[:4], before, torch.tensor(True))
    chances = longest.net.confidence(scored).cumprod(0).tolist()
    for wanted in range(4):
        threshold = (chances[wanted - 1] + chances[wanted]) / 2 if wanted else min(1.0, chances[0] + 1e-3)
        stopping = proposer(tmp_path / f"{wanted}", "dspark", tree="chain", confidence_threshold=threshold)
        (context,) = ready(stopping, 1)
        assert len(stopping.propose([context], [4])[0]) == wanted


def test_a_block_that_does_not_fit_the_context_window_is_not_drafted(tmp_path: Path) -> None:
    for length, drafted in ((60, 1), (61, 0)):
        proposed = proposer(tmp_path / f"{length}", "dspark", tree="chain")
        assert len(proposed.propose(ready(proposed, 1, length=length), [1])[0]) == drafted


def test_wrong_keys_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="confidence_threshold"):
        DSparkConfig(tree="chain", confidence_threshold=1.5)
    with pytest.raises(InvalidRequest, match="ends chains"):
        DSparkConfig(confidence_threshold=0.5)
    with pytest.raises(InvalidRequest, match="tree"):
        DFlashConfig(tree="drawn")  # type: ignore[arg-type]


def test_heads_of_another_target_or_method_are_refused(tiny_pair: Any, tmp_path: Path) -> None:
    vocab = LLM(tiny_pair.target).target.vocab_size

    def load(method: str, written: tuple[dict[str, Any], tiny.Tensors], **keys: Any) -> None:
        path = tiny.save(tmp_path / f"{len(list(tmp_path.iterdir()))}", *written)
        LLM(tiny_pair.target, speculative_config={"method": method, "model": str(path), **keys})

    with pytest.raises(ModelLoadError, match="hidden size 32"):
        load("dflash", blocks.dflash(vocab=vocab, target_hidden=32))
    with pytest.raises(ModelLoadError, match=f"vocabulary of {vocab + 1}"):
        load("dflash", blocks.dflash(vocab=vocab + 1))
    with pytest.raises(ModelLoadError, match="layers"):
        load("dspark", blocks.dspark(vocab=vocab, taps=(1, 9)))
    with pytest.raises(ModelLoadError, match='"dspark"'):
        load("dflash", blocks.dspark(vocab=vocab))
    with pytest.raises(ModelLoadError, match='"jetspec"'):
        load("dflash", blocks.jetspec(vocab=vocab))
    with pytest.raises(InvalidRequest, match=r"confidence_head\.proj"):
        load("dspark", blocks.dspark(vocab=vocab, sure=False), tree="chain", confidence_threshold=0.5)
    with pytest.raises(InvalidRequest, match="foretoken train dspark"):
        LLM(tiny_pair.target, speculative_config={"method": "dspark"})


@pytest.mark.parametrize("method", ["dflash", "jetspec", "dspark"])
@pytest.mark.slow
def test_texts_are_those_of_plain_decoding(method: str, tiny_pair: Any, tmp_path: Path) -> None:
    plain = LLM(tiny_pair.target, dtype="float32")
    vocab = plain.target.vocab_size
    head = str(tiny.save(tmp_path / "head", *getattr(blocks, method)(vocab=vocab)))
    for temperature, tree in ((0.0, "top_k"), (0.0, "chain"), (1.0, "sampled"), (1.0, "chain")):
        options = {"method": method, "model": head, "num_speculative_tokens": 6, "tree": tree}
        llm = LLM(tiny_pair.target, dtype="float32", speculative_config=options)
        check_texts(llm, plain, temperature)


@pytest.mark.slow
def test_preemption_and_prefix_hits_change_no_text(tiny_pair: Any, tmp_path: Path) -> None:
    plain = LLM(tiny_pair.target, dtype="float32", max_num_seqs=1, max_model_len=512)
    head = str(tiny.save(tmp_path / "head", *blocks.dspark(vocab=plain.target.vocab_size)))
    prefix = "def greet(name):\n    return f'hello {name}'\n" * 4
    prompts = [prefix + prompt for prompt in PROMPTS]
    each = plain.target.kv_bytes_per_token
    llm = LLM(
        tiny_pair.target,
        dtype="float32",
        speculative_config={"method": "dspark", "model": head, "num_speculative_tokens": 6},
        max_num_seqs=4,
        max_model_len=512,
        max_num_batched_tokens=48,
        kv_cache_memory_bytes=3000 * each,
        enable_prefix_caching=True,
    )
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=40, temperature=temperature, seed=3, ignore_eos=True)
        expected = [o.outputs[0].token_ids for o in plain.generate(prompts, params)]
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, params)] == expected
    llm.engine.check_integrity()
