"""The facade, on a tiny random pair with a real tokenizer."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.drafters import drafter
from tests.real import real_model

from foretoken import LLM, ForetokenError, SamplingParams
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest
from foretoken.propose.draft_model import DraftModel
from foretoken.speculation import SpeculativeConfig

relaxed = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
PROMPTS = ["def greet(name):\n", "x", "class Ü:  # 🙂\n" * 9]


@pytest.fixture(scope="module")
def llm(any_pair: Any) -> LLM:
    return LLM(any_pair.target, any_pair.draft, dtype="float32")


def texts(llm: LLM, prompts: Any = PROMPTS, **params: Any) -> list[str]:
    return [o.outputs[0].text for o in llm.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True, **params))]


def test_the_readmes_call(llm: LLM) -> None:
    output = llm.generate("Prompt text", sampling_params=SamplingParams(max_tokens=10, speculative_tokens=4))
    assert len(output) == 1
    assert str(output[0]) == output[0].outputs[0].text
    assert output[0].stats.steps >= 1


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"seed": 3}, {"seed": 3, "top_p": 0.9, "repetition_penalty": 1.2}]
)
@pytest.mark.slow
def test_one_text_per_seed_for_every_draft_proposer_and_batch(llm: LLM, any_pair: Any, params: dict[str, Any]) -> None:
    plain = texts(llm, speculative_tokens=0, **params)
    for depth in (1, 4, 8):
        assert texts(llm, speculative_tokens=depth, **params) == plain
    assert [texts(llm, p, **params)[0] for p in PROMPTS] == plain
    lookup = LLM(any_pair.target, speculative_config={"method": "ngram"}, dtype="float32")
    assert texts(lookup, **params) == plain


def test_equal_seeds_give_equal_texts_and_others_do_not(llm: LLM, any_pair: Any) -> None:
    assert texts(llm, seed=1) == texts(llm, seed=1) != texts(llm, seed=2)
    plain: dict[str, Any] = {"speculative_config": {"method": "none"}}  # drafts use random numbers of their own
    again = [LLM(any_pair.target, dtype="float32", seed=5, **plain) for _ in range(2)]
    assert texts(again[0]) == texts(again[1])
    assert texts(again[0]) != texts(again[1], "y")


def test_n_completions_differ_and_repeat(llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=12, seed=4)
    first, second = (llm.generate("abc", params)[0] for _ in range(2))
    assert [o.index for o in first.outputs] == [0, 1, 2]
    assert len({o.text for o in first.outputs}) == 3
    assert [o.text for o in first.outputs] == [o.text for o in second.outputs]


def test_completions_of_a_seed_are_not_the_texts_of_requests_without_one(tiny_pair: Any) -> None:
    llm = LLM(tiny_pair.target, dtype="float32", seed=0)
    plain = {"max_tokens": 12, "ignore_eos": True, "exactness": "trajectory"}
    unseeded = [o.outputs[0].text for o in llm.generate(["abc"] * 4, SamplingParams(**plain))]
    several = [o.text for o in llm.generate("abc", SamplingParams(n=4, seed=0, **plain))[0].outputs]
    assert len({*unseeded, *several}) == 8


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("seed", [1.5, "1", True, None, 2**128, -(2**63) - 1]),
        ("max_num_seqs", [0, -1, 1.5, "8", True, None, 2**31]),
        ("max_model_len", [0, -1, 1, 1.5, "8", True, 2**31]),
        ("kv_cache_memory_bytes", [0, -1, 1.5, "8", True]),
    ],
)
def test_wrong_integers_are_refused_before_anything_is_loaded(name: str, wrong: list[Any]) -> None:
    for value in wrong:
        with pytest.raises(ForetokenError, match=f"^{name} must be an integer "):
            LLM("/there/is/nothing", **{name: value})


@pytest.mark.parametrize(
    "config, message",
    [
        ({"num_speculative_tokens": 2**32}, "num_speculative_tokens must be an integer from 0 to 4096"),
        ({"method": "recycling", "top_k": 2**32}, "top_k must be an integer from 1 to 4096"),
        (
            {"control": {"name": "goodput", "max_tokens": 2**32}},
            "max_tokens of control must be an integer from 1 to 4096",
        ),
        ({"method": "draft_model", "draft_temperature": 1e300}, "draft_temperature must be a number from 0 to 1e[+]06"),
        ({"method": "draft_model", "draft_temperature": 1e-300}, "draft_temperature must be 0 .* or at least 1e-06"),
        (
            {"method": "draft_model", "draft_temperature": 10**400},
            "draft_temperature must be a number from 0 to 1e[+]06",
        ),
    ],
)
def test_wrong_numbers_in_speculative_config_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ForetokenError, match=message):
        SpeculativeConfig.of(config)


def test_streamed_pieces_join_to_the_output(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, seed=2, stop="zzzz")
    pieces = list(llm.stream(PROMPTS, params))
    whole = llm.generate(PROMPTS, params)
    for i, expected in enumerate(whole):
        ours = [p for p in pieces if p.request_id == pieces[0].request_id + i]
        assert "".join(p.text for p in ours) == expected.outputs[0].text
        assert tuple(t for p in ours for t in p.token_ids) == expected.outputs[0].token_ids
        assert ours[-1].output is not None


@pytest.mark.parametrize("depth", [0, 4])
def test_streamed_pieces_join_to_the_output_at_the_models_length(tiny_pair: Any, depth: int) -> None:
    """The end of the text is the beginning of a stop string, so it is kept back until the text ends."""
    llm = LLM(tiny_pair.target, tiny_pair.draft, dtype="float32", max_model_len=24)
    params = SamplingParams(max_tokens=100, seed=2, ignore_eos=True, speculative_tokens=depth)
    text = llm.generate("abc", params)[0].outputs[0].text
    pieces = list(llm.stream("abc", replace(params, stop=text[-3:] + "zzzz")))
    output = pieces[-1].output
    assert output is not None and output.finish_reason == "length"
    assert "".join(piece.text for piece in pieces) == output.text == text


@relaxed
@given(data=st.data())
@pytest.mark.slow
def test_streamed_and_final_text_are_equal_whatever_stops_and_is_drafted(llm: LLM, data: st.DataObject) -> None:
    seed, n = data.draw(st.integers(0, 3)), 12
    plain = {"max_tokens": n, "seed": seed, "ignore_eos": True}
    text = llm.generate("abc", SamplingParams(speculative_tokens=0, **plain))[0].outputs[0].text
    starts = st.integers(0, len(text) - 1)
    stops = [text[at : at + data.draw(st.integers(1, 9))] for at in data.draw(st.lists(starts, min_size=1, max_size=4))]
    stops = [stop + data.draw(st.sampled_from(["", "", "#"])) for stop in stops]
    plain |= {"stop": stops, "min_tokens": data.draw(st.integers(0, n))}
    plain["include_stop_str_in_output"] = data.draw(st.booleans())
    expected = llm.generate("abc", SamplingParams(speculative_tokens=0, **plain))[0].outputs[0]
    for depth in (0, 1, 4, 7):
        pieces = list(llm.stream("abc", SamplingParams(speculative_tokens=depth, **plain)))
        output = pieces[-1].output
        assert output is not None
        assert "".join(piece.text for piece in pieces) == output.text == expected.text
        assert (output.token_ids, output.finish_reason) == (expected.token_ids, expected.finish_reason)
        assert output.stop_reason == expected.stop_reason


def test_a_dropped_stream_leaves_no_sequence_behind(llm: LLM) -> None:
    stream = llm.stream(PROMPTS, SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    stream.close()
    assert not llm.engine.busy
    assert not llm.engine.finished
    assert texts(llm, seed=1) == texts(llm, seed=1)


def test_stop_strings_and_reasons(llm: LLM) -> None:
    long = texts(llm, "abc", seed=1)[0]
    stop = long[5:8]
    out = llm.generate("abc", SamplingParams(max_tokens=24, ignore_eos=True, seed=1, stop=[stop]))[0].outputs[0]
    assert (out.finish_reason, out.stop_reason) == ("stop", stop)
    assert out.text == long[: long.index(stop)]
    assert llm.generate("abc", SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].finish_reason == "length"


def test_logprobs_are_the_targets_own(llm: LLM) -> None:
    def recorded(depth: int) -> Any:
        params = SamplingParams(max_tokens=10, temperature=0, logprobs=2, speculative_tokens=depth, ignore_eos=True)
        return llm.generate("abc", params)[0].outputs[0]

    plain, fast = recorded(0), recorded(6)
    assert plain.logprobs == fast.logprobs
    assert len(plain.logprobs) == 10
    for token, row in zip(plain.token_ids, plain.logprobs, strict=True):
        assert row[token].rank == 1
        assert 2 <= len(row) <= 3


def test_prompts_in_every_form(llm: LLM) -> None:
    ids = llm.tokenizer.encode("abc")
    same = [texts(llm, form, seed=1) for form in ("abc", ids, [ids], {"prompt": "abc"}, [{"prompt_token_ids": ids}])]
    assert all(s == same[0] for s in same)


def test_parameters_one_per_prompt(llm: LLM) -> None:
    outs = llm.generate(["a", "b"], [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 5)])
    assert [len(o.outputs[0].token_ids) for o in outs] == [2, 5]


def test_more_prompts_than_max_num_seqs(tiny_pair: Any) -> None:
    narrow = LLM(tiny_pair.target, tiny_pair.draft, dtype="float32", max_num_seqs=2)
    wide = LLM(tiny_pair.target, tiny_pair.draft, dtype="float32", max_num_seqs=16)
    prompts = [f"f{i}" * (i + 1) for i in range(7)]
    assert texts(narrow, prompts, seed=1) == texts(wide, prompts, seed=1)


def test_lossy_outputs_are_labelled(llm: LLM) -> None:
    out = llm.generate("abc", SamplingParams(max_tokens=8, exactness="lossy-typical"))[0].outputs[0]
    assert out.exactness == "lossy-typical"


def test_a_draft_equal_to_the_target_is_always_accepted(tiny_pair: Any) -> None:
    always = {"control": "fixed"}  # drafting with the target itself is never profitable
    same = LLM(tiny_pair.target, tiny_pair.target, dtype="float32", speculative_config=always)
    for params in ({"temperature": 0.0}, {"seed": 1}, {"temperature": 1.0}):
        stats = same.generate("abc", SamplingParams(max_tokens=40, ignore_eos=True, **params))[0].stats
        assert stats.accepted == stats.drafted > 0


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt is empty"),
        ([], "no prompts"),
        ([5, 10**6], "integers from 0 to"),
        ({"text": "a"}, "'prompt' or 'prompt_token_ids'"),
        ("word " * 600, "raise max_model_len"),
    ],
)
def test_bad_prompts(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(ForetokenError, match=message):
        llm.generate(prompt)
    assert not llm.engine.busy


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": float("nan")}, "temperature must be"),
        ({"temperature": -1}, "temperature must be"),
        ({"top_p": 0.0}, "top_p must be"),
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"min_tokens": 50}, "exceeds max_tokens"),
        ({"stop": ["a", ""]}, "stop strings"),
        ({"exactness": "roughly"}, "distribution, trajectory"),
        ({"seed": 1.5}, "seed must be"),
        ({"n": True}, "n must be"),
    ],
)
def test_bad_parameters(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ForetokenError, match=message):
        SamplingParams(**params)


def test_unknown_keys_name_the_known_ones() -> None:
    with pytest.raises(ForetokenError, match=r"speculative_tokns.*known: method"):
        SpeculativeConfig.of({"speculative_tokns": 4})


def test_ids_outside_the_vocabulary(llm: LLM) -> None:
    with pytest.raises(ForetokenError, match="outside the vocabulary"):
        llm.generate("a", SamplingParams(logit_bias={10**6: 1.0}))


def test_contradictory_configurations(tiny_pair: Any) -> None:
    with pytest.raises(ForetokenError, match="takes no draft model"):
        LLM(tiny_pair.target, tiny_pair.draft, speculative_config={"method": "ngram"})
    with pytest.raises(ForetokenError, match="needs a draft"):
        LLM(tiny_pair.target, speculative_config={"method": "draft_model"})


def test_a_draft_with_another_tokenizer_is_refused(tiny_pair: Any, tmp_path: Any) -> None:
    import json
    import shutil

    other = tmp_path / "other"
    shutil.copytree(tiny_pair.draft, other)
    file = other / "tokenizer.json"
    data = json.loads(file.read_text())
    vocab = data["model"]["vocab"]
    a, b = list(vocab)[-2:]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    file.write_text(json.dumps(data))
    with pytest.raises(ForetokenError, match="vocabulary mismatch"):
        LLM(tiny_pair.target, other)


def test_bad_words_and_bias_hold_under_speculation(llm: LLM) -> None:
    def ids(**more: Any) -> set[int]:
        params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True, logit_bias={65: 100.0}, **more)
        return set(llm.generate("abc", params)[0].outputs[0].token_ids)

    assert ids() == {65}
    assert 65 not in ids(bad_words=[llm.tokenizer.decode([65])])


def test_chat_needs_a_template(llm: LLM) -> None:
    with pytest.raises(ForetokenError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}", r"is not valid Jinja \(line 1: .*use generate\(\)"),
        (
            "{{ raise_exception('roles must alternate') }}",
            "messages do not fit the chat template: roles must alternate",
        ),
    ],
)
def test_errors_of_a_chat_template(llm: LLM, monkeypatch: pytest.MonkeyPatch, template: str, words: str) -> None:
    monkeypatch.setattr(getattr(llm.tokenizer, "full", llm.tokenizer), "chat_template", template)
    with pytest.raises(InvalidRequest, match=words):
        llm.chat([{"role": "user", "content": "hi"}])


def test_an_empty_prompt_continues_from_bos(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    empty: list[Any] = ["", [], {"prompt": ""}, {"prompt_token_ids": []}]
    params = SamplingParams(max_tokens=8, temperature=0.0)
    monkeypatch.setattr(llm.tokenizer, "bos_token_id", 5, raising=False)
    begun, other = llm.generate([[5], "abc"], params)
    outputs = llm.generate([*empty, "abc", ""], params)
    assert [output.outputs[0].token_ids for output in outputs] == [
        *[begun.outputs[0].token_ids] * 4,
        other.outputs[0].token_ids,
        begun.outputs[0].token_ids,
    ]
    assert outputs[0].prompt == "" and outputs[0].prompt_token_ids == (5,)
    monkeypatch.setattr(llm.tokenizer, "bos_token_id", None)
    for prompt in empty:
        with pytest.raises(InvalidRequest, match=r"the prompt is empty, and this model has no token .*\(BOS\)"):
            llm.generate([prompt, "abc"], params)
    assert not llm.engine.busy


@pytest.mark.slow
@pytest.mark.real
def test_an_empty_prompt_of_a_real_model_continues_from_bos() -> None:
    smollm2, params = (
        LLM(real_model("smollm2"), speculative_config={"method": "none"}),
        SamplingParams(max_tokens=4, temperature=0.0),
    )
    empty, begun = smollm2.generate(["", [1]], params)
    assert empty.prompt_token_ids == (1,) and empty.outputs[0].token_ids == begun.outputs[0].token_ids


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8", "int4", "int4-g128"])
def test_a_quantized_target_is_exact_with_respect_to_itself(llm: LLM, any_pair: Any, scheme: str) -> None:
    """Another target than the plain one, and one text for each seed whatever is proposed."""
    quantized = LLM(any_pair.target, any_pair.draft, dtype="float32", quantization=scheme)
    prompt = llm.tokenizer.encode(PROMPTS[0])
    plain_logits, quantized_logits = (
        one.target.score([one.target.open(prompt)], [Draft.empty()])[0].logits for one in (llm, quantized)
    )
    assert not torch.equal(plain_logits, quantized_logits)
    for params in ({"temperature": 0.0}, {"seed": 5}):
        expected = texts(quantized, speculative_tokens=0, **params)
        assert all(texts(quantized, speculative_tokens=depth, **params) == expected for depth in (1, 4))
        assert [texts(quantized, p, **params)[0] for p in PROMPTS] == expected


def test_an_unknown_quantization_names_the_known(tiny_pair: Any) -> None:
    with pytest.raises(ForetokenError, match=r"'int3' is not known; known: int8, int4"):
        LLM(tiny_pair.target, quantization="int3")
    with pytest.raises(ForetokenError, match="needs the native decoder"):
        LLM(tiny_pair.target, quantization="int8", backend="hf")


def test_a_draft_model_has_the_maximum_length_of_its_target(tiny_pair: Any) -> None:
    llm = LLM(tiny_pair.target, tiny_pair.draft, dtype="float32", max_model_len=96)
    proposer = drafter(llm)
    assert isinstance(proposer, DraftModel)
    assert proposer.model.max_length == llm.target.max_length == 96
