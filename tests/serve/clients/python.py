"""The clients of Python against a running server: python.py URL. Prints one line of JSON for each check.

The name of a check is "client | API | what"; the table of clients in docs/guides/serving.md lists the same.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import openai
from agents import Agent as OpenAIAgent
from agents import ModelSettings as AgentSettings
from agents import (
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    ToolsToFinalOutputResult,
    function_tool,
)
from click.testing import CliRunner
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from llm.cli import cli as llm
from pydantic import BaseModel
from pydantic_ai import Agent, RunContext, ToolDefinition
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.models.openai import OpenAIResponsesModel as PydanticResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from reporting import report

(URL,) = sys.argv[1:]
V1 = f"{URL}/v1"
MODEL = "stdlib"
MESSAGES: Any = [{"role": "user", "content": "def main(args):"}]
PARAMETERS: Any = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
STEPS = 3
ENDED: Any = {"guided_regex": "[ab]{20}"}  # a text that ends by itself, for readers that accept no other


class Switch(BaseModel):
    """An answer in a given schema."""

    on: bool


client = openai.OpenAI(base_url=V1, api_key="none", max_retries=0)
claude = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)


# openai


def openai_chat_tools() -> None:
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
    messages = [*MESSAGES]
    for _ in range(STEPS):
        got = client.chat.completions.create(
            model=MODEL, messages=messages, tools=tools, tool_choice="required", parallel_tool_calls=False
        ).choices[0]
        (call,) = got.message.tool_calls
        assert set(json.loads(call.function.arguments)) == {"a"}
        messages += [got.message, {"role": "tool", "tool_call_id": call.id, "content": call.function.arguments}]


def openai_chat_stream() -> None:
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, extra_body=ENDED) as stream:
        assert stream.get_final_completion().choices[0].message.content


def openai_chat_schema() -> None:
    got = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Switch)
    assert isinstance(got.choices[0].message.parsed, Switch)


def openai_responses_stream() -> None:
    with client.responses.stream(model=MODEL, input="def f", extra_body=ENDED) as stream:
        assert stream.get_final_response().output_text


def openai_responses_tools() -> None:
    tools: Any = [{"type": "function", "name": "add", "strict": True, "parameters": PARAMETERS}]
    items = [*MESSAGES]
    for _ in range(STEPS):
        got = client.responses.create(
            model=MODEL, input=items, tools=tools, tool_choice="required", parallel_tool_calls=False
        )
        (call,) = got.output
        assert set(json.loads(call.arguments)) == {"a"}
        items += [call, {"type": "function_call_output", "call_id": call.call_id, "output": call.arguments}]


def openai_responses_schema() -> None:
    assert isinstance(client.responses.parse(model=MODEL, input="x", text_format=Switch).output_parsed, Switch)


# anthropic


def anthropic_stream() -> None:
    with claude.messages.stream(**CLAUDE_SHORT, messages=MESSAGES) as stream:
        assert stream.get_final_message().content[0].text


def anthropic_tools() -> None:
    messages = [*MESSAGES]
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    for _ in range(STEPS):
        got = claude.messages.create(
            model=MODEL,
            messages=messages,
            tools=[{"name": "add", "input_schema": PARAMETERS}],
            tool_choice=choice,
            max_tokens=400,
        )
        (call,) = got.content
        assert got.stop_reason == "tool_use" and set(call.input) == {"a"}
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "1"}]
        messages += [{"role": "assistant", "content": got.content}, {"role": "user", "content": results}]


def anthropic_schema() -> None:
    form: Any = {"format": {"type": "json_schema", "schema": PARAMETERS}}
    got = claude.messages.create(model=MODEL, messages=MESSAGES, max_tokens=200, output_config=form)
    assert set(json.loads(got.content[0].text)) == {"a"}


# LangChain


@tool
def switch(on: bool) -> str:
    """Turns it on or off."""
    return f"it is {on}"


LANGCHAIN: dict[str, Callable[[], Any]] = {
    "chat": lambda: ChatOpenAI(model=MODEL, base_url=V1, api_key="none", max_retries=0, max_tokens=200, temperature=0),
    "responses": lambda: ChatOpenAI(
        model=MODEL, base_url=V1, api_key="none", max_retries=0, max_tokens=200, temperature=0, use_responses_api=True
    ),
    "messages": lambda: ChatAnthropic(
        model=MODEL,
        base_url=URL,
        api_key="none",
        max_retries=0,
        max_tokens=200,
        model_kwargs={"extra_body": {"temperature": 0}},
    ),
}


def langchain_text(api: str) -> None:
    assert LANGCHAIN[api]().invoke("def f", max_tokens=8).text


def langchain_stream(api: str) -> None:
    assert "".join(chunk.text for chunk in LANGCHAIN[api]().stream("def f", max_tokens=8))


def langchain_tools(api: str) -> None:
    model = LANGCHAIN[api]().bind_tools([switch], tool_choice="any", parallel_tool_calls=False, strict=True)
    messages: list[Any] = [HumanMessage("x")]
    for _ in range(STEPS):
        got = model.invoke(messages)
        assert got.tool_calls
        messages.append(got)
        for call in got.tool_calls:
            result = switch.invoke(call)
            assert isinstance(result, ToolMessage)
            messages.append(result)


def langchain_schema(api: str) -> None:
    method = "json_schema"
    assert isinstance(LANGCHAIN[api]().with_structured_output(Switch, method=method).invoke("x"), Switch)


# Pydantic AI

OPENAI_PROVIDER = OpenAIProvider(base_url=V1, api_key="none")
PYDANTIC: dict[str, Callable[[], Any]] = {
    "chat": lambda: OpenAIChatModel(MODEL, provider=OPENAI_PROVIDER),
    "responses": lambda: PydanticResponsesModel(MODEL, provider=OPENAI_PROVIDER),
    "messages": lambda: AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key="none")),
}


def pydantic_text(api: str) -> None:
    assert Agent(PYDANTIC[api](), model_settings={"max_tokens": 8, "temperature": 0}).run_sync("def f").output


def pydantic_stream(api: str) -> None:
    agent = Agent(PYDANTIC[api](), model_settings={"max_tokens": 8, "temperature": 0})
    assert "".join(agent.run_stream_sync("def f").stream_text(delta=True))


def pydantic_tools(api: str) -> None:
    """Until it was called often enough, the tool is all there is; then the result is."""
    called: list[bool] = []

    async def few(context: RunContext[None], definition: ToolDefinition) -> ToolDefinition | None:
        return definition if len(called) < STEPS - 1 else None

    agent = Agent(PYDANTIC[api](), output_type=Switch, model_settings={"max_tokens": 400, "parallel_tool_calls": False})

    @agent.tool_plain(prepare=few)
    def add(on: bool) -> str:
        called.append(on)
        return "added"

    assert isinstance(agent.run_sync("x").output, Switch)


def pydantic_schema(api: str) -> None:
    agent = Agent(PYDANTIC[api](), output_type=Switch, model_settings={"max_tokens": 200})
    assert isinstance(agent.run_sync("x").output, Switch)


# OpenAI's agents


def agents_model(api: str) -> Any:
    model = OpenAIResponsesModel if api == "responses" else OpenAIChatCompletionsModel
    return model(model=MODEL, openai_client=openai.AsyncOpenAI(base_url=V1, api_key="none", max_retries=0))


def agents_text(api: str) -> None:
    agent = OpenAIAgent(name="a", model=agents_model(api), model_settings=AgentSettings(extra_body=ENDED))
    assert Runner.run_sync(agent, "def f", run_config=RunConfig(tracing_disabled=True)).final_output


def agents_tools(api: str) -> None:
    called: list[bool] = []

    @function_tool
    def add(on: bool) -> str:
        """Adds."""
        called.append(on)
        return "added"

    agent = OpenAIAgent(
        name="a",
        model=agents_model(api),
        model_settings=AgentSettings(tool_choice="required", max_tokens=400, parallel_tool_calls=False),
        tools=[add],
        reset_tool_choice=False,
        tool_use_behavior=lambda context, results: ToolsToFinalOutputResult(len(called) >= STEPS, "done"),
    )
    result = Runner.run_sync(agent, "x", run_config=RunConfig(tracing_disabled=True))
    assert result.final_output == "done" and len(called) == STEPS


# llm


def llm_text(*options: str) -> None:
    words = ["-m", "served", "-o", "max_tokens", "8", "-o", "temperature", "0", *options, "def f"]
    with tempfile.TemporaryDirectory() as folder:
        entry = f"- model_id: served\n  model_name: {MODEL}\n  api_base: {V1}\n"
        (Path(folder) / "extra-openai-models.yaml").write_text(entry, encoding="utf-8")
        ran = CliRunner(env={"LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}).invoke(llm, words)
    assert ran.exit_code == 0 and ran.output.strip(), ran.output


def has_text(text: str | None) -> None:
    assert text


SHORT: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 0}
CLAUDE_SHORT: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "extra_body": {"temperature": 0}}
CHECKS: dict[str, Callable[[], Any]] = {
    "openai | completions | text": lambda: has_text(client.completions.create(**SHORT, prompt="x").choices[0].text),
    "openai | completions | stream": lambda: has_text(
        "".join(chunk.choices[0].text for chunk in client.completions.create(**SHORT, prompt="x", stream=True))
    ),
    "openai | chat completions | text": lambda: has_text(
        client.chat.completions.create(**SHORT, messages=MESSAGES).choices[0].message.content
    ),
    "openai | chat completions | stream": openai_chat_stream,
    "openai | chat completions | tools": openai_chat_tools,
    "openai | chat completions | schema": openai_chat_schema,
    "openai | responses | text": lambda: has_text(
        client.responses.create(model=MODEL, input="def f", max_output_tokens=8, temperature=0).output_text
    ),
    "openai | responses | stream": openai_responses_stream,
    "openai | responses | tools": openai_responses_tools,
    "openai | responses | schema": openai_responses_schema,
    "anthropic | messages | text": lambda: has_text(
        claude.messages.create(**CLAUDE_SHORT, messages=MESSAGES).content[0].text
    ),
    "anthropic | messages | stream": anthropic_stream,
    "anthropic | messages | tools": anthropic_tools,
    "anthropic | messages | schema": anthropic_schema,
    "anthropic | messages | count_tokens": lambda: has_text(
        str(claude.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens or "")
    ),
    "langchain | chat completions | text": partial(langchain_text, "chat"),
    "langchain | chat completions | stream": partial(langchain_stream, "chat"),
    "langchain | chat completions | tools": partial(langchain_tools, "chat"),
    "langchain | chat completions | schema": partial(langchain_schema, "chat"),
    "langchain | responses | text": partial(langchain_text, "responses"),
    "langchain | responses | stream": partial(langchain_stream, "responses"),
    "langchain | responses | tools": partial(langchain_tools, "responses"),
    "langchain | responses | schema": partial(langchain_schema, "responses"),
    "langchain | messages | text": partial(langchain_text, "messages"),
    "langchain | messages | stream": partial(langchain_stream, "messages"),
    "langchain | messages | tools": partial(langchain_tools, "messages"),
    "langchain | messages | schema": partial(langchain_schema, "messages"),
    "pydantic-ai | chat completions | text": partial(pydantic_text, "chat"),
    "pydantic-ai | chat completions | stream": partial(pydantic_stream, "chat"),
    "pydantic-ai | chat completions | tools": partial(pydantic_tools, "chat"),
    "pydantic-ai | chat completions | schema": partial(pydantic_schema, "chat"),
    "pydantic-ai | responses | text": partial(pydantic_text, "responses"),
    "pydantic-ai | responses | stream": partial(pydantic_stream, "responses"),
    "pydantic-ai | responses | tools": partial(pydantic_tools, "responses"),
    "pydantic-ai | responses | schema": partial(pydantic_schema, "responses"),
    "pydantic-ai | messages | text": partial(pydantic_text, "messages"),
    "pydantic-ai | messages | stream": partial(pydantic_stream, "messages"),
    "pydantic-ai | messages | tools": partial(pydantic_tools, "messages"),
    "pydantic-ai | messages | schema": partial(pydantic_schema, "messages"),
    "openai-agents | chat completions | text": partial(agents_text, "chat"),
    "openai-agents | chat completions | tools": partial(agents_tools, "chat"),
    "openai-agents | responses | text": partial(agents_text, "responses"),
    "openai-agents | responses | tools": partial(agents_tools, "responses"),
    "llm | chat completions | text": partial(llm_text, "--no-stream"),
    "llm | chat completions | stream": llm_text,
}

if __name__ == "__main__":
    report(CHECKS)
