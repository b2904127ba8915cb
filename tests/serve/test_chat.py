"""/v1/chat/completions through OpenAI's own client."""

import json
from typing import Any

import openai
import pytest
from tests.serve.conftest import Running

from foretoken import LLM

pytestmark = pytest.mark.slow

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "def main(args):"}]
DRAFTING = {"speculative_tokens": 4}  # whether or not that is profitable on this machine
GREEDY: dict[str, Any] = {"model": "stdlib", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 24}


def test_a_whole_answer_has_openais_shape(client: openai.OpenAI) -> None:
    got = client.chat.completions.create(**GREEDY, extra_body=DRAFTING)
    assert got.object == "chat.completion" and got.id.startswith("chatcmpl-")
    assert got.choices[0].message.role == "assistant" and got.choices[0].message.content
    assert got.choices[0].finish_reason == "length" and got.choices[0].message.tool_calls is None
    assert got.usage is not None and got.usage.completion_tokens == 24
    assert got.model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


def test_template_is_what_the_model_reads(client: openai.OpenAI, llm: LLM) -> None:
    """The bundled template is plain, so the completion of what it renders is the same text."""
    rendered = llm.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    ids = llm.tokenizer.encode(rendered, add_special_tokens=False)
    wanted = client.completions.create(model="stdlib", prompt=ids, temperature=0, max_tokens=24).choices[0].text
    assert client.chat.completions.create(**GREEDY).choices[0].message.content == wanted


def test_a_streamed_answer_has_openais_shape(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**GREEDY)
    options = {"stream": True, "stream_options": {"include_usage": True}, "extra_body": DRAFTING}
    chunks = list(client.chat.completions.create(**GREEDY, **options))
    first, *middle, end, usage = chunks
    assert first.object == "chat.completion.chunk"
    assert first.choices[0].delta.role == "assistant" and first.choices[0].delta.content == ""
    assert all(c.choices[0].delta.role is None and c.choices[0].finish_reason is None for c in middle)
    assert "".join(c.choices[0].delta.content for c in middle) == whole.choices[0].message.content
    assert end.choices[0].finish_reason == "length" and end.choices[0].delta.content is None
    assert usage.choices == [] and usage.usage == whole.usage
    assert usage.model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


def test_stream_ends_with_done_and_metrics(server: Running) -> None:
    got = server.post({**GREEDY, "stream": True}, "chat/completions")
    assert got.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert got.headers["cache-control"] == "no-cache" and got.headers["x-accel-buffering"] == "no"
    events = got.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert "usage" not in chunks[0] and "metrics" in chunks[-1] and "metrics" not in chunks[0]


def test_several_streamed_answers_are_those_of_a_whole_one(client: openai.OpenAI) -> None:
    asked = {**GREEDY, "temperature": 1, "seed": 4, "n": 3}
    whole = client.chat.completions.create(**asked)
    texts, roles = [""] * 3, [0] * 3
    for chunk in client.chat.completions.create(**asked, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += choice.delta.role == "assistant"
    assert texts == [c.message.content for c in whole.choices] and len(set(texts)) > 1
    assert roles == [1, 1, 1]


def test_logprobs(client: openai.OpenAI) -> None:
    asked = {**GREEDY, "messages": [{"role": "user", "content": "x = '日本"}], "logprobs": True, "top_logprobs": 2}
    asked |= {"temperature": 1, "seed": 1}
    got = client.chat.completions.create(**asked).choices[0]
    content = got.logprobs.content
    assert len(content) == 24
    spelled = b"".join(bytes(entry.bytes) for entry in content)
    assert spelled.decode("utf-8", "replace") == got.message.content
    for entry in content:
        assert len(entry.top_logprobs) == 2 and entry.logprob <= entry.top_logprobs[0].logprob
    streamed = [c.choices[0].logprobs for c in client.chat.completions.create(**asked, stream=True)]
    assert [e.bytes for part in streamed if part for e in part.content] == [e.bytes for e in content]


def test_streamed_log_probabilities_come_with_their_own_text(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(**GREEDY, logprobs=True, stream=True, extra_body=DRAFTING)
    choices = [chunk.choices[0] for chunk in chunks]
    written = [choice for choice in choices if choice.delta.content]
    assert len(written) > 1
    for choice in written:
        assert "".join(entry.token for entry in choice.logprobs.content) == choice.delta.content
    assert all(choice.logprobs is None for choice in choices if not choice.delta.content)


def test_max_tokens_default_is_what_is_left(client: openai.OpenAI) -> None:
    """And the end of a text ends it: the server's bound is the model's length."""
    written = client.chat.completions.create(**{**GREEDY, "max_completion_tokens": 64}).choices[0].message.content or ""
    asked = {k: v for k, v in GREEDY.items() if k != "max_completion_tokens"}
    got = client.chat.completions.create(**asked, stop=[written[len(written) // 2 :]])
    assert got.choices[0].finish_reason == "stop" and got.usage is not None and got.usage.completion_tokens > 16


def test_roles_and_parts(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "Be brief."}]
    messages = [{"role": "developer", "content": parts}, MESSAGES[1]]
    got = client.chat.completions.create(**{**GREEDY, "messages": messages})
    assert got.choices[0].message.content == client.chat.completions.create(**GREEDY).choices[0].message.content


def test_fields_without_effect_are_ignored(client: openai.OpenAI) -> None:
    got = client.chat.completions.create(
        **GREEDY,
        user="me",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        modalities=["text"],
        safety_identifier="x",
        prompt_cache_key="y",
    )
    assert got.choices[0].message.content == client.chat.completions.create(**GREEDY).choices[0].message.content


@pytest.mark.parametrize(
    "form, check",
    [
        ({"type": "json_object"}, lambda value: isinstance(value, dict)),
        (
            {
                "type": "json_schema",
                "json_schema": {
                    "name": "point",
                    "strict": True,
                    "schema": {
                        "type": "object",
                        "properties": {"x": {"type": "integer", "maximum": 9}, "on": {"type": "boolean"}},
                        "required": ["x", "on"],
                        "additionalProperties": False,
                    },
                },
            },
            lambda value: isinstance(value["x"], int) and isinstance(value["on"], bool) and len(value) == 2,
        ),
    ],
)
def test_response_format(client: openai.OpenAI, form: Any, check: Any) -> None:
    for seed in range(3):
        asked = {**GREEDY, "max_completion_tokens": 300, "temperature": 1, "seed": seed, "response_format": form}
        got = client.chat.completions.create(**asked, stop=["}\n"]).choices[0]
        if got.finish_reason == "stop" and got.model_extra["stop_reason"] is None:
            assert check(json.loads(got.message.content))


@pytest.mark.parametrize(
    "extra, fits",
    [
        ({"guided_regex": "[ab]{5}"}, lambda text: len(text) == 5 and set(text) <= set("ab")),
        ({"guided_choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"guided_json": {"enum": [1, 2]}}, lambda text: text in "12"),
        ({"structured_outputs": {"regex": "x+y"}}, lambda text: text.endswith("y") and text.startswith("x")),
        ({"guided_grammar": 'start: "a" "b"'}, lambda text: text == "ab"),
    ],
)
def test_guided_texts_fit_their_grammar(client: openai.OpenAI, extra: dict[str, Any], fits: Any) -> None:
    got = client.chat.completions.create(**{**GREEDY, "temperature": 1, "seed": 2}, extra_body=extra).choices[0]
    assert got.finish_reason == "length" or fits(got.message.content)


def test_a_prediction_is_counted_and_changes_no_text(client: openai.OpenAI) -> None:
    said = client.chat.completions.create(**GREEDY).choices[0].message.content
    said_so = {"type": "content", "content": said + " and more"}
    got = client.chat.completions.create(**GREEDY, prediction=said_so, extra_body={"speculative_tokens": 16})
    assert got.choices[0].message.content == said
    details = got.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 12 and details.rejected_prediction_tokens > 0
    plain = client.chat.completions.create(**GREEDY)
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens == 0


def test_a_prediction_counts_for_every_choice(client: openai.OpenAI, llm: LLM) -> None:
    said = "zq7 zq7 zq7"  # never accepted whole
    got = client.chat.completions.create(**GREEDY, n=3, prediction={"type": "content", "content": said})
    details = got.usage.completion_tokens_details
    predicted = len(llm.tokenizer.encode(said, add_special_tokens=False))
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens == 3 * predicted


def test_prediction_of_another_method_is_not_counted(client: openai.OpenAI) -> None:
    asked = {"prediction": {"type": "content", "content": [{"type": "text", "text": "def f"}]}}
    got = client.chat.completions.create(
        **GREEDY, **asked, extra_body={"speculative_method": "draft_model", **DRAFTING}
    )
    details = got.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == details.rejected_prediction_tokens == 0
    assert got.model_extra["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0
