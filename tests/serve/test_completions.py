"""/v1/completions through OpenAI's own client."""

import math
from pathlib import Path

import httpx
import openai
import pytest
from tests.serve.conftest import PATIENCE, Running, chunks_of, running

from foretoken import LLM, SamplingParams, zoo

pytestmark = pytest.mark.slow

PROMPT = "def main(args):\n"
GREEDY = {"model": "stdlib", "prompt": PROMPT, "temperature": 0, "max_tokens": 24}


def test_a_whole_completion_has_openais_shape(client: openai.OpenAI, spare: LLM) -> None:
    got = client.completions.create(**GREEDY)
    assert got.object == "text_completion" and got.id.startswith("cmpl-") and got.model == "stdlib"
    assert [c.index for c in got.choices] == [0]
    assert got.choices[0].finish_reason == "length" and got.choices[0].logprobs is None
    assert got.usage is not None
    assert got.usage.completion_tokens == 24
    assert got.usage.prompt_tokens == len(spare.tokenizer.encode(PROMPT))
    assert got.usage.total_tokens == got.usage.prompt_tokens + 24
    record = got.model_extra["metrics"]["speculative_decoding"]
    assert record["num_spec_steps"] == sum(record["acceptance_histogram"]) > 0
    alone = spare.generate(PROMPT, SamplingParams(temperature=0, max_tokens=24))
    assert got.choices[0].text == alone[0].outputs[0].text


def test_a_streamed_completion_has_openais_shape(client: openai.OpenAI) -> None:
    whole = client.completions.create(**GREEDY)
    options = {"include_usage": True}
    chunks = list(client.completions.create(**GREEDY, stream=True, stream_options=options))
    *texts, last = chunks
    assert "".join(c.choices[0].text for c in texts) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in texts] == [None] * (len(texts) - 1) + ["length"]
    assert last.choices == [] and last.usage.completion_tokens == 24
    assert last.model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
    assert len({c.id for c in chunks}) == 1 and {c.object for c in chunks} == {"text_completion"}


def test_empty_prompts_continue_from_bos(spare: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare.tokenizer, "bos_token_id", 5, raising=False)
    with running(spare) as server:

        def texts(prompt: object) -> list[str]:
            answer = server.post({"prompt": prompt, "temperature": 0, "max_tokens": 8})
            assert answer.status_code == 200, answer.text
            return [choice["text"] for choice in answer.json()["choices"]]

        (begun,), (other,) = texts([5]), texts("x = ")
        for prompt in ("", [], [""], [[]]):
            assert texts(prompt) == [begun], prompt
        assert texts(["", "x = "]) == [begun, other] and texts([[5], []]) == [begun, begun]


def test_prompts_of_every_kind(client: openai.OpenAI, llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPT)
    wanted = client.completions.create(**GREEDY).choices[0].text
    for prompt in (ids, [ids, ids], [PROMPT, PROMPT]):
        got = client.completions.create(**{**GREEDY, "prompt": prompt, "n": 2})
        count = 2 if prompt is ids else 4
        assert [(c.index, c.text) for c in got.choices] == [(i, wanted) for i in range(count)]
        assert got.usage is not None and got.usage.prompt_tokens == len(ids) * count // 2


def test_several_streamed(client: openai.OpenAI) -> None:
    asked = {**GREEDY, "prompt": [PROMPT, "import os\n"], "n": 2, "temperature": 1, "seed": 3}
    whole = client.completions.create(**asked)
    texts = [""] * 4
    for chunk in client.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [c.text for c in whole.choices]


def test_usage_counts_the_tokens_that_were_emitted_where_a_stop_cuts_an_accepted_block(client: openai.OpenAI) -> None:
    text = client.completions.create(**GREEDY).choices[0].text
    stop = next(text[at : at + 3] for at in range(12, len(text)) if text.find(text[at : at + 3]) == at)
    predicted = {"prediction": {"type": "content", "content": text}, "speculative_tokens": 16}
    got = client.completions.create(**GREEDY, stop=[stop], logprobs=0, extra_body=predicted)
    record = got.model_extra["metrics"]["speculative_decoding"]
    assert got.choices[0].text == text[: text.index(stop)] and record["num_accepted_draft_tokens"] > 0
    tokens = len(got.choices[0].logprobs.tokens)
    assert got.usage is not None and got.usage.completion_tokens == tokens
    assert got.usage.total_tokens == got.usage.prompt_tokens + tokens


def test_text_offsets_count_characters(server: Running) -> None:
    odd = "größe 日本語🙂 €"
    asked = {"prompt": "x = ", "max_tokens": 60, "logprobs": 0, "structured_outputs": {"choice": [odd]}}
    choice = server.post({**asked, "temperature": 0}).json()["choices"][0]
    assert choice["text"] == odd
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets) and offsets[-1] <= len(odd) < len(odd.encode())
    assert all(odd[at:].startswith(token) for at, token in zip(offsets, tokens, strict=True) if token in odd)


def test_echo_shows_each_choice_its_own_prompt(client: openai.OpenAI) -> None:
    prompts = ["import os\n", "x = ", "class A:\n"]
    got = client.completions.create(model="stdlib", prompt=prompts, n=2, echo=True, max_tokens=2, seed=1)
    assert [c.text.startswith(prompts[c.index // 2]) for c in got.choices] == [True] * 6


def test_default_is_sixteen_tokens(client: openai.OpenAI) -> None:
    got = client.completions.create(model="stdlib", prompt=PROMPT, extra_body={"ignore_eos": True})
    assert got.usage is not None and got.usage.completion_tokens == 16


def test_logprobs(client: openai.OpenAI) -> None:
    got = client.completions.create(**GREEDY, logprobs=3)
    text, logprobs = got.choices[0].text, got.choices[0].logprobs
    assert "".join(logprobs.tokens) == text
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 24
    assert [text[a:].startswith(t) for a, t in zip(logprobs.text_offset, logprobs.tokens, strict=True)] == [True] * 24
    for token, value, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert top[token] == value == max(top.values()) and len(top) == 3
    streamed = [c.choices[0].logprobs for c in client.completions.create(**GREEDY, logprobs=3, stream=True)]
    for field in ("tokens", "token_logprobs", "text_offset"):
        assert [x for part in streamed for x in getattr(part, field)] == pytest.approx(getattr(logprobs, field))


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_echo_with_logprobs(client: openai.OpenAI, llm: LLM, max_tokens: int) -> None:
    asked = {**GREEDY, "max_tokens": max_tokens, "echo": True, "logprobs": 1}
    got = client.completions.create(**asked)
    choice = got.choices[0]
    assert choice.text.startswith(PROMPT) and (choice.text == PROMPT) == (max_tokens == 0)
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.token_logprobs[0] is None and choice.logprobs.top_logprobs[0] is None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])
    assert len(choice.logprobs.tokens) == len(llm.tokenizer.encode(PROMPT)) + max_tokens
    assert got.usage is not None and got.usage.completion_tokens == max_tokens
    streamed = [c.choices[0] for c in client.completions.create(**asked, stream=True)]
    assert "".join(c.text for c in streamed) == choice.text
    assert [t for c in streamed for t in c.logprobs.tokens] == choice.logprobs.tokens


def test_echo_alone(client: openai.OpenAI) -> None:
    got = client.completions.create(**GREEDY, echo=True)
    assert got.choices[0].text.startswith(PROMPT) and len(got.choices[0].text) > len(PROMPT)


def test_best_of(client: openai.OpenAI) -> None:
    """The best by their mean log-probability, of candidates of which the sum would choose others."""
    for seed in range(5, 25):
        asked = {**GREEDY, "temperature": 1, "seed": seed, "logprobs": 0, "stop": ["\n"]}
        candidates = client.completions.create(**asked, n=6).choices
        sums = [math.fsum(c.logprobs.token_logprobs) for c in candidates]
        means = [total / len(c.logprobs.tokens) for total, c in zip(sums, candidates, strict=True)]
        order = sorted(range(6), key=lambda i: -means[i])
        if order[:2] != sorted(range(6), key=lambda i: -sums[i])[:2]:
            break
    else:
        pytest.fail("no seed tells means from sums")
    best = client.completions.create(**asked, n=2, best_of=6)
    assert [c.text for c in best.choices] == [candidates[i].text for i in order[:2]]
    assert best.usage is not None and best.usage.completion_tokens == sum(len(c.logprobs.tokens) for c in candidates)


def test_parameters_reach_the_engine(client: openai.OpenAI, llm: LLM) -> None:
    banned = llm.tokenizer.encode(client.completions.create(**GREEDY).choices[0].text)[0]
    got = client.completions.create(**GREEDY, logit_bias={str(banned): -100}, logprobs=0)
    assert got.choices[0].logprobs.tokens[0] != llm.tokenizer.decode([banned])
    stopped = client.completions.create(**GREEDY, stop=["\n"])
    assert stopped.choices[0].finish_reason == "stop" and "\n" not in stopped.choices[0].text
    assert stopped.choices[0].model_extra == {"stop_reason": "\n"}


@pytest.mark.parametrize(
    "extra",
    [
        {"speculative_tokens": 0},
        {"speculative_tokens": 2},
        {"speculative_method": "ngram"},
        {"exactness": "trajectory"},
    ],
)
def test_speculation_is_the_clients_choice(client: openai.OpenAI, extra: dict[str, object]) -> None:
    asked = {**GREEDY, "temperature": 1, "seed": 9}
    got = client.completions.create(**asked, extra_body=extra)
    assert got.choices[0].text == client.completions.create(**asked).choices[0].text
    record = got.model_extra["metrics"]["speculative_decoding"]
    if extra == {"speculative_tokens": 0}:
        assert record["num_spec_steps"] == 0


def test_steps_are_returned_on_request(client: openai.OpenAI, llm: LLM) -> None:
    extra = {"return_steps": True, "speculative_tokens": 4}
    chunks = list(client.completions.create(**GREEDY, stream=True, extra_body=extra))
    steps = [step for chunk in chunks for step in chunk.model_extra["steps"]]
    assert [s["position"] for s in steps] == [sum(len(t["tokens"]) for t in steps[:i]) for i in range(len(steps))]
    tokens = [t for s in steps for t in s["tokens"]]
    assert "".join(t["text"] for t in tokens) == "".join(c.choices[0].text for c in chunks)
    assert {t["origin"] for t in tokens} == {"accepted", "target"}
    assert all(t["p"] == 1.0 for t in tokens), "greedy"
    for step in steps:
        accepted = [node["token"] for node in step["draft"] if node["accepted"]]
        assert accepted == [t["token"] for t in step["tokens"] if t["origin"] == "accepted"]
        assert all(-1 <= node["parent"] < i for i, node in enumerate(step["draft"]))
        assert set(step["seconds"]) == {"propose", "score", "verify", "commit"}
    assert steps[-1]["finish_reason"] == "length"
    assert "per_step_accepted" in chunks[-1].model_extra["metrics"]["speculative_decoding"]


def test_usage_in_every_chunk(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        chunk.usage.completion_tokens
        for chunk in client.completions.create(**GREEDY, stream=True, stream_options=options)
    ]
    assert counts == sorted(counts) and counts[-1] == 24


def test_lines_end_where_every_reader_ends_them(server: Running) -> None:
    """U+2028, U+0085 and their like in a text do not end a line for readers that split as Unicode does."""
    odd = "\u2028\u2029\x85\x1c é🙂"
    body = {"prompt": "x", "max_tokens": 60, "structured_outputs": {"choice": [odd]}, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE) as answer:
        chunks = chunks_of(answer.iter_lines())
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == odd


def test_cached_tokens_are_told(noisy: Path) -> None:
    prompt = "def again(x):\n    return x\n" * 30
    with running(LLM(zoo.path("draft"), noisy, dtype="float32", enable_prefix_caching=True)) as server:
        first, second, twice = (
            server.post({"prompt": prompt, "max_tokens": 2, "n": n}).json()["usage"] for n in (1, 1, 2)
        )
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    assert second["prompt_tokens_details"]["cached_tokens"] >= 64
    assert second["prompt_tokens"] == first["prompt_tokens"]
    assert twice["prompt_tokens_details"] == second["prompt_tokens_details"]  # the prompt is counted once
