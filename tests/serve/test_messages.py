"""/v1/messages through Anthropic's own client, against the types of its package, and event by event."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter
from tests.serve.conftest import DIGIT, PATIENCE, Running, events_of, running

from foretoken import LLM, zoo
from foretoken.serve.settings import ServerSettings

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("preloaded_python")]

USER = [{"role": "user", "content": "def main(args):"}]
GREEDY: dict[str, Any] = {"model": "stdlib", "messages": USER, "temperature": 0, "max_tokens": 24}
ADD: Any = {"name": "add", "description": "Adds.", "input_schema": DIGIT}
CALLING: dict[str, Any] = {
    "model": "stdlib",
    "messages": USER,
    "max_tokens": 200,
    "tools": [ADD],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
}


def own(body: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Arguments of the client: fields that it does not name, such as the temperature, go into its extra body."""
    unnamed = {"temperature", "top_k", "seed", "guided_regex"} & body.keys()
    extra = {name: body[name] for name in unnamed} | more.pop("extra_body", {})
    return {**{name: body[name] for name in body.keys() - unnamed}, **more, "extra_body": extra}


def anthropic() -> Any:
    """Anthropic's package, which takes a second to import."""
    return pytest.importorskip("anthropic")


def talking(server: Running) -> Any:
    return anthropic().Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=PATIENCE)


@pytest.fixture
def claude(server: Running) -> Iterator[Any]:
    with talking(server) as found:
        yield found


def stream_of(server: Running, **body: Any) -> list[tuple[str, Any]]:
    got = server.post({**body, "stream": True}, "messages")
    assert got.headers["content-type"] == "text/event-stream; charset=utf-8", got.text
    events = events_of(got.text)
    reads: TypeAdapter[Any] = TypeAdapter(anthropic().types.RawMessageStreamEvent)
    for name, data in events:
        assert data["type"] == name
        if name != "ping":
            reads.validate_python(data)
    return events


def test_a_message_equals_a_chat_completion(server: Running, claude: Any) -> None:
    anthropic().types.Message.model_validate(server.post(GREEDY, "messages").json(), strict=True)
    got = claude.messages.create(**own(GREEDY, system="Be brief."))
    said = [{"role": "system", "content": "Be brief."}, *USER]
    chat = server.post({**GREEDY, "messages": said}, "chat/completions").json()
    assert [block.text for block in got.content] == [chat["choices"][0]["message"]["content"]]
    assert got.id.startswith("msg_") and got.role == "assistant" and got.type == "message" and got.model == "stdlib"
    assert got.stop_reason == "max_tokens" and got.stop_sequence is None and got.usage.output_tokens == 24
    assert got.usage.input_tokens + got.usage.cache_read_input_tokens == chat["usage"]["prompt_tokens"]
    assert got.model_extra["metrics"]["speculative_decoding"]["num_spec_tokens"] > 0
    assert got._request_id.startswith("req_")


def test_stream_is_in_anthropics_order(server: Running) -> None:
    whole = server.post(GREEDY, "messages").json()
    events = stream_of(server, **GREEDY)
    names = [name for name, _ in events]
    deltas = [data["delta"]["text"] for name, data in events if name == "content_block_delta"]
    assert names == [
        "message_start",
        "ping",
        "content_block_start",
        *["content_block_delta"] * len(deltas),
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert "".join(deltas) == whole["content"][0]["text"] and len(deltas) > 1
    start, end = events[0][1]["message"], events[-2][1]
    assert start["content"] == [] and start["stop_reason"] is None and start["usage"]["output_tokens"] == 0
    assert end["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None} and end["usage"]["output_tokens"] == 24
    assert end["metrics"]["speculative_decoding"]["num_spec_tokens"] > 0


def test_the_clients_own_reader_agrees(claude: Any) -> None:
    with claude.messages.stream(**own(GREEDY)) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    whole = claude.messages.create(**own(GREEDY))
    assert text == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_stop_sequences(claude: Any) -> None:
    asked = own({**GREEDY, "max_tokens": 100, "guided_regex": "abcSTOPdef"})
    got = claude.messages.create(**asked, stop_sequences=["zzz", "STOP"])
    assert (got.stop_reason, got.stop_sequence, got.content[0].text) == ("stop_sequence", "STOP", "abc")
    got = claude.messages.create(**asked)
    assert (got.stop_reason, got.stop_sequence, got.content[0].text) == ("end_turn", None, "abcSTOPdef")


def test_the_context_ends_what_is_longer() -> None:
    """Coding agents ask for 32,000 tokens whatever the model."""
    llm, names = LLM(zoo.path("draft"), dtype="float32", max_model_len=256), ServerSettings(model_names=("stdlib",))
    with running(llm, names) as server, talking(server) as claude:
        got = claude.messages.create(**own(GREEDY, max_tokens=32_000, stop_sequences=["\n"]))
        assert got.stop_reason in ("stop_sequence", "end_turn")
        prompt = [{"role": "user", "content": "x " * 230}]
        count = claude.messages.count_tokens(model="stdlib", messages=prompt).input_tokens
        assert 200 < count < 256
        got = claude.messages.create(**own(GREEDY, max_tokens=300, messages=prompt))
        assert got.stop_reason in ("model_context_window_exceeded", "end_turn")


def test_tool_calls_are_blocks(server: Running, claude: Any) -> None:
    got = claude.messages.create(**CALLING, extra_body={"seed": 3})
    (call,) = got.content
    assert got.stop_reason == "tool_use" and call.type == "tool_use" and call.id.startswith("toolu_")
    assert call.name == "add" and set(call.input) == {"a"}
    events = stream_of(server, **CALLING, seed=3)
    start = events[2][1]["content_block"]
    assert start["type"] == "tool_use" and start["input"] == {} and start["name"] == "add"
    parts = [data["delta"]["partial_json"] for name, data in events if name == "content_block_delta"]
    assert json.loads("".join(parts)) == call.input and events[-2][1]["delta"]["stop_reason"] == "tool_use"
    with claude.messages.stream(**CALLING, extra_body={"seed": 3}) as stream:
        assert stream.get_final_message().content[0].input == call.input


def test_an_agent_loop_of_several_steps(claude: Any) -> None:
    messages: list[Any] = list(USER)
    for step in range(3):
        got = claude.messages.create(**{**CALLING, "messages": messages}, extra_body={"seed": step})
        assert got.stop_reason == "tool_use"
        results = [{"type": "tool_result", "tool_use_id": b.id, "content": json.dumps(b.input)} for b in got.content]
        messages += [{"role": "assistant", "content": got.content}, {"role": "user", "content": results}]
    messages[-1]["content"].append({"type": "text", "text": "And?"})
    asked = {**CALLING, "messages": messages, "tool_choice": {"type": "none"}, "max_tokens": 8, "temperature": 0}
    got = claude.messages.create(**own(asked))
    assert got.content[0].type == "text"


def test_a_named_tool(claude: Any) -> None:
    tools = [ADD, {**ADD, "name": "other"}]
    got = claude.messages.create(**{**CALLING, "tools": tools, "tool_choice": {"type": "tool", "name": "other"}})
    assert [block.name for block in got.content] == ["other"] and got.stop_reason == "tool_use"


def test_the_models_own_beginning_is_continued(server: Running, claude: Any) -> None:
    begun = [*USER, {"role": "assistant", "content": "    return"}]
    got = claude.messages.create(**own(GREEDY, messages=begun))
    body = {**GREEDY, "messages": begun, "continue_final_message": True}
    chat = server.post(body, "chat/completions").json()
    assert got.content[0].text == chat["choices"][0]["message"]["content"]


def test_outputs_follow_a_json_schema(claude: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    }
    form = {"format": {"type": "json_schema", "schema": schema}}
    got = claude.messages.create(**own(GREEDY, max_tokens=200, output_config=form))
    assert isinstance(json.loads(got.content[0].text)["on"], bool)


def test_count_tokens(server: Running, claude: Any) -> None:
    asked = {"model": "stdlib", "messages": USER, "system": "Be brief."}
    count = claude.messages.count_tokens(**asked).input_tokens
    usage = claude.messages.create(**asked, max_tokens=1).usage
    assert count == usage.input_tokens + usage.cache_read_input_tokens
    body = json.dumps(asked).encode() + b" " * 2**17
    assert server.post(body, "messages/count_tokens").json() == {"input_tokens": count}


def test_thinking_is_a_block_of_its_own(spare: LLM) -> None:
    settings = ServerSettings(model_names=("stdlib",), reasoning_parser="think")
    asked = {**GREEDY, "guided_regex": "<think>\nthink</think>\n\nsay a", "max_tokens": 60}
    with running(spare, settings) as server:
        whole = server.post(asked, "messages").json()
        events = stream_of(server, **asked)
        with anthropic().Anthropic(base_url=server.url, api_key="x", max_retries=0, timeout=PATIENCE) as client:
            plain = own(asked)
            with client.messages.stream(**plain) as stream:
                final = stream.get_final_message()
            back = [*USER, {"role": "assistant", "content": final.content}, {"role": "user", "content": "y"}]
            assert client.messages.create(**{**plain, "messages": back}).content
    thought, text = whole["content"]
    assert thought["type"] == "thinking" and thought["thinking"] == "think" and thought["signature"]
    assert text["text"] == "say a" and [block.type for block in final.content] == ["thinking", "text"]
    assert final.content[0].signature == thought["signature"]
    kinds = [data["delta"]["type"] for name, data in events if name == "content_block_delta"]
    assert list(dict.fromkeys(kinds)) == ["thinking_delta", "signature_delta", "text_delta"]
    assert [data["index"] for name, data in events if name == "content_block_start"] == [0, 1]


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"max_tokens": None}, "max_tokens: Field required"),
        ({"max_tokens": 0}, "greater than or equal to 1"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a block of type 'image' was given"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
            "'tool_use' belongs into a message of the assistant",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305' was given"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        ({"mcp_servers": []}, "mcp_servers is not served"),
        ({"messages": [{"role": "user", "content": "x" * 10**6}]}, "context length"),
        ({"messages": []}, "at least 1 item"),
    ],
)
def test_invalid_fields_are_refused(server: Running, fields: dict[str, Any], words: str) -> None:
    body = {key: value for key, value in {**GREEDY, **fields}.items() if value is not None}
    got = server.post(body, "messages")
    assert got.status_code == 400, got.text
    anthropic().types.shared.ErrorResponse.model_validate(got.json(), strict=True)
    error = got.json()
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert words in error["error"]["message"] and error["request_id"] == got.headers["request-id"]


def test_errors_have_anthropics_shape_wherever_they_arise(server: Running, claude: Any) -> None:
    with pytest.raises(anthropic().NotFoundError) as caught:
        claude.messages.create(**own(GREEDY, model="gpt"))
    assert caught.value.body["error"]["type"] == "not_found_error"
    got = httpx.get(f"{server.url}/v1/messages")
    assert got.status_code == 405 and got.json()["type"] == "error"
    got = server.post(b"{", "messages")
    assert got.status_code == 400 and got.json()["error"]["type"] == "invalid_request_error"
    assert (
        "error" in httpx.get(f"{server.url}/v1/messagesx").json()
        and "type" not in httpx.get(f"{server.url}/v1/messagesx").json()
    )


def test_keys_and_limits_answer_in_anthropics_shape(spare: LLM) -> None:
    settings = ServerSettings(model_names=("stdlib",), api_keys=("secret", "other"), max_body=4000)
    with running(spare, settings) as server:

        def ask(key: str, **more: Any) -> Any:
            with anthropic().Anthropic(base_url=server.url, api_key=key, max_retries=0, timeout=PATIENCE) as client:
                return client.messages.create(**own(GREEDY, **more))

        assert ask("secret").content
        with pytest.raises(anthropic().AuthenticationError) as caught:
            ask("wrong")
        assert caught.value.body["error"]["type"] == "authentication_error"
        with pytest.raises(anthropic().APIStatusError) as caught:
            ask("secret", system="x" * 5000)
        assert caught.value.status_code == 413 and caught.value.body["error"]["type"] == "request_too_large"
        assert httpx.get(f"{server.url}/v1/models", headers={"x-api-key": "other"}).status_code == 200
        assert httpx.get(f"{server.url}/v1/models", headers={"x-api-key": ""}).status_code == 401
        assert httpx.get(f"{server.url}/v1/models", headers={"Authorization": "Basic secret"}).status_code == 401
