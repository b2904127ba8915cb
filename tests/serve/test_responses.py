"""/v1/responses through OpenAI's own client, against the types of its package, and event by event."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from tests.serve.conftest import DIGIT, Running, events_of, running

from foretoken import LLM
from foretoken.serve.settings import ServerSettings

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("preloaded_python")]

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
GREEDY: dict[str, Any] = {"model": "stdlib", "input": "def main(args):", "temperature": 0, "max_output_tokens": 24}
ADD: Any = {"type": "function", "name": "add", "strict": True, "parameters": DIGIT}
CALLING: dict[str, Any] = {
    "model": "stdlib",
    "input": "add(1)",
    "temperature": 1,
    "seed": 3,
    "max_output_tokens": 200,
    "tools": [ADD],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}


@pytest.fixture(scope="module")
def storing(spare: LLM) -> Iterator[Running]:
    settings = ServerSettings(model_names=("stdlib",), stored_responses=50)
    with running(spare, settings) as found:
        yield found


@pytest.fixture
def keeper(storing: Running) -> Iterator[openai.OpenAI]:
    with storing.client as found:
        yield found


def stream_of(server: Running, **body: Any) -> list[tuple[str, Any]]:
    got = server.post({**body, "stream": True}, "responses")
    assert got.headers["content-type"] == "text/event-stream; charset=utf-8", got.text
    events = events_of(got.text)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    for name, data in events:
        assert data["type"] == name
        EVENT.validate_python(data)
    return events


OPENING = ["response.created", "response.in_progress"]


def item_events(kind: str, names: Sequence[str]) -> list[str]:
    """The names of the events of one item of text or reasoning, with as many deltas as ``names`` has."""
    delta = f"response.{kind}.delta"
    return [
        *("response.output_item.added", "response.content_part.added"),
        *(name for name in names if name == delta),
        *(f"response.{kind}.done", "response.content_part.done", "response.output_item.done"),
    ]


def test_a_response_equals_a_chat_completion(server: Running, client: openai.OpenAI) -> None:
    raw = server.post(GREEDY, "responses").json()
    Response.model_validate(raw, strict=True)
    got = client.responses.create(**GREEDY)
    said = {"messages": [{"role": "user", "content": GREEDY["input"]}], "model": "stdlib", "temperature": 0}
    chat = client.chat.completions.create(**said, max_completion_tokens=24)
    assert got.output_text == chat.choices[0].message.content
    assert got.id.startswith("resp_") and got.output[0].id.startswith("msg_") and got.object == "response"
    assert got.status == "incomplete" and got.incomplete_details.reason == "max_output_tokens"
    assert got.output[0].status == "incomplete"
    assert got.usage.input_tokens == chat.usage.prompt_tokens and got.usage.output_tokens == 24
    assert got.usage.total_tokens == got.usage.input_tokens + 24
    assert got.model_extra["metrics"]["speculative_decoding"]["num_spec_tokens"] > 0
    assert got.temperature == 0 and got.tool_choice == "auto" and got.tools == [] and got.metadata == {}


def test_a_finished_text_completes_the_response(client: openai.OpenAI) -> None:
    got = client.responses.create(**{**GREEDY, "max_output_tokens": 300}, extra_body={"guided_choice": ["yes", "no"]})
    assert got.status == "completed" and got.incomplete_details is None and got.output_text in ("yes", "no")
    assert got.output[0].status == "completed" and got.completed_at >= got.created_at


def test_stream_is_in_openais_order(server: Running) -> None:
    whole = server.post(GREEDY, "responses").json()
    events = stream_of(server, **GREEDY)
    names = [name for name, _ in events]
    assert names == [*OPENING, *item_events("output_text", names), "response.incomplete"]
    assert names.count("response.output_text.delta") > 1
    data = [data for _, data in events]
    text = "".join(d["delta"] for d in data if d["type"] == "response.output_text.delta")
    assert text == whole["output"][0]["content"][0]["text"] == data[-4]["text"] == data[-3]["part"]["text"]
    assert data[0]["response"]["status"] == "in_progress" and data[0]["response"]["output"] == []
    assert data[2]["item"]["content"] == [] and data[2]["item"]["status"] == "in_progress"
    assert data[-2]["item"] == data[-1]["response"]["output"][0]
    ids = {d["item_id"] for d in data if "item_id" in d} | {data[2]["item"]["id"], data[-2]["item"]["id"]}
    assert len(ids) == 1
    final = data[-1]["response"]
    for name in ("id", "created_at", "completed_at", "output", "metrics", "usage"):
        final.pop(name), whole.pop(name)
    assert final == whole


def test_the_clients_own_reader_agrees(client: openai.OpenAI) -> None:
    asked = {**GREEDY, "max_output_tokens": 300}
    with client.responses.stream(**asked, extra_body={"guided_regex": "[ab]{40}"}) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.output_text == "".join(deltas) and len(final.output_text) == 40


class Point(BaseModel):
    x: bool
    on: bool


def test_outputs_are_parsed_as_a_pydantic_type(client: openai.OpenAI) -> None:
    asked = {**GREEDY, "max_output_tokens": 400, "temperature": 1}
    for seed in range(2):
        got = client.responses.parse(**asked, text_format=Point, extra_body={"seed": seed})
        assert got.status == "completed" and isinstance(got.output_parsed, Point)
        assert got.text.format.type == "json_schema" and got.text.format.name == "Point"


def test_json_object(client: openai.OpenAI) -> None:
    got = client.responses.create(
        **{**GREEDY, "max_output_tokens": 400, "temperature": 1},
        text={"format": {"type": "json_object"}},
        extra_body={"seed": 1},
    )
    assert got.status == "incomplete" or isinstance(json.loads(got.output_text), dict)


def test_function_calls_are_streamed_as_in_the_whole_response(server: Running) -> None:
    events = stream_of(server, **CALLING)
    whole = server.post(CALLING, "responses").json()
    Response.model_validate(whole, strict=True)
    names = [name for name, _ in events]
    deltas = [data["delta"] for name, data in events if name == "response.function_call_arguments.delta"]
    assert names == [
        *OPENING,
        "response.output_item.added",
        *["response.function_call_arguments.delta"] * len(deltas),
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    call, done = whole["output"][0], events[-3][1]
    assert call["type"] == "function_call" and call["id"].startswith("fc_") and call["call_id"].startswith("call_")
    assert "".join(deltas) == done["arguments"] == call["arguments"] and set(json.loads(call["arguments"])) == {"a"}
    assert whole["tools"] == [{**ADD, "description": None}] and whole["tool_choice"] == "required"


def test_an_agent_loop_of_several_steps(client: openai.OpenAI) -> None:
    """Every step sends back what came, and calls again, as OpenAI's own examples do."""
    items: list[Any] = [{"role": "user", "content": "add"}]
    asked = {key: value for key, value in CALLING.items() if key not in ("input", "seed")}
    for step in range(3):
        got = client.responses.create(**asked, input=items, extra_body={"seed": step})
        assert [item.type for item in got.output] == ["function_call"]
        call: Any = got.output[0]
        items += got.output
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": call.arguments})
    asked |= {"tool_choice": "none", "max_output_tokens": 8, "temperature": 0}
    assert client.responses.create(**asked, input=items).output_text


def test_allowed_tools_and_a_named_one(client: openai.OpenAI) -> None:
    other = {**ADD, "name": "other"}
    for choice in (
        {"type": "function", "name": "other"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "other"}]},
    ):
        asked = {**CALLING, "tools": [ADD, other], "tool_choice": choice}
        seed = {"seed": asked.pop("seed")}
        got: Any = client.responses.create(**asked, extra_body=seed)
        assert [item.name for item in got.output] == ["other"]


def test_log_probabilities(server: Running, client: openai.OpenAI) -> None:
    asked = {**GREEDY, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    got: Any = client.responses.create(**asked)
    entries = got.output[0].content[0].logprobs
    assert len(entries) == 24 and all(len(entry.top_logprobs) == 2 for entry in entries)
    assert b"".join(bytes(entry.bytes) for entry in entries).decode("utf-8", "replace") == got.output_text
    events = stream_of(server, **asked)
    streamed = [e["token"] for name, data in events if name.endswith("text.delta") for e in data["logprobs"]]
    assert streamed == [entry.token for entry in entries]


def test_reasoning_is_an_item_of_its_own(spare: LLM) -> None:
    settings = ServerSettings(model_names=("stdlib",), reasoning_parser="think")
    asked = {**GREEDY, "guided_regex": "<think>\nthink</think>\n\nsay a", "max_output_tokens": 60}
    with running(spare, settings) as server:
        whole = server.post(asked, "responses").json()
        events = stream_of(server, **asked)
        user = {"role": "user", "content": "x"}
        chat = {"messages": [user], "guided_regex": asked["guided_regex"], "max_tokens": 60}
        message = server.post(chat, "chat/completions").json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("think", "say a")
        chunks = server.post({**chat, "stream": True}, "chat/completions").text
        assert '"reasoning_content":"' in chunks
        sent = {"input": [user, *whole["output"], {"role": "user", "content": "y"}]}
        assert server.post({**asked, **sent}, "responses").status_code == 200  # goes back as it came
    Response.model_validate(whole, strict=True)
    thought, message = whole["output"]
    assert thought["type"] == "reasoning" and thought["content"] == [{"type": "reasoning_text", "text": "think"}]
    assert message["content"][0]["text"] == "say a" and whole["status"] == "completed"
    assert 0 < whole["usage"]["output_tokens_details"]["reasoning_tokens"] < whole["usage"]["output_tokens"]
    names = [name for name, _ in events]
    reasoning, text = item_events("reasoning_text", names), item_events("output_text", names)
    assert names == [*OPENING, *reasoning, *text, "response.completed"]


def test_a_stored_conversation_goes_on(keeper: openai.OpenAI) -> None:
    one = keeper.responses.create(**GREEDY, instructions="Be brief.")
    two = keeper.responses.create(**{**GREEDY, "input": "x = 1"}, previous_response_id=one.id)
    items = [
        {"role": "user", "content": GREEDY["input"]},
        {"role": "assistant", "content": one.output_text},
        {"role": "user", "content": "x = 1"},
    ]
    assert two.output_text == keeper.responses.create(**{**GREEDY, "input": items}).output_text
    assert two.previous_response_id == one.id and two.model_extra["store"] is True
    assert keeper.responses.retrieve(one.id).output_text == one.output_text
    listed = keeper.responses.input_items.list(two.id).data
    assert [item.content[0].text for item in listed] == ["x = 1"]
    reference: Any = {"type": "item_reference", "id": one.output[0].id}
    again = keeper.responses.create(**{**GREEDY, "input": [items[0], reference, items[2]]})
    assert again.output_text == two.output_text
    keeper.responses.delete(one.id)
    with pytest.raises(openai.NotFoundError):
        keeper.responses.retrieve(one.id)
    with pytest.raises(openai.BadRequestError) as caught:
        keeper.responses.create(**GREEDY, previous_response_id=two.id)
    assert caught.value.code == "previous_response_not_found" and caught.value.param == "previous_response_id"


def test_input_items_come_in_pages(keeper: openai.OpenAI) -> None:
    given: Any = [{"role": "user", "content": str(number)} for number in range(5)]
    got = keeper.responses.create(**{**GREEDY, "input": given})
    listed = list(keeper.responses.input_items.list(got.id, limit=2, order="asc"))  # asks for every page
    assert [item.content[0].text for item in listed] == list("01234")


def test_streamed_responses_are_stored_once_they_are_complete(storing: Running, keeper: openai.OpenAI) -> None:
    final = stream_of(storing, **GREEDY)[-1][1]["response"]
    assert keeper.responses.retrieve(final["id"]).output_text == final["output"][0]["content"][0]["text"]
    kept = keeper.responses.create(**GREEDY, store=False)
    with pytest.raises(openai.NotFoundError):
        keeper.responses.retrieve(kept.id)


def test_a_large_body_continues_a_stored_conversation(storing: Running, keeper: openai.OpenAI) -> None:
    one = keeper.responses.create(**GREEDY)
    body = {**GREEDY, "input": "x = 1", "previous_response_id": one.id}
    small = storing.post(body, "responses").json()
    content = json.dumps(body).encode() + b" " * 2**17
    large = storing.post(content, "responses").json()
    assert small["output"][0]["content"] == large["output"][0]["content"]
    unknown = json.dumps({**body, "previous_response_id": "resp_0"}).encode() + b" " * 2**17
    got = storing.post(unknown, "responses")
    assert got.status_code == 400 and got.json()["error"]["code"] == "previous_response_not_found"


def test_cancel_is_for_background_responses(keeper: openai.OpenAI) -> None:
    got = keeper.responses.create(**GREEDY)
    with pytest.raises(openai.BadRequestError, match="only background responses"):
        keeper.responses.cancel(got.id)
    with pytest.raises(openai.NotFoundError):
        keeper.responses.cancel("resp_0")


def test_a_server_that_stores_nothing_says_so(server: Running) -> None:
    got = server.post({**GREEDY, "previous_response_id": "resp_1"}, "responses")
    assert got.status_code == 400 and "--response-store" in got.json()["error"]["message"]
    assert server.post({**GREEDY, "store": True}, "responses").json()["store"] is False
    assert httpx.get(f"{server.url}/v1/responses/resp_1").status_code == 404


@pytest.mark.parametrize(
    "fields, param, words",
    [
        ({"background": True}, "background", "not served"),
        ({"conversation": "c"}, "conversation", "previous_response_id"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": [{"type": "computer_call"}]}, "input.0.type", "an item of type 'computer_call' was given"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input.0.content.0.type",
            "'input_image' was given",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "'web_search' was given; only functions"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "none"}}, "tool_choice", "names 'none'"),
        ({"truncation": "auto"}, "truncation", "disabled"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"max_output_tokens": 9000}, "input", "context length"),
        ({"input": "x" * 10**6}, "input", "context length"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "--response-store"),
    ],
)
def test_invalid_fields_are_refused_by_name(server: Running, fields: dict[str, Any], param: str, words: str) -> None:
    got = server.post({**GREEDY, **fields}, "responses")
    assert got.status_code == 400, got.text
    error = got.json()["error"]
    assert error["param"] == param and words in error["message"]
