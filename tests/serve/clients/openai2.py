"""The clients of Python that need openai 2, against a running server: openai2.py URL. See ``python.py``."""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it looks for a list of prices at every start

import anthropic
import instructor
import litellm
import openai
from pydantic import BaseModel, ConfigDict
from reporting import report

(URL,) = sys.argv[1:]
V1 = f"{URL}/v1"
MODEL = "stdlib"
MESSAGES: Any = [{"role": "user", "content": "def main(args):"}]
LITE: dict[str, Any] = {"api_key": "none", "num_retries": 0, "temperature": 0}
CHAT: dict[str, Any] = {**LITE, "model": f"openai/{MODEL}", "api_base": V1, "messages": MESSAGES}
PARAMETERS: Any = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}


class Switch(BaseModel):
    """An answer in a given schema, without properties of the model's own, which a random one writes without end."""

    model_config = ConfigDict(extra="forbid")

    on: bool


def instructor_schema(mode: str) -> None:
    inner = openai.OpenAI(base_url=V1, api_key="none", max_retries=0)
    client = instructor.from_openai(inner, mode=instructor.Mode[mode])
    asked: Any = {"model": MODEL, "messages": MESSAGES, "response_model": Switch, "max_retries": 0, "temperature": 0}
    if mode != "JSON_SCHEMA":
        asked["parallel_tool_calls"] = False  # of which a random model makes as many as its context holds
    assert isinstance(client.chat.completions.create(**asked), Switch)


def instructor_messages() -> None:
    inner = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
    client = instructor.from_anthropic(inner, mode=instructor.Mode.ANTHROPIC_TOOLS)
    asked: Any = {"model": MODEL, "messages": MESSAGES, "response_model": Switch, "max_retries": 0}
    assert isinstance(client.messages.create(**asked, max_tokens=200), Switch)


def litellm_stream() -> None:
    chunks = list(litellm.completion(**CHAT, max_tokens=8, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def litellm_tools() -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
    messages = [*MESSAGES]
    for _ in range(3):
        asked = {**CHAT, "messages": messages, "parallel_tool_calls": False, "max_tokens": 200}
        got = litellm.completion(**asked, tools=tools, tool_choice="required").choices[0].message
        (call,) = got.tool_calls
        assert set(json.loads(call.function.arguments)) == {"a"}
        messages += [got, {"role": "tool", "tool_call_id": call.id, "content": "1"}]


def litellm_schema() -> None:
    got = litellm.completion(**CHAT, max_tokens=200, response_format=Switch).choices[0].message.content
    assert isinstance(Switch.model_validate_json(got), Switch)


def litellm_responses() -> None:
    got = litellm.responses(**LITE, model=f"openai/{MODEL}", api_base=V1, input="def f", max_output_tokens=8)
    assert got.output[0].content[0].text


def litellm_messages() -> None:
    got = litellm.completion(**LITE, model=f"anthropic/{MODEL}", api_base=URL, messages=MESSAGES, max_tokens=8)
    assert got.choices[0].message.content


def litellm_text() -> None:
    assert litellm.completion(**CHAT, max_tokens=8).choices[0].message.content


def litellm_completions() -> None:
    asked: Any = {**LITE, "model": f"text-completion-openai/{MODEL}", "api_base": V1, "max_tokens": 8}
    assert litellm.text_completion(**asked, prompt="x").choices[0].text


CHECKS: dict[str, Callable[[], Any]] = {
    "instructor | chat completions | schema": lambda: [instructor_schema(m) for m in ("TOOLS", "JSON_SCHEMA")],
    "instructor | responses | schema": partial(instructor_schema, "RESPONSES_TOOLS"),
    "instructor | messages | schema": instructor_messages,
    "litellm | completions | text": litellm_completions,
    "litellm | chat completions | text": litellm_text,
    "litellm | chat completions | stream": litellm_stream,
    "litellm | chat completions | tools": litellm_tools,
    "litellm | chat completions | schema": litellm_schema,
    "litellm | responses | text": litellm_responses,
    "litellm | messages | text": litellm_messages,
}

if __name__ == "__main__":
    report(CHECKS)
