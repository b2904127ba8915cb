"""An answer that is sent back as it came is never refused: by any API, in any format, wherever it was cut."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.serve.conftest import Running, chunks_of, running
from tests.serve.test_parsers import SCHEMAS, TRANSCRIPTS, output_format
from transformers import AutoTokenizer

from foretoken import LLM, zoo
from foretoken.outputs import CompletionOutput
from foretoken.params import SamplingParams
from foretoken.serve.block_writers import MessageWriter, ResponseWriter
from foretoken.serve.chat_schema import ChatRequest, References, StoredContent
from foretoken.serve.completions_writer import ChatWriter
from foretoken.serve.messages_schema import MessagesRequest
from foretoken.serve.parsers.formats import FORCED, ExpectedOutput
from foretoken.serve.preparation import EncodedPrompt, PreparedRequest
from foretoken.serve.prompts import render
from foretoken.serve.response_store import ResponseStore, StoredResponse
from foretoken.serve.responses_schema import ResponsesRequest
from foretoken.serve.settings import ServerSettings

pytestmark = pytest.mark.slow

# Messages of user and assistant take turns, and arguments are an object, as templates of Gemma, Mistral and GLM demand.
STRICT = """{# tools #}{%- set turns = namespace(n=0) %}
{%- for message in messages %}
  {%- if message.role == 'user' or message.role == 'assistant' %}
    {%- if (message.role == 'user') != (turns.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
    {%- set turns.n = turns.n + 1 %}
  {%- endif %}
  {%- for call in message.tool_calls or [] %}
    {%- for key, value in call.function.arguments.items() %}{{ key }}={{ value | tojson }};{% endfor %}
  {%- endfor %}
  {{- message.role }}:{{ message.reasoning_content }}:{{ message.content + '' }};
{%- endfor %}"""
NINE = STRICT.replace(
    "{%- for key",
    "{%- if call.id is not defined or call.id|length != 9 %}{{ raise_exception('length 9') }}{% endif %}{%- for key",
)
SINGLE = """{# tools #}{%- for message in messages %}
  {%- if 'tool_calls' in message and message.tool_calls|length != 1 %}
    {{- raise_exception('This model only supports single tool-calls at once!') }}
  {%- endif %}
  {{- message.role }}:{{ message.tool_call_id or (message.tool_calls or [{'id': ''}])[0].id }}:{{ message.content }};
{%- endfor %}"""

AWKWARD = [
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": NaN, "b": -1e999}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "\\ud800"}}</tool_call> And \\ud800.'),
    ("hermes", '<tool_call>{"name": "now", "arguments": "\\udc00"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "\\udc00", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": ' + "[" * 3000),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "\n", }}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call> so <tool_call>{"name": "now"}</tool_call> it'),
    ("qwen3_coder", '<function=get_weather>\n<parameter=extra>\n{"a": "\\ud800"}\n</parameter>\n</function>'),
    ("pythonic", "[get_weather(city='\\ud800')]"),
]  # fmt: skip
LISTED = '[{"name": "get_weather", "parameters": {"city": "Tōkyō", "days": 3}}, {"name": "now", "parameters": {}}]'
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
USER = {"role": "user", "content": "x"}
USAGE: Any = {
    "prompt_tokens": 1,
    "completion_tokens": 1,
    "total_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 0},
}
ENDS = [("length", None), ("stop", None), ("stop", "a stop string")]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(zoo.path("draft"))


def wire(answer: Any) -> Any:
    """The answer as a client gets it; starlette encodes answers so."""
    return json.loads(json.dumps(answer, ensure_ascii=False, allow_nan=False).encode())


def answered(writer: Any, text: str, end: tuple[str, str | None]) -> Any:
    output = CompletionOutput(0, text, (1,), finish_reason=end[0], stop_reason=end[1])
    generation = SimpleNamespace(
        id="a", created=0, model="m", usage=lambda *_: USAGE, speculation=lambda *_: {}, params=SamplingParams()
    )
    return wire(writer.answer(generation, {0: SimpleNamespace(output=output)}))


def prepared(body: Any, chat: ChatRequest, output: ExpectedOutput) -> Any:
    prompts = [EncodedPrompt("", [1])]
    return PreparedRequest(body=body, prompts=prompts, params=SamplingParams(), max_tokens=1, output=output, chat=chat)


def chats(output: ExpectedOutput, text: str, end: tuple[str, str | None]) -> Iterator[ChatRequest]:
    """The conversations that go on behind an answer, through each API."""
    request = ChatRequest.model_validate({"messages": [USER], "tools": TOOLS})
    message = answered(ChatWriter(prepared(request, request, output), None), text, end)["choices"][0]["message"]  # type: ignore[arg-type]
    results = [{"role": "tool", "content": "r", "tool_call_id": c["id"]} for c in message.get("tool_calls", ())]
    yield ChatRequest.model_validate({"messages": [USER, message, *results, USER], "tools": TOOLS})

    given: Any = {"input": [USER]}
    stored: list[Any] = []
    body = ResponsesRequest.model_validate(given)
    writer = ResponseWriter(prepared(body, body.as_chat(StoredContent()), output), None, stored.append, True)  # type: ignore[arg-type]
    response = answered(writer, text, end)
    calls = [item["call_id"] for item in response["output"] if item["type"] == "function_call"]
    behind = [{"type": "function_call_output", "call_id": call, "output": "r"} for call in calls] + [USER]
    yield ResponsesRequest.model_validate({"input": [USER, *response["output"], *behind]}).as_chat(StoredContent())
    store = ResponseStore(1, None)
    store.add("a", StoredResponse.of(stored[0], [{"id": "u", "type": "message", **USER}], None))
    body = ResponsesRequest.model_validate({"input": behind, "previous_response_id": "a"})
    yield body.as_chat(store.find(References("a"), None))

    said = MessagesRequest.model_validate({"messages": [USER], "max_tokens": 9})
    content = answered(MessageWriter(prepared(said, said.as_chat(StoredContent()), output), None), text, end)["content"]
    used = [{"type": "tool_result", "tool_use_id": b["id"], "content": "r"} for b in content if b["type"] == "tool_use"]
    more = {"role": "user", "content": [*used, {"type": "text", "text": "x"}]}
    messages = [USER, {"role": "assistant", "content": content}, more]
    yield MessagesRequest.model_validate({"messages": messages, "max_tokens": 9}).as_chat(StoredContent())


def check(tokenizer: Any, output: ExpectedOutput, text: str) -> None:
    """Every beginning of ``text``, in tokens, goes back. A conversation that comes again is rendered once."""
    rendered: set[str] = set()
    offsets = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)["offset_mapping"]
    for length in sorted({0, *(end for _, end in offsets)} if len(offsets) < 1000 else {len(text)}):
        for end in ENDS if length == len(text) else ENDS[::2]:
            for chat in chats(output, text[:length], end):
                roles = [message.role for message in chat.messages]
                assert roles[:2] == ["user", "assistant"] and roles[-1] == "user", (text[:length], roles)
                for template in (NINE, SINGLE) if repr(chat) not in rendered else ():
                    render(tokenizer, chat, template).encode()
                rendered.add(repr(chat))


@pytest.mark.parametrize(
    "name, text", [*dict.fromkeys(transcript[:2] for transcript in TRANSCRIPTS), *AWKWARD], ids=lambda value: value[:20]
)
def test_an_answer_in_the_form_of_each_family_goes_back_wherever_it_was_cut(tokenizer, name, text):
    check(tokenizer, ExpectedOutput(output_format(name), SCHEMAS), text)


@pytest.mark.parametrize("text", [LISTED, LISTED[1:-1].partition("}, ")[0] + "}"], ids=["array", "object"])
@pytest.mark.parametrize("named", [None, "get_weather"])
def test_demanded_calls_go_back_wherever_they_were_cut(tokenizer: Any, text: str, named: str | None) -> None:
    check(tokenizer, ExpectedOutput(FORCED, SCHEMAS, named=named), text)


def test_results_follow_their_calls_where_a_template_takes_one_call_a_message(tokenizer: Any) -> None:
    calls = [{"id": i, "type": "function", "function": {"name": "now", "arguments": "{}"}} for i in ("a", "b", "c")]
    results = [{"role": "tool", "content": i.upper(), "tool_call_id": i} for i in ("b", "a")]
    said = {"role": "assistant", "content": "So.", "tool_calls": calls}
    chat = ChatRequest.model_validate({"messages": [USER, said, *results, USER]})
    expected = "user::x;assistant:a:So.;assistant:b:;tool:b:B;tool:a:A;assistant:c:;user::x;"
    assert render(tokenizer, chat, SINGLE) == expected


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("parallel", [True, False])
def test_a_demanded_call_that_is_cut_is_no_content(server: Running, choice: Any, parallel: bool) -> None:
    asked = {"messages": [USER], "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": parallel, "seed": 1}
    seen = set()
    for length in (1, 2, 3, 5, 8, 13, 21, 34):
        body = {**asked, "max_tokens": length}
        (got,) = server.post(body, "chat/completions").json()["choices"]
        if got["finish_reason"] != "length":
            break
        message, calls = got["message"], got["message"].get("tool_calls", [])
        assert message["content"] == (None if calls else "")
        seen.add(len(calls))
        stream = server.post({**body, "stream": True}, "chat/completions").text
        chunks = chunks_of(stream.splitlines())
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert not any(delta.get("content") for delta in deltas)
        streamed = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
        arguments = "".join(function["arguments"] for function in streamed)
        assert arguments == "".join(call["function"]["arguments"] for call in calls)
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        answer = server.post({**asked, "messages": [USER, message, USER], "max_tokens": 1}, "chat/completions")
        assert answer.status_code == 200, answer.text
    assert 1 in seen and (0 in seen) == (choice == "required")


def test_a_stop_string_within_a_call_does_not_complete_it(spare: LLM) -> None:
    text = '<tool_call>{"name": "now", "arguments": {"a": "STOP"}}'
    settings = ServerSettings(model_names=("stdlib",), tool_call_parser="hermes")
    with running(spare, settings) as server:
        asked = {"messages": [USER], "tools": TOOLS, "structured_outputs": {"choice": [text]}, "max_tokens": 99}
        for stop, finish, arguments in (("STOP", "stop", '{"a": "'), ("never", "tool_calls", '{"a": "STOP"}')):
            (got,) = server.post({**asked, "stop": stop}, "chat/completions").json()["choices"]
            assert got["finish_reason"] == finish
            assert got["message"]["tool_calls"][0]["function"]["arguments"] == arguments
        tools = [{"name": "now", "input_schema": SCHEMAS["now"]}]
        got = server.post({**asked, "tools": tools, "stop_sequences": ["STOP"]}, "messages").json()
        assert (got["stop_reason"], got["stop_sequence"]) == ("stop_sequence", "STOP")
        assert got["content"][0]["input"] == {}


@pytest.mark.parametrize("parser", ["think", None])
def test_a_stored_response_goes_on_wherever_it_was_cut(spare: LLM, parser: str | None) -> None:
    settings = ServerSettings(
        model_names=("stdlib",), stored_responses=99, reasoning_parser=parser, chat_template=STRICT
    )
    thought = {"guided_regex": "<think>\nthink</think>\n\nsay a"}
    with running(spare, settings) as server:
        for length in (1, 2, 3, 5, 8, 9, 10, 12, 14, 16, 60):
            body = {"input": "x", "max_output_tokens": length, "temperature": 0, **thought}
            first = server.post(body, "responses").json()
            more = {"input": "y", "previous_response_id": first["id"], "max_output_tokens": 1}
            second = server.post(more, "responses")
            assert second.status_code == 200, (first["output"], second.text)
            if first["status"] == "completed":
                break
        assert first["status"] == "completed"


def test_arguments_of_any_depth_go_back(server: Running) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "[" * 50_000}}
    said = {"role": "assistant", "tool_calls": [call]}
    body = {"messages": [USER, said, USER], "max_tokens": 1}
    answer = server.post(body, "chat/completions")
    assert answer.status_code == 200, answer.text
