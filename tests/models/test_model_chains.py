"""Chains in one call: the tokens, probabilities and caches of drafting level by level."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tests.models.plain import one_by_one, text

from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import PrivateStream, SharedStream
from foretoken.models.base import Handle, Model
from foretoken.models.chains import ChainEnd, ChainRequest, Draws, ModelChain
from foretoken.models.decoder import Decoder
from foretoken.models.early_exit import EarlyExit, Exit
from foretoken.models.loading import load_model

from . import dense
from .adapters import ATTENTION, load_adapter, save_adapter
from .tiny import ARCHITECTURES, VOCAB, only_runner

NUMBERS = {"float32": ("float32", {}), "bfloat16": ("bfloat16", {}), "int8": ("bfloat16", {"quantization": "int8"})}
FAMILIES = ("llama", "gemma2", "deepseek-v3", "qwen3-moe", "llama4", "dense: gpt2", "dense: bloom", "dense: gemma4")
LENGTHS = (9, 30, 1)
LIMITS = (5, 1, 7)


def loaded(folder: Path, family: str = "llama", dtype: str = "float32", **options: str) -> Decoder:
    module = dense.module(family[7:]) if family.startswith("dense: ") else ARCHITECTURES[family].build()
    module.save_pretrained(folder)
    with only_runner("compiled"):
        model = load_model(folder, dtype, "cpu", "native", **options)
    assert isinstance(model, Decoder)
    return model


@pytest.fixture
def llama(tmp_path: Path) -> Decoder:
    return loaded(tmp_path)


def opened(model: Model, adapters: Sequence[str | None] = (None,) * 3) -> list[Handle]:
    return [model.open(text(n, i), adapter=adapters[i]) for i, n in enumerate(LENGTHS)]


def level_by_level(model: Model, handle: Handle, count: int) -> tuple[list[int], list[float]]:
    """Returns the tokens of a greedy chain and their probabilities, and drops it."""
    tokens: list[int] = []
    probabilities: list[float] = []
    while len(tokens) < count:
        row = model.score([handle], [Draft.chain(tokens)])[0].logits[-1]
        tokens.append(int(row.argmax()))
        probabilities.append(float(row.softmax(0).max()))
    model.commit([handle], [[]])
    return tokens, probabilities


def chains(
    model: Model,
    handles: list[Handle],
    limits: Sequence[int] = LIMITS,
    ends: Sequence[ChainEnd | None] = (None,) * 3,
    vocab: int = VOCAB,
) -> list[ModelChain]:
    requests = [ChainRequest(limit, end=end) for limit, end in zip(limits, ends, strict=False)]
    return model.chains(handles, requests, vocab)


def check(model: Model, handles: list[Handle]) -> None:
    expected = [level_by_level(model, handle, limit) for handle, limit in zip(handles, LIMITS, strict=True)]
    for (tokens, probabilities), chain in zip(expected, chains(model, handles), strict=True):
        assert chain.tokens == chain.candidates == tokens and not chain.ended
        assert chain.probabilities == pytest.approx(probabilities, rel=1e-4)


@pytest.mark.parametrize("numbers", NUMBERS)
def test_chains_equal_those_drafted_level_by_level(numbers: str, tmp_path: Path) -> None:
    dtype, options = NUMBERS[numbers]
    model = loaded(tmp_path, dtype=dtype, **options)
    check(model, opened(model))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_layer(family: str, tmp_path: Path) -> None:
    model = loaded(tmp_path, family)
    check(model, opened(model))


def test_each_sequence_has_its_adapter(tmp_path: Path) -> None:
    model = loaded(tmp_path / "model")
    for seed, name in enumerate(("a", "b")):
        load_adapter(model, name, save_adapter(tmp_path / name, tmp_path / "model", ATTENTION, seed=seed))
    check(model, opened(model, ("b", None, "a")))


def test_the_cache_is_left_as_drafting_by_levels_leaves_it(llama: Decoder) -> None:
    handles = opened(llama)
    grown = chains(llama, handles)
    assert [handle.nodes for handle in handles] == [chain.tokens[:-1] for chain in grown]
    accepted = [chain.tokens[:count] for chain, count in zip(grown, (3, 0, 7), strict=True)]
    llama.commit(handles, [[*tokens, 5] for tokens in accepted])
    assert [handle.cached for handle in handles] == [9 + 3, 30, 1 + 6]  # no pass had the last token of a chain
    again = llama.score(handles, [Draft.chain([8, 9])] * 3)
    for i, tokens in enumerate(accepted):
        expected = one_by_one(llama, text(LENGTHS[i], i), [*tokens, 5, 8, 9, 0])[-3:]
        assert all(torch.equal(again[i].logits[row], expected[row]) for row in range(3))


def test_earlier_drafts_are_dropped(llama: Decoder) -> None:
    handles = opened(llama)
    expected = chains(llama, handles)
    llama.score(handles, [Draft.chain([7, 8, 9])] * 3)
    assert chains(llama, handles) == expected
    assert chains(llama, handles) == expected


def test_a_chain_ends_before_a_token_below_its_minimum_probability(llama: Decoder) -> None:
    handles = opened(llama)
    whole = chains(llama, handles)
    bounds, bases, slopes = (0.02, 0.9), (0.1, 0.2, 0.3), (0.5, 0.7, 0.6)
    floors = (0.0, 0.0, 2.0)
    end = ChainEnd(bounds, bases, slopes, floors)
    grown = chains(llama, handles, ends=[end, end, None])
    assert [len(chain.tokens) for chain in grown] == [2, 1, 7]
    assert [chain.ended for chain in grown] == [True, False, False]
    assert grown[0].candidates == whole[0].tokens[:3] and grown[0].tokens == whole[0].tokens[:2]
    assert handles[0].nodes == grown[0].tokens  # the pass that found the next token had them all


def test_the_rates_of_buckets_decide(llama: Decoder) -> None:
    handle = llama.open(text(9, 0))
    first = chains(llama, [handle], [1])[0].probabilities[0]
    for bounds, floor, count in (((first - 0.001,), 0.85, 1), ((first + 0.001,), 0.85, 0), ((first - 0.001,), 0.95, 0)):
        end = ChainEnd(bounds, (0.0, 0.9), (0.0, 0.0), (floor,))
        assert len(chains(llama, [handle], [1], ends=[end])[0].tokens) == count
    end = ChainEnd((), (0.0,), (1.0,), (first - 0.001, 1.0))
    assert len(chains(llama, [handle], [4], ends=[end])[0].tokens) == 1


def test_logits_that_are_not_finite_end_a_chain(tmp_path: Path) -> None:
    module = ARCHITECTURES["llama"].build()
    with torch.no_grad():
        module.model.norm.weight.fill_(3e38)
    module.save_pretrained(tmp_path)
    with only_runner("compiled"):
        model = load_model(tmp_path, "float32", "cpu", "native")
    handles = opened(model)
    assert chains(model, handles) == [ModelChain([], ended=True)] * 3
    draws = Draws(SamplingLaw().kept, uniforms=[0.5] * 4, rows=True)
    drawn = model.chains(handles, [ChainRequest(4, draws)] * 3, VOCAB)
    assert all(chain.ended and not chain.tokens for chain in drawn)


@pytest.mark.parametrize("token", [5, VOCAB - 1])
def test_a_row_with_a_single_nan_ends_a_chain(token: int) -> None:
    module = ARCHITECTURES["llama"].build()
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    weights["lm_head.weight"][token] = torch.nan
    with only_runner("compiled"):
        model = Decoder(module.config.to_dict(), weights, torch.float32, torch.device("cpu"))
    handle = model.open(text(9, 0))
    assert model.score([handle], [Draft.empty()])[0].logits[0].isnan().nonzero().tolist() == [[token]]
    assert chains(model, [handle], [3]) == [ModelChain([], ended=True)]


def test_tokens_beyond_the_vocabulary_are_not_drafted(llama: Decoder) -> None:
    handle = llama.open(text(9, 0))
    for vocab in (3, 17, VOCAB):
        (chain,) = chains(llama, [handle], [6], vocab=vocab)
        assert len(chain.tokens) == 6 and max(chain.tokens) < vocab
        row = llama.score([handle], [Draft.empty()])[0].logits[0, :vocab]
        assert chain.tokens[0] == int(row.argmax()) and chain.probabilities[0] == pytest.approx(
            float(row.softmax(0).max())
        )


def test_sampled_tokens_come_with_their_distributions(llama: Decoder) -> None:
    handles, law = opened(llama), SamplingLaw(temperature=0.8, top_p=0.9)
    stream, shared = PrivateStream(77), SharedStream(5, 3)
    requests = [
        ChainRequest(5, Draws(law.kept, uniforms=stream.uniforms(5), rows=True)),
        ChainRequest(4, Draws(law.kept, keys=shared.keys(4))),
        ChainRequest(7),
    ]
    drawn, raced, taken = llama.chains(handles, requests, VOCAB)
    assert taken.tokens == level_by_level(llama, handles[2], 7)[0] and taken.rows is None and raced.rows is None
    assert drawn.rows is not None and drawn.rows.shape == (5, VOCAB) and not drawn.ended
    for chain, handle, source in ((drawn, handles[0], stream), (raced, handles[1], shared)):
        for depth, token in enumerate(chain.tokens):
            row = law.probs(llama.score([handle], [Draft.chain(chain.tokens[:depth])])[0].logits[-1:], ())[0]
            assert token == source.categorical(row, depth)
            assert chain.rows is None or torch.equal(chain.rows[depth], row)


@pytest.mark.parametrize("most", [10, 25, 300])
def test_more_rows_than_a_pass_takes(most: int, llama: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = chains(llama, opened(llama))
    passes, run = [], llama.runner.run
    monkeypatch.setattr(llama.runner, "run", lambda plan, *rest: (passes.append(len(plan.parts)), run(plan, *rest))[1])
    llama.runner.pass_rows = most
    handles = opened(llama)
    assert chains(llama, handles) == expected  # whose passes are in one call, so that no sequence has its own
    assert passes == {10: [1, 1], 25: [1, 1], 300: []}[most]
    llama.commit(handles, [[5]] * 3)
    again = llama.score(handles, [Draft.empty()] * 3)
    for i, length in enumerate(LENGTHS):
        assert torch.equal(again[i].logits[0], one_by_one(llama, text(length, i), [5, 0])[-1])


def test_prompts_longer_than_a_joint_pass(llama: Decoder) -> None:
    prompts = [text(300, 0), text(20, 1)]
    handles = [llama.open(prompt) for prompt in prompts]
    drafted = chains(llama, handles, [3, 3])
    assert [chain.tokens for chain in drafted] == [level_by_level(llama, llama.open(p), 3)[0] for p in prompts]


def test_only_a_chain_that_reaches_beyond_the_window_is_refused(llama: Decoder) -> None:
    """Others may be as long as they like: the last token of a chain needs no row."""
    handles = [llama.open(text(llama.max_length - 1, 0)), llama.open(text(10, 1))]
    assert [len(chain.tokens) for chain in chains(llama, handles, [2, 8])] == [2, 8]
    with pytest.raises(InvalidRequest, match="beyond the"):
        chains(llama, handles, [3, 8])


def test_shared_rows_of_the_prefix_cache_do_not_change(llama: Decoder) -> None:
    llama.enable_prefix_cache(1 << 24)
    prompt = text(130, 0)
    first = llama.open(prompt)
    expected = chains(llama, [first], [6])[0].tokens
    llama.commit([first], [[*expected[:2], 9]])
    llama.score([first], [Draft.empty()])
    second = llama.open(prompt)
    assert second.cached >= 64
    assert chains(llama, [second], [6])[0].tokens == expected
    llama.check()
    llama.commit([second], [[*expected[:4], 3]])
    third = llama.open(prompt)
    assert chains(llama, [third], [6])[0].tokens == expected


@pytest.mark.parametrize("trained", [False, True])
def test_an_early_exit_with_an_adapter_drafts_level_by_level(trained: bool, llama: Decoder) -> None:
    adapter = torch.eye(llama.hidden_size) if trained else None
    model = EarlyExit(llama, Exit(1, None, adapter))
    assert model.drafts_chains is not trained
    if not trained:
        check(model, opened(model))


@pytest.mark.parametrize("name", ["llama", "bamba"])
def test_other_runners_draft_level_by_level(name: str, tmp_path: Path) -> None:
    module = ARCHITECTURES[name].build()
    module.save_pretrained(tmp_path)
    with only_runner("torch" if name == "llama" else "compiled"):
        model = load_model(tmp_path, "float32", "cpu", "native")
    assert not model.drafts_chains
    if name == "llama":
        with pytest.raises(NotImplementedError):
            chains(model, [model.open(text(9, 0))], [3])
