"""Each error names the field that is to blame as it was sent: every field of every body, with values of every kind."""

import json
from collections.abc import Callable, Iterator
from typing import Any, get_args, get_origin

import jsonschema
import pytest
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from tests.serve.conftest import Running
from tests.serve.test_errors import error_of

from foretoken.serve.administration import AdapterToLoad, AdapterToUnload, SpeculationChange
from foretoken.serve.chat_schema import ChatRequest, DetokenizeRequest, TokenizeRequest
from foretoken.serve.errors import ApiError
from foretoken.serve.messages_schema import CountTokensRequest, MessagesRequest
from foretoken.serve.request_state import collect_unknown_fields
from foretoken.serve.responses_schema import ResponsesRequest
from foretoken.serve.schema import Body, CompletionRequest
from foretoken.serve.side_process import _validated

BODIES: dict[type[Body], dict[str, Any]] = {
    CompletionRequest: {"prompt": "x"},
    ChatRequest: {"messages": [{"role": "user", "content": "x"}]},
    ResponsesRequest: {"input": "x"},
    MessagesRequest: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    CountTokensRequest: {"messages": [{"role": "user", "content": "x"}]},
    TokenizeRequest: {"prompt": "x"},
    DetokenizeRequest: {"tokens": [1]},
    AdapterToLoad: {"lora_name": "x", "lora_path": "x"},
    AdapterToUnload: {"lora_name": "x"},
    SpeculationChange: {},
}
VALUES: tuple[Any, ...] = ("silly", "", -7, 1.5, 10**30, True, [], {}, [[]], [{}], ["x"], [-7], {"type": "silly"})
SAMPLES = {"messages": [{"role": "user", "content": "x"}], "name": "f", "lora_path": "x"}

Place = Callable[[Any], dict[str, Any]]  # puts a value into a body


def resolved(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rpartition("/")[2]]
    return schema


def least(schema: dict[str, Any], root: dict[str, Any]) -> Any:
    """The smallest value that a schema allows."""
    schema = resolved(schema, root)
    for variants in ("anyOf", "oneOf"):
        if variants in schema:
            return least(schema[variants][0], root)
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    kind = schema.get("type")
    if kind == "object":
        return {name: least(schema["properties"][name], root) for name in schema.get("required", ())}
    if kind == "array":
        return [least(schema["items"], root)] * schema.get("minItems", 0)
    return {"string": "f", "integer": 1, "number": 1.0, "boolean": True}.get(str(kind))


def fields_of(
    schema: dict[str, Any], root: dict[str, Any], path: str, place: Place
) -> Iterator[tuple[str, Any, Place]]:
    """Every field at any depth: its path, its schema, and the body with a value in its place."""
    schema = resolved(schema, root)
    for variants in ("anyOf", "oneOf"):
        for variant in schema.get(variants, ()):
            yield from fields_of(variant, root, path, place)
    if schema.get("type") == "array":
        yield from fields_of(schema["items"], root, f"{path}.0", lambda value: place([value]))
    beside = least(schema, root) if path and "properties" in schema else {}
    for name, field in schema.get("properties", {}).items():
        inner = f"{path}.{name}" if path else name

        def put(value: Any, name: str = name) -> dict[str, Any]:
            return place({**beside, name: value})

        yield inner, field, put
        yield from fields_of(field, root, inner, put)


def refusal(kind: type[Body], body: dict[str, Any]) -> ApiError | None:
    """The error about a body, of which unknown fields are errors, too."""
    collect_unknown_fields(None)
    try:
        _validated(kind, json.dumps(body).encode())
    except ApiError as error:
        return error
    return None


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_the_field_with_a_wrong_value_is_named(kind: type[Body]) -> None:
    root = kind.model_json_schema()
    refused: set[str] = set()
    fields = list(fields_of(root, root, "", lambda value: {**BODIES[kind], **value}))
    for path, schema, put in fields:
        allows = jsonschema.Draft202012Validator({**schema, "$defs": root.get("$defs", {})}).is_valid
        for value in (v for v in VALUES if not allows(v)):
            error = refusal(kind, put(value))
            assert error is not None, (path, value)
            named = f"{error.param}."
            assert named.startswith(f"{path}."), (path, value, error.param, error.message)
            refused.add(path)
    constrained = {path for path, schema, _ in fields if set(resolved(schema, root)) - {"default", "title"}}
    assert refused == constrained


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_a_missing_field_is_named(kind: type[Body]) -> None:
    root = kind.model_json_schema()
    for path, schema, put in fields_of(root, root, "", lambda value: {**BODIES[kind], **value}):
        inner = resolved(schema, root)
        for name in inner.get("required", ()):
            value = least(inner, root)
            del value[name]
            error = refusal(kind, put(value))
            assert error is not None and error.param == f"{path}.{name}", (path, name, error)


def unions_of(annotation: Any) -> Iterator[tuple[Any, ...]]:
    """Unions without a discriminator in a type."""
    metadata = getattr(annotation, "__metadata__", ())
    if any(getattr(item, "discriminator", None) for item in metadata):
        return
    if str(get_origin(annotation)) in ("typing.Union", "<class 'types.UnionType'>"):
        yield get_args(annotation)
    for argument in get_args(annotation):
        yield from unions_of(argument)


def models_in(kind: type[BaseModel], found: set[type[BaseModel]]) -> set[type[BaseModel]]:
    found.add(kind)

    def visit(annotation: Any) -> None:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel) and annotation not in found:
            models_in(annotation, found)
        for argument in get_args(annotation):
            visit(argument)

    for field in kind.model_fields.values():
        visit(field.annotation)
    return found


def test_no_value_is_tried_as_several_objects() -> None:
    """Each would note the fields of the others as unknown."""
    for kind in BODIES:
        for model in models_in(kind, set()):
            for name, field in model.model_fields.items():
                if isinstance(field, FieldInfo) and field.discriminator is None:
                    for members in unions_of(field.annotation):
                        objects = [m for m in members if isinstance(m, type) and issubclass(m, BaseModel)]
                        assert len(objects) < 2, (model, name, objects)


F = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
BAD = {"type": "function", "function": {"name": "f", "parameters": {"type": "silly"}}}
SCHEMA = {"type": "silly"}
USER = [{"role": "user", "content": "x"}]
C, H, R, M = "completions", "chat/completions", "responses", "messages"
LONG = "x " * 9000


@pytest.mark.slow
@pytest.mark.parametrize(
    "path, body, param",
    [
        (C, {"prompt": "x", "guided_json": SCHEMA}, "guided_json"),
        (C, {"prompt": "x", "json_schema": SCHEMA}, "json_schema"),
        (C, {"prompt": "x", "regex": "("}, "regex"),
        (C, {"prompt": "x", "ebnf": "("}, "ebnf"),
        (C, {"prompt": "x", "grammar": "("}, "grammar"),
        (C, {"prompt": "x", "structured_outputs": {"regex": "("}}, "structured_outputs"),
        (C, {"prompt": "x", "guided_regex": ""}, "guided_regex"),
        (C, {"prompt": "x", "response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format"),
        (C, {"prompt": "x", "guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        (C, {"prompt": "x", "regex": "a", "json_schema": {}}, "regex"),
        (C, {"prompt": "x", "repeat_penalty": 2, "repetition_penalty": 2}, "repeat_penalty"),
        (C, {"prompt": "x", "bad_words": [" "]}, "bad_words"),
        (C, {"prompt": "x", "best_of": 9}, "best_of"),
        (C, {"prompt": "x", "min_tokens": 99}, "min_tokens"),
        (C, {"prompt": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (C, {"prompt": "x", "stop_token_ids": [10**6]}, "stop_token_ids"),
        (C, {"prompt": "x", "allowed_token_ids": [10**6]}, "allowed_token_ids"),
        (C, {"prompt": "x", "prediction": {"type": "content", "content": LONG * 9}}, "prediction"),
        (C, {"prompt": "x", "model": "none"}, "model"),
        (H, {"messages": USER, "response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format"),
        (H, {"messages": USER, "tools": [BAD], "tool_choice": "required"}, "tools"),
        (H, {"messages": USER, "tools": [F], "tool_choice": "auto", "regex": "("}, "regex"),
        (H, {"messages": USER, "tool_choice": "required"}, "tool_choice"),
        (H, {"messages": USER, "max_tokens": 0}, "max_tokens"),
        (H, {"messages": USER, "max_completion_tokens": 0}, "max_completion_tokens"),
        (H, {"messages": USER, "max_completion_tokens": 1, "min_tokens": 2}, "min_tokens"),
        (H, {"messages": USER, "max_completion_tokens": 9000}, "messages"),
        (H, {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        (H, {"messages": USER, "chat_template_kwargs": {"tokenize": 1}}, "chat_template_kwargs"),
        (
            H,
            {"messages": USER, "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
        ),
        (H, {"messages": USER, "speculative_method": "silly"}, "speculative_method"),
        (R, {"input": "x", "text": {"format": {"type": "json_object", "schema": SCHEMA}}}, "text.format"),
        (R, {"input": "x", "text": {"format": {"type": "json_schema", "name": "f", "schema": SCHEMA}}}, "text.format"),
        (R, {"input": "x", "regex": "("}, "regex"),
        (R, {"input": "x", "tools": [{**BAD["function"], "type": "function"}], "tool_choice": "required"}, "tools"),
        (R, {"input": LONG}, "input"),
        (R, {"input": "x", "max_output_tokens": 9000}, "input"),
        (R, {"input": "x", "previous_response_id": "x"}, "previous_response_id"),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value),
)
@pytest.mark.parametrize("padding", ["", " " * 2**17], ids=["small", "large"])
def test_the_field_is_named_where_the_request_is_prepared(server, path, body, param, padding):
    """Here and in the side process. No message speaks of a parameter that was not sent."""
    content = json.dumps({"max_tokens" if path == C else "user": 8 if path == C else "me", **body}) + padding
    error = error_of(server.post(content.encode(), path), 404 if param == "model" else 400)
    assert error["param"] == param, error
    for name in ("structured_outputs", "max_completion_tokens", "response_format"):
        assert name in body or name not in error["message"], error


@pytest.mark.slow
def test_the_field_is_named_where_a_stream_fails(server: Running) -> None:
    """The model has the pieces of no token that the grammar demands, once ``allowed_token_ids`` are counted."""
    body = {"prompt": "x", "max_tokens": 8, "guided_choice": ["yes"], "allowed_token_ids": [1], "stream": True}
    error = error_of(server.post(body), 400)
    assert error["param"] == "guided_choice" and error["message"].startswith("guided_choice")


def test_pydantic_is_not_asked_for_more_than_it_tells() -> None:
    """A wrong body that is no object has no field to blame."""
    for value in ([], 1, "x", None):
        with pytest.raises((ApiError, ValidationError)) as caught:
            _validated(CompletionRequest, json.dumps(value).encode())
        assert getattr(caught.value, "param", None) is None
