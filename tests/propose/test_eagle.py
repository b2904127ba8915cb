"""EAGLE as a proposer: its input, its drafts, and that the text does not depend on them."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tests.exactness.gtest import draws_needed, g_test
from tests.exactness.test_engine import LAWS, PROMPT, reference
from tests.models.heads import tiny
from tests.models.tiny import only_runner
from tests.models.trees import repeating
from tests.propose.heads import check_texts

from foretoken import LLM, SamplingParams
from foretoken.control.fixed import Fixed
from foretoken.core.context import Context, Exactness
from foretoken.core.draft import Draft, PointMass, Sampled
from foretoken.core.errors import InvalidRequest, ModelLoadError
from foretoken.core.sampling import SamplingLaw
from foretoken.core.step import StepOutput, Timings
from foretoken.core.streams import Streams, random_seed_from
from foretoken.core.verdict import Verdict
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models.base import Scores
from foretoken.models.heads.eagle import EagleNet, read_eagle
from foretoken.models.toy import ToyModel
from foretoken.propose.base import Observation
from foretoken.propose.eagle import Eagle, EagleConfig, ParallelEagle
from foretoken.propose.growers import TreeKind

CLOCK = Timings(0, 0, 0, 0, 1)


def eagle(folder: Path, config: EagleConfig, vocab: int = 101, target_hidden: int = 64, **extra: int) -> Eagle:
    head = read_eagle(tiny.save(folder, *tiny.eagle3(vocab=vocab, target_hidden=target_hidden, **extra)))
    net = EagleNet(head, head.tensors["embed_tokens.weight"], torch.float32, torch.device("cpu"), 512)
    assert head.taps is not None
    return Eagle(net, head.taps, config)


def context(identifier: int, tokens: list[int], grade: Exactness = Exactness.DISTRIBUTION, **law: float) -> Context:
    return Context(identifier, tokens, 2, SamplingLaw(**law), Streams(5), grade)  # type: ignore[arg-type]


def seen(tokens: tuple[int, ...], draft: Draft, path: tuple[int, ...], first: int, computed: int) -> Observation:
    """A step whose hidden states encode their position."""
    taps = {layer: states(range(first, first + computed), layer) for layer in (1, 2)}
    step = StepOutput(0, 0, draft, Verdict(path, tokens[-1]), tokens, CLOCK)
    return Observation(step, Scores(torch.zeros(1, 101), taps, first))


def states(rows: Sequence[int], layer: int) -> torch.Tensor:
    """Hidden states [rows, 64] that differ from row to row."""
    return torch.stack([torch.randn(64, generator=torch.Generator().manual_seed(100 * layer + row)) for row in rows])


def features(proposer: Eagle, rows: list[int]) -> torch.Tensor:
    return proposer.net.features(torch.cat([states(rows, layer) for layer in (1, 2, 2)], -1))


def test_features_pair_a_token_with_the_states_before_it(tmp_path: Path) -> None:
    """After any steps the next draft equals that of a head that saw the text at once."""
    proposer = eagle(tmp_path, EagleConfig(num_steps=2, top_k=2, tree="sampled"))
    c = context(0, [1, 2, 3, 4], temperature=0.0)
    assert proposer.propose([c], [4]) == [Draft.empty()]
    c.tokens += [5]
    proposer.observe([c], [seen((5,), Draft.empty(), (), 0, 4)])
    first = proposer.propose([c], [6])[0]
    assert 0 < len(first) <= 6
    # A tree of four nodes. Nodes 2 and 3 are accepted: rows 0 (the root), 3 and 4 of this pass belong to the text.
    tree = repeating((-1, 0, -1, 2), 7)
    c.tokens += [8, 8, 11]
    proposer.observe([c], [seen((8, 8, 11), tree, (2, 3), 4, 5)])
    # A step without a draft.
    c.tokens += [12]
    proposer.observe([c], [seen((12,), Draft.empty(), (), 7, 1)])
    draft = proposer.propose([c], [6])[0]

    fresh = eagle(tmp_path, EagleConfig(num_steps=2, top_k=2, tree="sampled"))
    rows = [0, 1, 2, 3, 4, 7, 8, 7]
    scores = Scores(torch.zeros(1, 101), {layer: states(rows, layer) for layer in (1, 2)})
    fresh.observe([c], [Observation(seen((12,), Draft.empty(), (), 0, 1).step, scores)])
    expected = fresh.propose([c], [6])[0]
    assert draft.ids == expected.ids and draft.parents == expected.parents
    assert draft.scores is not None and expected.scores is not None
    assert draft.scores == pytest.approx(expected.scores, rel=1e-4, abs=1e-4)


def test_budgets_and_steps_bound_the_tree(tmp_path: Path) -> None:
    proposer = eagle(tmp_path, EagleConfig(num_steps=3, top_k=4, tree="sampled"))
    contexts = [context(i, [1, 2, 3], temperature=0.0) for i in range(4)]
    steps = [seen((3,), Draft.empty(), (), 0, 2) for _ in contexts]
    proposer.observe(contexts, steps)
    drafts = proposer.propose(contexts, [1, 0, 9, 2])
    assert [len(d) for d in drafts] == [1, 0, 9, 2]
    assert max(drafts[2].depths) <= 3
    assert all(isinstance(d.law, PointMass) for d in drafts)
    allowed = set(proposer.net.head.ids().tolist())
    assert {t for d in drafts for t in d.ids} <= allowed
    for c in contexts:
        proposer.forget(c)
        proposer.forget(c)
    assert proposer.propose(contexts, [3] * 4) == [Draft.empty()] * 4


def test_drawn_drafts_carry_distributions_over_the_targets_vocabulary(tmp_path: Path) -> None:
    proposer = eagle(tmp_path, EagleConfig(tree="chain"))
    c = context(0, [1, 2, 3], temperature=0.8, top_k=5)
    proposer.observe([c], [seen((3,), Draft.empty(), (), 0, 2)])
    draft = proposer.propose([c], [4])[0]
    assert draft.is_chain and len(draft) == 4  # a chain is as long as its budget
    assert isinstance(draft.law, Sampled)
    assert draft.law.probs.shape[1] == 101
    for row, token in zip(draft.law.probs, draft.ids, strict=False):
        assert row[token] > 0 and abs(float(row.sum()) - 1) < 1e-5
        assert int((row > 0).sum()) <= 5


def test_a_head_with_a_mask_drafts_all_levels_from_marginals(tmp_path: Path) -> None:
    """P-EAGLE: the rows of a chain are those of mask tokens, whatever was sampled above them."""
    head = read_eagle(tiny.save(tmp_path, *tiny.eagle3(mask=7)))
    net = EagleNet(head, head.tensors["embed_tokens.weight"], torch.float32, torch.device("cpu"), 512)
    proposer = ParallelEagle(net, head.taps or (), EagleConfig(tree="chain"))
    c = context(0, [1, 2, 3], temperature=0.8, top_k=5)
    proposer.observe([c], [seen((3,), Draft.empty(), (), 0, 2)])
    draft = proposer.propose([c], [4])[0]
    assert isinstance(draft.law, Sampled) and len(draft) == 4
    fed = torch.cat([features(proposer, [0, 1]), net.mask_row().features.expand(3, -1)])
    logits = net.to_target(net.teacher_forced([2, 3, 7, 7, 7], fed)[1:])
    expected = c.law.probs(logits, [c.history()] * 4)
    torch.testing.assert_close(draft.law.probs, expected, rtol=1e-4, atol=1e-5)


def test_the_default_tree_is_what_one_call_drafts(tmp_path: Path) -> None:
    assert eagle(tmp_path / "once", EagleConfig()).config.tree == "at_once"
    assert eagle(tmp_path / "tree", EagleConfig(tree="top_k")).config.tree == "top_k"
    head = read_eagle(tiny.save(tmp_path / "mask", *tiny.eagle3(mask=7)))
    for runner, tree in (("compiled", "at_once"), ("torch", "sampled")):
        with only_runner(runner):
            net = EagleNet(head, head.tensors["embed_tokens.weight"], torch.float32, torch.device("cpu"), 512)
        assert ParallelEagle(net, head.taps or (), EagleConfig()).config.tree == tree


def test_the_trajectory_grade_leads_with_the_targets_noise(tmp_path: Path) -> None:
    proposer = eagle(tmp_path, EagleConfig(num_steps=1, top_k=1))
    c = context(0, [1, 2, 3], Exactness.TRAJECTORY)
    proposer.observe([c], [seen((3,), Draft.empty(), (), 0, 2)])
    draft = proposer.propose([c], [1])[0]
    logits = proposer.net.teacher_forced([2, 3], features(proposer, [0, 1]))[-1:]
    row = proposer.net.to_target(logits).softmax(-1)[0]
    assert draft.ids[0] == c.streams.shared(1).categorical(row, 0)


TOY = ToyModel(3, order=2, seed=9, sharpness=1.0)


@pytest.mark.parametrize("tree", ["chain", "top_k", "sampled", "greedy_multi"])
@pytest.mark.slow
def test_texts_follow_the_targets_distribution(tree: TreeKind, tmp_path: Path) -> None:
    length, prompt = 4, list(PROMPT)
    proposer = eagle(tmp_path, EagleConfig(num_steps=2, top_k=2, tree=tree), 3, 8, draft_vocab=2)
    engine = Engine(TOY, proposer, Fixed(3), max_sequences=64)
    draws = draws_needed(0.2, cells=3**length)
    contexts = [
        Context(i, list(prompt), len(prompt), SamplingLaw(), Streams(random_seed_from(3, i))) for i in range(draws)
    ]
    for c in contexts:
        engine.add(c, Length(length))
    while engine.busy:
        engine.step()
    law = reference(TOY, LAWS["plain"], length, None)
    result = g_test(Counter(tuple(c.tokens[len(prompt) :]) for c in contexts), law)
    assert result.p_value > 1e-3, result


def test_texts_that_are_too_long_for_the_head_cost_it_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = eagle(tmp_path, EagleConfig())
    used: list[str] = []
    for name in ("open", "features", "extend"):
        method = getattr(proposer.net, name)
        monkeypatch.setattr(proposer.net, name, lambda *a, m=method, n=name: (used.append(n), m(*a))[1])
    c = context(0, [i % 101 for i in range(600)], temperature=0.0)
    assert proposer.reusable_prefix_len(c) == 600  # whatever the target knows of it may be omitted
    proposer.prefill([c], [seen((5,), Draft.empty(), (), 0, 256).scores])
    c.tokens += [5]
    proposer.observe([c], [seen((5,), Draft.empty(), (), 256, 344)])
    assert proposer.propose([c], [4]) == [Draft.empty()] and not used
    long = context(1, [i % 101 for i in range(510)], temperature=0.0)
    assert proposer.reusable_prefix_len(long) == 0
    long.tokens += [5]
    proposer.observe([long], [seen((5,), Draft.empty(), (), 0, 510)])
    assert proposer.propose([long], [4]) == [Draft.empty()] and len(proposer.propose([long], [1])[0]) == 1


def test_wrong_keys_are_refused() -> None:
    for wrong in ({"num_steps": 0}, {"top_k": True}, {"tree": "drawn"}):
        with pytest.raises(InvalidRequest, match=next(iter(wrong))):
            EagleConfig(**wrong)  # type: ignore[arg-type]


def test_heads_of_another_target_are_refused(tiny_pair, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    vocab = LLM(tiny_pair.target).target.vocab_size

    def load(name: str, **sizes: object) -> None:
        path = tiny.save(tmp_path / name, *tiny.eagle3(**{"vocab": vocab, **sizes}))  # type: ignore[arg-type]
        LLM(tiny_pair.target, speculative_config={"method": "eagle3", "model": str(path)})

    with pytest.raises(ModelLoadError, match="hidden size 32"):
        load("narrow", target_hidden=32)
    with pytest.raises(ModelLoadError, match=f"vocabulary of {vocab + 1}"):
        load("vocab", vocab=vocab + 1)
    with pytest.raises(ModelLoadError, match="layers"):
        load("layers", taps=(1, 2, 9))
    with pytest.raises(ModelLoadError, match="cannot share"):
        load("embedding", hidden=32, embedding=False)
    with pytest.raises(InvalidRequest, match="foretoken train eagle3"):
        LLM(tiny_pair.target, speculative_config={"method": "eagle3"})


@pytest.mark.parametrize("version", [1, 3, "parallel"])
@pytest.mark.slow
def test_heads_in_the_targets_folder_are_found_and_change_nothing(version, tiny_pair, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    target = tiny.linked(tiny_pair.target, tmp_path / "target")
    plain = LLM(target, dtype="float32")
    written = (
        tiny.eagle1(vocab=plain.target.vocab_size)
        if version == 1
        else tiny.eagle3(vocab=plain.target.vocab_size, embedding=False, mask=9 if version == "parallel" else None)
    )
    tiny.save(target / "heads" / "eagle3", *written)
    for temperature, tree in ((0.0, "sampled"), (1.0, "sampled"), (1.0, "chain")):
        options = {"method": "eagle3", "num_speculative_tokens": 6, "tree": tree}
        llm = LLM(target, dtype="float32", speculative_config=options)
        assert type(llm.engine.proposer) is (ParallelEagle if version == "parallel" else Eagle)
        check_texts(llm, plain, temperature)


SYSTEM = "import os\nimport sys\nfrom collections import Counter, defaultdict\n\n\ndef helper(values):\n" * 6
HEAD = {"method": "eagle3", "num_speculative_tokens": 6}


def bundled(**options: object) -> LLM:
    return LLM(dtype="float32", speculative_config=HEAD, max_model_len=1024, **options)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_prefix_cache_hit_covers_the_head_too() -> None:
    """Each turn reads only what is new of it, and is drafted for as if all had been read."""
    kept, whole = bundled(enable_prefix_caching=True, max_num_batched_tokens=48), bundled()
    keeps = kept.engine.target.enable_prefix_cache(2**30)  # the compiled runtime; elsewhere there is nothing to share
    text, computed = list(kept.tokenizer(SYSTEM)["input_ids"]), 0
    for turn, temperature in enumerate((0.0, 1.0, 0.0, 0.8)):
        params = SamplingParams(max_tokens=70, temperature=temperature, seed=turn, ignore_eos=True)
        (one,), (other,) = (llm.generate(text, params) for llm in (kept, whole))
        first, second = one.outputs[0], other.outputs[0]
        assert first.token_ids == second.token_ids and first.stats.accepted == second.stats.accepted
        assert first.stats.cached == (computed // 64 * 64 if keeps else 0)
        text += first.token_ids
        computed = len(text) - 1
        text += kept.tokenizer(f"\n\n\ndef another_{turn}(items):\n")["input_ids"]
    kept.engine.check_integrity()


@pytest.mark.slow
def test_a_cached_prefix_without_head_states_is_computed_again() -> None:
    llm = bundled(enable_prefix_caching=True, methods=["ngram"])
    if not llm.engine.target.enable_prefix_cache(2**30):
        pytest.skip("no compiled kernels here")
    expected = bundled().generate(SYSTEM, SamplingParams(max_tokens=30, temperature=0.0))[0].outputs[0]
    hits = []
    for method in ("ngram", None, "ngram", None):
        params = SamplingParams(max_tokens=30, temperature=0.0, speculative_method=method)
        output = llm.generate(SYSTEM, params)[0].outputs[0]
        assert output.token_ids == expected.token_ids
        assert method or output.stats.accepted == expected.stats.accepted
        hits.append(output.stats.cached > 0)
    assert hits == [False, False, True, True]
    llm.engine.check_integrity()
