"""Fields of other servers and of OpenAI's clients: applied under each of their names, refused by name, or harmless."""

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.serve.conftest import Running
from tests.serve.test_errors import error_of
from tests.serve.test_parameters import word_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from foretoken import LLM, SamplingParams
from foretoken.engine.prompts import PromptTokenizer
from foretoken.serve.chat_schema import ChatRequest
from foretoken.serve.messages_schema import MessagesRequest
from foretoken.serve.preparation import RequestPreparer
from foretoken.serve.responses_schema import ResponsesRequest
from foretoken.serve.schema import CHAT, COMPLETIONS, MESSAGES, RESPONSES, SAMPLING, CompletionRequest
from foretoken.serve.settings import ServerSettings

slow = pytest.mark.slow

USER = [{"role": "user", "content": "def f(x):"}]
BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "def f(x):\n", "max_tokens": 12},
    "chat/completions": {"messages": USER, "max_tokens": 12},
    "responses": {"input": "def f(x):", "max_output_tokens": 12},
    "messages": {"messages": USER, "max_tokens": 12},
}
EACH = pytest.mark.parametrize("path", BODIES)
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
GRAMMAR = 'root ::= "ab" ("c" | "d") "e"'


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    assert "x-unknown-fields" not in answer.headers
    got = answer.json()
    if "choices" in got:
        choice = got["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])
    parts = got["output"][0]["content"] if "output" in got else got["content"]
    return str(parts[0]["text"])


@slow
@EACH
@pytest.mark.parametrize(
    "field, value, ours",
    [
        ("regex", "[a-c]{4}", {"guided_regex": "[a-c]{4}"}),
        ("ebnf", GRAMMAR, {"guided_grammar": GRAMMAR}),
        ("grammar", GRAMMAR, {"guided_grammar": GRAMMAR}),
        ("grammar", "", {}),
        ("json_schema", SCHEMA, {"guided_json": SCHEMA}),
        ("json_schema", '{"enum": [12, 13]}', {"guided_json": {"enum": [12, 13]}}),
        ("repeat_penalty", 0.02, {"repetition_penalty": 0.02}),
    ],
)
def test_a_field_of_another_server_does_the_same(server, path, field, value, ours):
    body = {**BODIES[path], "temperature": 1, "seed": 5}
    assert text_of(server.post({**body, field: value}, path)) == text_of(server.post({**body, **ours}, path))
    if ours:
        assert text_of(server.post(body, path)) != text_of(server.post({**body, field: value}, path))


@slow
@EACH
def test_penalties_of_the_last_tokens_are_refused(server: Running, path: str) -> None:
    for penalty in ({"repeat_penalty": 1.1}, {"presence_penalty": 1}, {"frequency_penalty": 0.1}):
        error = server.post({**BODIES[path], **penalty, "repeat_last_n": 64}, path).json()["error"]
        assert error["message"].startswith("repeat_last_n is not served beside a penalty")
        text_of(server.post({**BODIES[path], **penalty, "repeat_last_n": -1}, path))
    text_of(server.post({**BODIES[path], "repeat_penalty": 1, "repeat_last_n": 64}, path))


@slow
def test_stop_strings_are_kept_under_either_name(server: Running) -> None:
    body = {**BODIES["completions"], "temperature": 0}
    stop = text_of(server.post(body))[8:12]
    body["stop"] = [stop]
    texts = [text_of(server.post({**body, **more})) for more in ({}, {"no_stop_trim": True})]
    assert texts[1] == texts[0] + stop
    assert text_of(server.post({**body, "include_stop_str_in_output": True})) == texts[1]


@slow
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object", "schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    ],
)
def test_response_formats_with_a_schema(server: Running, path: str, form: dict[str, Any]) -> None:
    text = text_of(server.post({**BODIES[path], "max_tokens": 40, "response_format": form}, path))
    assert re.fullmatch(r'\{"a": [12]\}', text)


@slow
def test_a_schema_of_json_object_in_responses(server: Running) -> None:
    form = {"format": {"type": "json_object", "schema": SCHEMA}}
    text = text_of(server.post({**BODIES["responses"], "max_output_tokens": 40, "text": form}, "responses"))
    assert re.fullmatch(r'\{"a": [12]\}', text)


def test_special_tokens_are_added_as_asked() -> None:
    words = {word: number for number, word in enumerate(["?", "<s>", "a", "b"])}
    core = word_tokenizer(words)
    core.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?", bos_token="<s>")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    settings = ServerSettings(chat_template=template)
    preparer = RequestPreparer(tokenizer=PromptTokenizer(tokenizer, 4), settings=settings, max_model_len=64, capacity=4)
    chat: Any = [{"role": "user", "content": "a b"}]
    for special, bos in ((None, True), (True, True), (False, False)):
        (prompt,) = preparer.prepare(CompletionRequest(prompt="a b", add_special_tokens=special)).prompts
        assert prompt.ids == [1] * bos + [2, 3]
    for special, bos in ((None, False), (True, True), (False, False)):
        bodies: tuple[Any, ...] = (
            ChatRequest(messages=chat, add_special_tokens=special),
            ResponsesRequest(input="a b", add_special_tokens=special),
            MessagesRequest(messages=chat, max_tokens=2, add_special_tokens=special),
        )
        for body in bodies:
            assert preparer.prepare(body).prompts[0].ids == [1] * bos + [2, 3]


REFUSED = {"completions": COMPLETIONS, "chat/completions": CHAT, "responses": RESPONSES, "messages": MESSAGES}


@slow
@EACH
def test_fields_without_an_equivalent_are_refused_by_name(server: Running, path: str) -> None:
    for name, refusal in REFUSED[path].items():
        for value in (True, 2, 0.5, "x", {"a": 1}, ["x"]):
            if not refusal.accepts(value):
                error = server.post({**BODIES[path], name: value}, path).json()["error"]
                assert error["message"] == f"{name} is not served: {refusal.reason}"
                assert error.get("param", name) == name  # Anthropic's errors have no param
        for value in (None, *refusal.off):
            answer = server.post({**BODIES[path], name: value, "max_tokens": 1} | _short(path), path)
            assert answer.status_code == 200 and "x-unknown-fields" not in answer.headers, (name, answer.text)


def _short(path: str) -> dict[str, Any]:
    return {"max_output_tokens": 1, "max_tokens": None} if path == "responses" else {}


def test_the_documentation_lists_them() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/http.md").read_text()
    section = page[page.index("## Fields of other servers") : page.index("## Unknown fields")]
    names = {*SAMPLING, *COMPLETIONS, *CHAT, *RESPONSES, *MESSAGES}
    names |= {
        "add_special_tokens",
        "ebnf",
        "grammar",
        "json_schema",
        "no_stop_trim",
        "regex",
        "repeat_last_n",
        "repeat_penalty",
    }
    assert not {name for name in names if f"`{name}`" not in section}


@slow
@pytest.mark.parametrize(
    "path, extra",
    [
        ("chat/completions", {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
        (
            "chat/completions",
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
                }
            },
        ),
        ("responses", {"tool_choice": {"type": "function", "name": "f"}}),
        (
            "responses",
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}},
        ),
        ("messages", {"tool_choice": {"type": "tool", "name": "f"}}),
    ],
)
def test_fields_that_are_applied_are_not_called_unknown(server: Running, path: str, extra: dict[str, Any]) -> None:
    parameters = {"type": "object", "properties": {}}
    tools: dict[str, Any] = {
        "chat/completions": {"type": "function", "function": {"name": "f", "parameters": parameters}},
        "responses": {"type": "function", "name": "f", "parameters": parameters},
        "messages": {"name": "f", "input_schema": parameters},
    }
    answer = server.post({**BODIES[path], "tools": [tools[path]], **extra}, path)
    assert answer.status_code == 200 and "x-unknown-fields" not in answer.headers, answer.text
    named = server.post({**BODIES[path], "tools": [tools[path]], **extra, "odd": 1}, path)
    assert named.headers["x-unknown-fields"] == "odd"


# of OpenAI's clients


@slow
@pytest.mark.parametrize("extra", [{"stop": ""}, {"stop": [""]}, {"stop": []}, {"suffix": ""}])
def test_empty_strings_change_nothing(server: Running, extra: dict[str, Any]) -> None:
    body = {**BODIES["completions"], "temperature": 0}
    assert text_of(server.post({**body, **extra})) == text_of(server.post(body))


@slow
@EACH
def test_a_top_p_of_0_is_greedy(server: Running, path: str) -> None:
    greedy = text_of(server.post({**BODIES[path], "temperature": 0}, path))
    assert text_of(server.post({**BODIES[path], "temperature": 1, "top_p": 0}, path)) == greedy


@slow
def test_verbosity_reaches_the_template(server: Running, llm: LLM) -> None:
    for value in ("low", "medium", "high"):
        text_of(server.post({**BODIES["chat/completions"], "verbosity": value}, "chat/completions"))
        got = server.post({**BODIES["responses"], "text": {"verbosity": value}}, "responses").json()
        assert got["text"]["verbosity"] == value
    error = error_of(server.post({**BODIES["chat/completions"], "verbosity": "silly"}, "chat/completions"), 400)
    assert error["param"] == "verbosity"
    settings = ServerSettings(chat_template="{{ verbosity }}")
    preparer = RequestPreparer(tokenizer=llm.requests.prompt_tokenizer, settings=settings, max_model_len=64, capacity=4)
    for body in (
        ChatRequest.model_validate({"messages": USER, "verbosity": "high"}),
        ResponsesRequest.model_validate({"input": "x", "text": {"verbosity": "high"}}),
    ):
        assert llm.tokenizer.decode(preparer.prepare(body).prompts[0].ids) == "high"


@slow
@pytest.mark.parametrize("effort, served", [("none", True), ("minimal", True), ("xhigh", True), ("silly", False)])
def test_efforts_are_those_that_exist(server: Running, effort: str, served: bool) -> None:
    for path, extra, param in (
        ("chat/completions", {"reasoning_effort": effort}, "reasoning_effort"),
        ("responses", {"reasoning": {"effort": effort}}, "reasoning.effort"),
        ("messages", {"output_config": {"effort": effort}}, "output_config.effort"),
    ):
        answer = server.post({**BODIES[path], **extra}, path)
        assert answer.status_code == (200 if served else 400)
        assert served or param in answer.json()["error"]["message"]


@slow
@EACH
def test_the_method_none_is_plain_decoding(server: Running, path: str) -> None:
    """The text is the same, and nothing is drafted."""
    body = {**BODIES[path], "temperature": 1, "seed": 3}
    answers = [server.post({**body, **extra}, path) for extra in ({}, {"speculative_method": "none"})]
    assert text_of(answers[0]) == text_of(answers[1])
    drafted = [answer.json()["metrics"]["speculative_decoding"]["num_draft_tokens"] for answer in answers]
    assert drafted[0] > 0 == drafted[1]


@slow
def test_the_method_none_of_the_library_is_plain_decoding(spare: LLM) -> None:
    params = [SamplingParams(max_tokens=12, seed=3, speculative_method=method) for method in (None, "none")]
    outputs = [spare.generate("def f(x):\n", p)[0] for p in params]
    assert outputs[0].outputs[0].text == outputs[1].outputs[0].text
    assert outputs[0].stats.drafted > 0 == outputs[1].stats.drafted
