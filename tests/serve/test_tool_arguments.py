"""Arguments of calls: written as each family writes them and read back, and demanded of a running server."""

import asyncio
import json
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import httpx
import jsonschema
import pytest
from tests.serve.conftest import PATIENCE, Running, chunks_of
from tests.serve.test_parsers import parsed

CALLS = 500
SERVED = 60  # 500 take three minutes; all of them were valid
NAME = "book_table"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "note": {"type": ["string", "null"]},
        "guests": {"type": "integer"},
        "budget": {"type": "number"},
        "inside": {"type": "boolean"},
        "hours": {"type": "array", "items": {"type": "integer"}},
        "address": {"type": "object"},
    },
}
TEXT = "aé日🙂 \n\t\"'\\{}[]()<>,:=/0"


def words(rng: random.Random) -> str:
    return "".join(rng.choices(TEXT, k=rng.randrange(12)))


def arguments(rng: random.Random) -> dict[str, Any]:
    whole = {
        "name": words(rng),
        "note": rng.choice([None, "x" + words(rng)]),
        "guests": rng.randrange(-9, 99),
        "budget": rng.choice([0.5, -2.25, 1e3, 7.0]),
        "inside": rng.random() < 0.5,
        "hours": [rng.randrange(24) for _ in range(rng.randrange(3))],
        "address": {"street": words(rng), "numbers": [1, {"of": "x" + words(rng)}], "flat": None},
    }
    return {key: value for key, value in whole.items() if rng.random() < 0.6}


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def gemma(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else dumps(value)


def parameters(call: dict[str, Any], form: str) -> str:
    return "".join(form.format(key=key, value=as_text(value)) for key, value in call.items())


def qwen(call: dict[str, Any]) -> str:
    inner = parameters(call, "<parameter={key}>\n{value}\n</parameter>\n")
    return f"<function={NAME}>\n{inner}</function>"


def dsml(call: dict[str, Any]) -> str:
    def parameter(key: str, value: Any) -> str:
        head = f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
        return f"{head}{as_text(value)}</｜DSML｜parameter>\n"

    inner = "".join(parameter(key, value) for key, value in call.items())
    body = f'<｜DSML｜invoke name="{NAME}">\n{inner}</｜DSML｜invoke>'
    return f"<｜DSML｜function_calls>\n{body}\n</｜DSML｜function_calls>"


def minimax(call: dict[str, Any]) -> str:
    inner = parameters(call, '<parameter name="{key}">{value}</parameter>\n')
    return f'<minimax:tool_call>\n<invoke name="{NAME}">\n{inner}</invoke>\n</minimax:tool_call>'


def listed(call: dict[str, Any], key: str = "arguments") -> str:
    return dumps({"name": NAME, key: call})


WRITERS: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
    ("hermes", lambda call: f"<tool_call>\n{listed(call)}\n</tool_call>"),
    ("llama3_json", lambda call: listed(call, "parameters")),
    ("llama3_json", lambda call: f"<|python_tag|>{listed(call, 'parameters')}"),
    ("pythonic", lambda call: f"[{NAME}({', '.join(f'{key}={value!r}' for key, value in call.items())})]"),
    ("qwen3_coder", lambda call: f"<tool_call>\n{qwen(call)}\n</tool_call>"),
    ("seed_oss", lambda call: f"<seed:tool_call>\n{qwen(call)}\n</seed:tool_call>"),
    (
        "glm45",
        lambda call: (
            f"<tool_call>{NAME}\n"
            + parameters(call, "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n")
            + "</tool_call>"
        ),
    ),
    (
        "deepseek_v3",
        lambda call: (
            f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n```json\n{dumps(call)}\n```"
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
    ),
    (
        "deepseek_v3",
        lambda call: (
            f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>{dumps(call)}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
    ),
    ("deepseek_v32", dsml),
    ("minimax_m2", minimax),
    (
        "kimi_k2",
        lambda call: (
            f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{NAME}:0<|tool_call_argument_begin|>{dumps(call)}"
            "<|tool_call_end|><|tool_calls_section_end|>"
        ),
    ),
    ("mistral", lambda call: f"[TOOL_CALLS] [{listed(call)}]"),
    ("mistral", lambda call: f"[TOOL_CALLS]{NAME}[ARGS]{dumps(call)}"),
    ("granite", lambda call: f"<|tool_call|>[{listed(call)}]"),
    ("phi4_mini", lambda call: f"functools[{listed(call)}]"),
    ("gemma4", lambda call: f"<|tool_call>call:{NAME}{gemma(call)}<tool_call|>"),
    (
        "harmony",
        lambda call: f"<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>{dumps(call)}<|call|>",
    ),
]


@pytest.mark.parametrize("name, write", WRITERS)
def test_arguments_of_five_hundred_calls_in_the_form_of_each_family(name, write):
    rng = random.Random(name)
    for _ in range(CALLS):
        call = arguments(rng)
        text = write(call)
        cuts = [0, *sorted(rng.choices(range(len(text) + 1), k=rng.randrange(8))), len(text)]
        parts = [text[start:end] for start, end in pairwise(cuts)]
        _, content, calls = parsed(name, parts, schemas={NAME: PARAMETERS})
        assert content == "" and [function for function, _ in calls] == [NAME], text
        assert json.loads(calls[0][1]) == call, text


DEMANDED: tuple[dict[str, Any], ...] = (
    {
        "type": "object",
        "properties": {"city": {"enum": ["Tōkyō", "Köln"]}, "days": {"type": "integer", "minimum": 1, "maximum": 14}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {
            "items": {"type": "array", "minItems": 1, "maxItems": 3, "items": {"$ref": "#/$defs/item"}},
            "paid": {"type": "boolean"},
        },
        "required": ["items"],
        "additionalProperties": False,
        "$defs": {
            "item": {
                "type": "object",
                "properties": {"id": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{2}$"}, "count": {"enum": [1, 2]}},
                "required": ["id", "count"],
                "additionalProperties": False,
            }
        },
    },
    {
        "type": "object",
        "properties": {
            "query": {"type": "string", "maxLength": 12},
            "limit": {"anyOf": [{"const": 5}, {"type": "null"}]},
        },
        "required": ["query", "limit"],
        "additionalProperties": False,
    },
    {"type": "object", "properties": {}, "additionalProperties": False},
)
FUNCTIONS = {f"tool_{number}": schema for number, schema in enumerate(DEMANDED)}


@pytest.mark.slow
def test_arguments_of_served_calls_are_valid(server: Running) -> None:
    """Sampled from a model that knows no tools, streamed, with one function named or any of them."""
    tools = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in FUNCTIONS.items()]

    async def call(client: httpx.AsyncClient, places: asyncio.Semaphore, seed: int) -> tuple[str, str]:
        named: Any = {"type": "function", "function": {"name": f"tool_{seed % len(DEMANDED)}"}}
        body = {
            "messages": [{"role": "user", "content": f"def tool_{seed}("}],
            "tools": tools,
            "tool_choice": named if seed % 2 else "required",
            "parallel_tool_calls": False,
            "temperature": 1,
            "seed": seed,
            "max_completion_tokens": 400,
            "stream": True,
        }
        async with places:
            answer = await client.post(f"{server.url}/v1/chat/completions", json=body)
        deltas = [choice["delta"] for chunk in chunks_of(answer.text.splitlines()) for choice in chunk["choices"]]
        functions = [each["function"] for delta in deltas for each in delta.get("tool_calls") or ()]
        assert functions, answer.text
        return functions[0]["name"], "".join(function.get("arguments") or "" for function in functions)

    async def all_of_them() -> list[tuple[str, str]]:
        places = asyncio.Semaphore(16)
        async with httpx.AsyncClient(timeout=4 * PATIENCE) as client:
            return await asyncio.gather(*(call(client, places, seed) for seed in range(SERVED)))

    results = asyncio.run(all_of_them())
    for name, text in results:
        jsonschema.validate(json.loads(text), FUNCTIONS[name])
    assert len(results) == SERVED and len({text for _, text in results}) > SERVED // 8
