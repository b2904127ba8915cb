"""Function calls: out of texts however they are cut, and through the server."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from tests.serve.conftest import Running

from foretoken.serve.chat_schema import ChatRequest, Function, Tool
from foretoken.serve.completions_writer import message_of
from foretoken.serve.parsers.formats import FORCED, ExpectedOutput, OutputFormat
from foretoken.serve.prompts import forced_calls

HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "}"]}}\n</tool_call>'
BARE = '{"name": "add", "parameters": {"a": "\\"{", "b": {}}}'
CASES: list[tuple[str, bool, str | None, list[tuple[str, Any]]]] = [
    ("plain text", False, "plain text", []),
    ("  ", False, "  ", []),
    ("", False, "", []),
    (HERMES, False, None, [("add", {"a": 1, "b": [2, "}"]})]),
    ("I add.\n" + HERMES + "\n" + HERMES, False, "I add.\n", [("add", {"a": 1, "b": [2, "}"]})] * 2),
    (HERMES + " so.", False, " so.", [("add", {"a": 1, "b": [2, "}"]})]),
    (BARE, False, None, [("add", {"a": '"{', "b": {}})]),
    (" " + BARE + "; " + BARE, False, None, [("add", {"a": '"{', "b": {}})] * 2),
    (f"[{BARE}, {BARE}]", True, None, [("add", {"a": '"{', "b": {}})] * 2),
    ('{"parameters": {"x": 1}, "name": "add"}', True, None, [("add", {"x": 1})]),
    ('{"name": "add", "arguments": "{\\"x\\": 1}"}', False, None, [("add", {"x": 1})]),
    ('{"name": "other", "parameters": {}}', False, '{"name": "other", "parameters": {}}', []),
    ('{"answer": 42} is it', False, '{"answer": 42} is it', []),
    ("a < b <tool", False, "a < b <tool", []),
    ("<tool_call>nonsense", False, "<tool_call>nonsense", []),
    ("{}", False, "{}", []),
]


def parsed(parts: list[str], bare: bool) -> dict[str, Any]:
    parser = ExpectedOutput(FORCED if bare else OutputFormat(), {"add": {}}).parser()
    return message_of([*(delta for part in parts for delta in parser.push(part)), *parser.finish()])


@pytest.mark.parametrize("text, bare, content, calls", CASES)
def test_calls_are_parsed_however_the_text_is_cut(text, bare, content, calls):
    for parts in ([text], list(text), [text[i : i + 3] for i in range(0, len(text), 3)]):
        message = parsed(parts, bare)
        assert message["content"] == content
        found = [c["function"] for c in message.get("tool_calls", ())]
        assert [(f["name"], json.loads(f["arguments"])) for f in found] == calls


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", BARE, "{", "}", '"', ":", ",", "name", " ", "\\"])))
def test_any_text_however_it_is_cut(parts: list[str]) -> None:
    whole, cut = parsed(["".join(parts)], False), parsed(list("".join(parts)), False)
    for message in (whole, cut):
        for call in message.get("tool_calls", ()):
            call["id"] = ""
    assert whole == cut


def test_cut_off_arguments_are_told_as_far_as_they_came() -> None:
    message = parsed([BARE[:-4]], False)
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a": "\\"{", "b": '


TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"$ref": "#/$defs/digit"}, "b": {"$ref": "#/$defs/digit"}},
                "required": ["a", "b"],
                "additionalProperties": False,
                "$defs": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}},
            },
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]
ASKED: Any = {
    "model": "stdlib",
    "messages": [{"role": "user", "content": "add(1, 2)"}],
    "tools": TOOLS,
    "temperature": 1,
    "max_completion_tokens": 400,
}


def check(call: Any) -> None:
    arguments = json.loads(call.function.arguments)
    assert call.id.startswith("call_") and call.type == "function"
    if call.function.name == "add":
        assert set(arguments) == {"a", "b"} and all(0 <= v <= 9 for v in arguments.values())
    else:
        assert (call.function.name, arguments) == ("stop", {})


@pytest.mark.parametrize("seed", range(3))
def test_a_named_tool_is_called(client: openai.OpenAI, seed: int) -> None:
    choice: Any = {"type": "function", "function": {"name": "add"}}
    got = client.chat.completions.create(**ASKED, tool_choice=choice, seed=seed).choices[0]
    assert got.finish_reason == "stop" and got.message.content is None
    assert [c.function.name for c in got.message.tool_calls] == ["add"]
    check(got.message.tool_calls[0])


@pytest.mark.parametrize("seed", range(3))
def test_required_one(client: openai.OpenAI, seed: int) -> None:
    got = client.chat.completions.create(**ASKED, tool_choice="required", parallel_tool_calls=False, seed=seed)
    assert got.choices[0].finish_reason == "tool_calls" and len(got.choices[0].message.tool_calls) == 1
    check(got.choices[0].message.tool_calls[0])


def test_required_streamed(client: openai.OpenAI) -> None:
    asked = {**ASKED, "tool_choice": "required", "seed": 2, "parallel_tool_calls": False}
    whole = client.chat.completions.create(**asked).choices[0].message.tool_calls[0].function
    chunks = list(client.chat.completions.create(**asked, stream=True))
    deltas = [call for c in chunks for call in c.choices[0].delta.tool_calls or ()]
    assert deltas[0].id.startswith("call_") and deltas[0].type == "function" and deltas[0].function.arguments == ""
    assert {d.index for d in deltas} == {0} and all(d.id is None for d in deltas[1:])
    assert deltas[0].function.name == whole.name
    assert "".join(d.function.arguments for d in deltas) == whole.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    with client.chat.completions.stream(**asked) as stream:  # the client's own reader agrees
        final = stream.get_final_completion().choices[0].message.tool_calls[0].function
    assert (final.name, final.arguments) == (whole.name, whole.arguments)


def test_auto_and_none_leave_text_alone(client: openai.OpenAI) -> None:
    for choice in ("auto", "none"):
        asked = {**ASKED, "max_completion_tokens": 12, "temperature": 0}
        got = client.chat.completions.create(**asked, tool_choice=choice).choices[0]
        assert got.message.content and got.message.tool_calls is None


def test_results_go_back_into_the_conversation(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    messages: Any = [
        *ASKED["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ]
    got = client.chat.completions.create(**{**ASKED, "messages": messages, "max_completion_tokens": 8})
    assert got.usage is not None and got.usage.completion_tokens > 0


def test_demands_that_cannot_be_met(client: openai.OpenAI) -> None:
    unknown: Any = {"type": "function", "function": {"name": "nothing"}}
    for choice, tools in ((unknown, TOOLS), ("required", [])):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**{**ASKED, "tools": tools}, tool_choice=choice)
        assert caught.value.param == "tool_choice"


OPEN: Any = {"type": "object", "properties": {"a": {"type": "object", "properties": {}}}, "additionalProperties": False}
CLOSED: Any = {**OPEN, "properties": {"a": {**OPEN["properties"]["a"], "additionalProperties": False}}}


def strict_bodies(schema: Any) -> list[tuple[str, dict[str, Any]]]:
    """Requests of each API with a strict schema."""
    user = [{"role": "user", "content": "x"}]
    function = {"name": "f", "parameters": schema, "strict": True}
    form = {"name": "f", "schema": schema, "strict": True}
    tool = {"name": "f", "input_schema": schema, "strict": True}
    return [
        ("chat/completions", {"messages": user, "tools": [{"type": "function", "function": function}]}),
        ("chat/completions", {"messages": user, "response_format": {"type": "json_schema", "json_schema": form}}),
        ("responses", {"input": "x", "tools": [{"type": "function", **function}]}),
        ("responses", {"input": "x", "text": {"format": {"type": "json_schema", **form}}}),
        ("messages", {"messages": user, "tools": [tool]}),
    ]


@pytest.mark.parametrize(
    "schema, path",
    [
        (OPEN, "('properties', 'a')"),
        ({**OPEN, "additionalProperties": True}, "()"),
        ({}, "()"),
        ({**CLOSED, "$defs": {"b": {"type": ["object", "null"]}}}, "('$defs', 'b')"),
        ({"$ref": "#/$defs/b", "$defs": {"b": {"properties": {}}}}, "('$defs', 'b')"),
    ],
)
def test_strict_objects_must_be_closed(server: Running, schema: Any, path: str) -> None:
    for route, body in strict_bodies(schema):
        answer = server.post({**body, "max_tokens" if route != "responses" else "max_output_tokens": 1}, route)
        assert answer.status_code == 400, (route, answer.text)
        message = answer.json()["error"]["message"]
        assert f"In context={path}, 'additionalProperties' is required to be supplied and to be false" in message


def test_strict_objects_that_are_closed_are_served(server: Running) -> None:
    for route, body in strict_bodies(CLOSED):
        answer = server.post({**body, "max_tokens" if route != "responses" else "max_output_tokens": 1}, route)
        assert answer.status_code == 200, (route, answer.text)


def test_references_move_with_a_schema_and_data_does_not() -> None:
    parameters = {"properties": {"a": {"$ref": "#/$defs/b"}, "$ref": {"const": {"$ref": "#"}}}, "$defs": {"b": {}}}
    tool = Tool(type="function", function=Function(name="f", parameters=parameters))
    chat = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}]})
    schema = forced_calls(chat.model_copy(update={"tools": [tool], "tool_choice": "required"}))
    assert schema is not None
    assert schema["$defs"]["f"]["properties"] == {"a": {"$ref": "#/$defs/f/$defs/b"}, "$ref": {"const": {"$ref": "#"}}}


class Filed(BaseModel):
    numbers: Annotated[set[Literal[1, 2]], Field(max_length=3)]
    folder: Path = Field(json_schema_extra={"maxLength": 9})


@pytest.mark.parametrize("seed", range(3))
def test_sets_and_paths_are_parsed(client: openai.OpenAI, seed: int) -> None:
    messages: Any = [{"role": "user", "content": "x"}]
    asked: Any = {"messages": messages, "model": "stdlib", "max_completion_tokens": 200, "seed": seed}
    parsed = client.chat.completions.parse(**asked, response_format=Filed).choices[0].message.parsed
    assert isinstance(parsed, Filed) and isinstance(parsed.folder, Path) and parsed.numbers <= {1, 2}
