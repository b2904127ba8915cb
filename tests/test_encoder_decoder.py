"""Encoder-decoders: one text per seed whatever drafts, and the greedy text of transformers; tiny and bundled ones."""

from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.exactness.gtest import draws_for, g_test
from tests.models.seq2seq.tiny import save

from foretoken import LLM, SamplingParams, zoo
from foretoken.bench.workloads import repairs
from foretoken.control.fixed import Fixed
from foretoken.core.context import Context
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.core.sampling import SamplingLaw
from foretoken.core.streams import Streams, random_seed_from
from foretoken.engine.loop import Engine
from foretoken.engine.stopping import Length
from foretoken.models.base import Model
from foretoken.models.formats.checkpoint import load_tokenizer
from foretoken.models.loading import load_model
from foretoken.propose.draft_model import DraftModel, DraftModelConfig

SOURCES = ["def greet(name):\n", "x = 1\n" * 30, "日本語 🙂", "for i in range(10):\n    print(i, i * i)\n"]
CONFIGS: list[dict[str, Any]] = [
    {"method": "draft_model", "num_speculative_tokens": 4},
    {"method": "draft_model", "tree": "sampled", "num_speculative_tokens": 7},
    {"method": "draft_model", "tree": "top_k", "num_speculative_tokens": 7},
    {"method": "early_exit", "num_speculative_tokens": 3},
    {"method": "self_quantized", "num_speculative_tokens": 3},
    {"method": "ngram"},
    {"method": "suffix"},
    {"method": "recycling"},
    {"method": "mixture", "members": [{"method": "draft_model"}, {"method": "suffix"}]},
]


class Folders(NamedTuple):
    target: Path
    draft: Path


@pytest.fixture(scope="module", params=["t5", "bart"])
def folders(request: pytest.FixtureRequest, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    folder = tmp_path_factory.mktemp("pair")
    end = tokenizer.eos_token_id
    ids = {"eos_token_id": end, "pad_token_id": end, "decoder_start_token_id": end, "vocab_size": len(tokenizer)}
    if request.param == "bart":
        ids |= {"bos_token_id": None, "forced_bos_token_id": None, "forced_eos_token_id": None}
    smaller = {"d_ff": 48} if request.param == "t5" else {"decoder_ffn_dim": 48}
    for name, changes in (("target", {}), ("draft", smaller)):
        save(request.param, folder / name, **ids, **changes)
        tokenizer.save_pretrained(folder / name)
    return Folders(folder / "target", folder / "draft")


def llm(folders: Folders, config: dict[str, Any], **options: Any) -> LLM:
    config = dict(config)
    if config["method"] == "draft_model":
        config["model"] = str(folders.draft)
    for i, member in enumerate(config.get("members", ())):
        if member["method"] == "draft_model":
            config["members"] = [
                *config["members"][:i],
                {**member, "model": str(folders.draft)},
                *config["members"][i + 1 :],
            ]
    return LLM(folders.target, speculative_config=config, dtype="float32", **options)


def texts(model: LLM, prompts: Any, **params: Any) -> list[tuple[int, ...]]:
    settings = SamplingParams(**{"max_tokens": 24, "seed": 5, "ignore_eos": True, **params})
    return [output.outputs[0].token_ids for output in model.generate(prompts, settings)]


@pytest.mark.slow
def test_the_same_text_whatever_proposes_alone_and_together(folders: Folders) -> None:
    plain = llm(folders, {"method": "none"})
    asked = [{"temperature": temperature, "max_tokens": 12} for temperature in (0.0, 1.0)]
    expected = [[texts(plain, source, **params)[0] for source in SOURCES] for params in asked]
    for config in CONFIGS:
        model = llm(folders, config)
        for params, alone in zip(asked, expected, strict=True):
            assert texts(model, SOURCES, **params) == alone, config
            assert texts(model, SOURCES[1], **params) == alone[1:2], config


@pytest.mark.slow
def test_greedy_text_is_that_of_transformers(folders: Folders, tokenizer: Any) -> None:
    from transformers import AutoModelForSeq2SeqLM

    module = AutoModelForSeq2SeqLM.from_pretrained(folders.target, dtype=torch.float32)
    model = llm(folders, CONFIGS[0])
    for source in SOURCES:
        theirs = module.generate(
            **tokenizer(source, return_tensors="pt"), max_new_tokens=24, do_sample=False, eos_token_id=None
        )
        assert texts(model, source, temperature=0.0) == [tuple(theirs[0, 1:].tolist())]


@pytest.mark.slow
def test_prompts_in_every_form(folders: Folders, tokenizer: Any) -> None:
    model, ids = llm(folders, {"method": "ngram"}), tokenizer(SOURCES[0])["input_ids"]
    start = tokenizer.eos_token_id
    forms: list[Any] = [
        SOURCES[0],
        ids,
        {"prompt": SOURCES[0]},
        {"encoder_prompt": SOURCES[0]},
        {"encoder_prompt": ids, "decoder_prompt": [start]},
    ]
    assert len({tuple(texts(model, form)) for form in forms}) == 1
    (output,) = model.generate(SOURCES[0], SamplingParams(max_tokens=3, n=2, seed=1))
    assert output.prompt == SOURCES[0] and list(output.prompt_token_ids) == ids and len(output.outputs) == 2
    (begun,) = texts(model, {"encoder_prompt": SOURCES[0], "decoder_prompt": "def"}, temperature=0.0)
    (whole,) = texts(
        model, {"encoder_prompt": SOURCES[0], "decoder_prompt": [start, *tokenizer.encode("def")]}, temperature=0.0
    )
    assert begun == whole
    for wrong, said in (
        ({"decoder_prompt": "def"}, "encoder_prompt"),
        ("", "empty"),
        ({"encoder_prompt": ""}, "empty"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            model.generate(wrong)
    with pytest.raises(InvalidRequest, match="prompt_logprobs"):
        model.generate(SOURCES[0], SamplingParams(prompt_logprobs=1))


def test_pairs_of_two_kinds_are_refused(folders: Folders, tiny_pair: Any) -> None:
    with pytest.raises(InvalidRequest, match="a draft of the target's kind"):
        LLM(folders.target, tiny_pair.draft)
    with pytest.raises(InvalidRequest, match="a draft of the target's kind"):
        LLM(tiny_pair.target, folders.draft)
    with pytest.raises(InvalidRequest, match="encoder"):
        LLM(folders.target, speculative_config={"method": "vocabulary", "model": str(tiny_pair.draft)})


@pytest.mark.slow
def test_memory_runs_short_and_nothing_is_lost(folders: Folders) -> None:
    """Sources count too: with so little memory sequences are preempted, and their texts are the same."""
    plain = llm(folders, {"method": "none"}, max_model_len=80)
    expected = texts(plain, SOURCES)
    each = plain.target.kv_bytes_per_token
    tight = llm(folders, CONFIGS[0], max_model_len=80, kv_cache_memory_bytes=320 * each * 2)
    assert texts(tight, SOURCES) == expected
    tight.engine.check_integrity()


# the law

VOCAB, LENGTH, DELTA = 3, 3, 0.1
SOURCE, START = (1, 2, 0, 2), [0]


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Model]:
    folder = tmp_path_factory.mktemp("toys")
    save("t5", folder / "target", vocab_size=VOCAB, initializer_factor=1.0)
    save("t5", folder / "draft", vocab_size=VOCAB, initializer_factor=1.0, d_ff=64)
    target, draft = (load_model(folder / name, dtype="float32") for name in ("target", "draft"))
    return target, draft


def reference(target: Model, law: SamplingLaw) -> dict[tuple[int, ...], float]:
    """The probability of every text, by the chain rule."""
    context = Context(0, list(START), 1, law, Streams(0), source=SOURCE)
    actual: dict[tuple[int, ...], float] = {}
    for text in product(range(VOCAB), repeat=LENGTH):
        handle = target.open(START, SOURCE)
        (scores,) = target.score([handle], [Draft.chain(list(text[:-1]))])
        target.close(handle)
        rows = law.probs(scores.logits, [context.history(text[:i]) for i in range(LENGTH)])
        actual[text] = float(torch.stack([row[token] for row, token in zip(rows, text, strict=True)]).prod())
    assert abs(sum(actual.values()) - 1) < 1e-5
    return actual


@pytest.mark.parametrize("tree", ["chain", "sampled"])
@pytest.mark.slow
def test_drawn_texts_follow_the_targets_law(toys: tuple[Model, Model], tree: str) -> None:
    target, draft = toys
    law = SamplingLaw(temperature=1.5)
    expected = reference(target, law)
    engine = Engine(target, DraftModel(draft, DraftModelConfig(tree=tree)), Fixed(3), max_sequences=64)
    contexts = [
        Context(i, list(START), 1, law, Streams(random_seed_from(3, i)), depth=i % 4, source=SOURCE)
        for i in range(draws_for(expected, DELTA))
    ]
    for context in contexts:
        engine.add(context, Length(LENGTH))
    while engine.busy:
        engine.step()
    result = g_test(Counter(tuple(context.tokens[1:]) for context in contexts), expected)
    assert result.p_value > 1e-3 and result.delta <= DELTA, result


# planned and audited


@pytest.mark.slow
def test_a_plan_says_what_a_run_shows(folders: Folders) -> None:
    from foretoken.engine.prompts import PromptTokenizer
    from foretoken.models.formats.checkpoint import start_ids
    from foretoken.plan.candidates import Candidate
    from foretoken.plan.planner import Planner, PlanSettings
    from foretoken.speculation import Builder

    target, words = load_model(folders.target, dtype="float32"), load_tokenizer(folders.target)
    reader = PromptTokenizer(words, target.vocab_size, start_ids(folders.target, target.vocab_size))
    build = Builder(target, words, folders.target, lambda other: load_model(other, dtype="float32")).build
    drafts = {"method": "draft_model", "model": str(folders.draft)}
    ways = [Candidate("draft", drafts, (3,)), Candidate("copied", {"method": "ngram"}, (3,))]
    settings = PlanSettings(temperatures=(0.0,), batches=(2,), max_tokens=24, turns=3)
    actual = Planner(target, build, settings, ()).plan([reader.tokenize(source) for source in SOURCES], ways)
    for row, config in zip(actual.rows, (drafts, {"method": "ngram"}), strict=True):
        model = llm(folders, {**config, "num_speculative_tokens": 3})
        outputs = model.generate(SOURCES, SamplingParams(max_tokens=24, temperature=0, ignore_eos=True))
        decode_steps = sum(output.stats.steps - 1 for output in outputs)
        emitted = sum(len(output.outputs[0].token_ids) for output in outputs)
        assert abs(row.tokens_per_pass - emitted / (decode_steps + len(SOURCES))) < 0.35


def test_the_audit_asks_the_target_behind_its_source(folders: Folders) -> None:
    from foretoken.audit.implementations import Foretoken

    model = llm(folders, CONFIGS[0])
    ids = model.tokenizer(SOURCES[0])["input_ids"]
    plain = texts(model, SOURCES[0], temperature=0.0, speculative_tokens=0)[0]
    assert Foretoken.of(model).logits(ids, plain).argmax(-1).tolist() == list(plain)


def test_the_source_is_what_is_expected_unless_a_client_says(folders: Folders) -> None:
    from foretoken.propose.prediction import Prediction

    proposer, law = Prediction(), SamplingLaw(temperature=0.0)

    def context(number: int, prediction: tuple[int, ...] = ()) -> Context:
        return Context(number, [0], 1, law, Streams(0), source=(5, 6, 7, 8), prediction=prediction)

    drafts = proposer.propose([context(0), context(1, (9, 10))], [4, 4])
    assert [list(draft.ids) for draft in drafts] == [[5, 6, 7, 8], [9, 10]]
    plain = Context(2, [0], 1, law, Streams(0))
    assert not len(proposer.propose([plain], [4])[0])


@pytest.mark.slow
def test_a_source_that_is_too_long_for_the_draft_alone(folders: Folders, tmp_path: Path, tokenizer: Any) -> None:
    """Such a request is decoded plainly, and those beside it are drafted for."""
    target, draft = folders.target, tmp_path / "short"
    end = tokenizer.eos_token_id
    ids = {"eos_token_id": end, "pad_token_id": end, "decoder_start_token_id": end, "vocab_size": len(tokenizer)}
    bart = {"bos_token_id": None, "forced_bos_token_id": None, "forced_eos_token_id": None}
    save("bart", draft, **ids, **bart, max_position_embeddings=64)
    expected = texts(llm(folders, {"method": "none"}), SOURCES)
    model = LLM(target, draft, speculative_config={"num_speculative_tokens": 4}, dtype="float32")
    settings = SamplingParams(max_tokens=24, seed=5, ignore_eos=True)
    outputs = model.generate(SOURCES, settings)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert not outputs[1].stats.drafted and all(outputs[i].stats.drafted for i in (0, 3))


DRAFTS: dict[str, dict[str, Any]] = {
    "draft": {"method": "draft_model", "model": str(zoo.path("seq2seq-draft"))},
    "tree": {"method": "draft_model", "model": str(zoo.path("seq2seq-draft")), "tree": "sampled"},
    "auto": {"method": "auto", "model": str(zoo.path("seq2seq-draft"))},
    "lookup": {"method": "ngram"},
    "source": {"method": "prediction"},
    "first layers": {"method": "early_exit"},
}
TASKS = [source for source, _ in repairs(load_tokenizer(zoo.path("seq2seq-target")), 4)]


def bundled_texts(llm: LLM, prompts: list[list[int]], temperature: float, tokens: int = 24) -> list[tuple[int, ...]]:
    settings = SamplingParams(max_tokens=tokens, temperature=temperature, seed=3)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, settings)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.slow
def test_one_text_for_a_seed_alone_and_together(dtype: str) -> None:
    plain = LLM(zoo.path("seq2seq-target"), speculative_config={"method": "none"}, dtype=dtype)
    if not plain.target.batch_invariant:
        pytest.skip("rows are not promised to be independent here")
    expected = {t: [bundled_texts(plain, [task], t)[0] for task in TASKS] for t in (0.0, 1.0)}
    for name, config in DRAFTS.items():
        llm = LLM(zoo.path("seq2seq-target"), speculative_config={**config, "num_speculative_tokens": 6}, dtype=dtype)
        for temperature, alone in expected.items():
            assert bundled_texts(llm, TASKS, temperature) == alone, (name, temperature)
            assert bundled_texts(llm, TASKS[:1], temperature) == alone[:1], (name, temperature)


@pytest.mark.slow
def test_greedy_texts_are_those_of_transformers() -> None:
    from transformers import AutoModelForSeq2SeqLM

    module = AutoModelForSeq2SeqLM.from_pretrained(zoo.path("seq2seq-target"), dtype=torch.float32)
    llm = LLM(zoo.path("seq2seq-target"), zoo.path("seq2seq-draft"), dtype="float32")
    theirs = [
        tuple(module.generate(torch.tensor([task]), max_new_tokens=40, do_sample=False)[0, 1:].tolist())
        for task in TASKS
    ]
    assert bundled_texts(llm, TASKS, 0.0, tokens=40) == theirs


@pytest.mark.slow
def test_the_draft_is_worth_something() -> None:
    llm = LLM(zoo.path("seq2seq-target"), zoo.path("seq2seq-draft"), dtype="float32")
    outputs = llm.generate(TASKS, SamplingParams(max_tokens=60, temperature=0, speculative_tokens=8))
    assert sum(output.stats.mean_acceptance_length for output in outputs) / len(outputs) > 4
