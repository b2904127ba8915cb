"""Reasoning and function calls in the text of each family, however the text is cut."""
# ruff: noqa: E501  (transcripts stay on the lines on which models write them)

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from foretoken.core.errors import InvalidRequest
from foretoken.serve.parsers import OutputEvent, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStarted
from foretoken.serve.parsers.formats import CALL_FORMATS, ExpectedOutput, OutputFormat, check_parsers, chosen_format
from foretoken.serve.parsers.values import typed

pytestmark = pytest.mark.slow

SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "units": {"type": ["string", "null"]},
            "extra": {"type": "object"},
        },
    },
    "now": {"type": "object", "properties": {}},
}
TOKYO = ("get_weather", {"city": "Tōkyō", "days": 3})
NOW: tuple[str, dict[str, Any]] = ("now", {})

# The name of the format, the text, its reasoning, its content and its calls. The texts are written as the chat
# templates and documentation of the families show them.
TRANSCRIPTS: list[tuple[str, str, str, str, list[tuple[str, dict[str, Any]]]]] = [
    (
        "hermes",
        '<think>\nWeather.\n</think>\n\nLet me see.\n<tool_call>\n{"name": "get_weather", "arguments": '
        '{"city": "Tōkyō", "days": 3}}\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "Weather.",
        "Let me see.\n",
        [TOKYO, NOW],
    ),
    ("llama3_json", '<|python_tag|>{"name": "now", "parameters": {}}', "", "", [NOW]),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Tōkyō", "days": 3}}', "", "", [TOKYO]),
    ("llama3_json", '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}', "", "", [NOW, NOW]),
    ("llama3_json", '{"temperature": 3}', "", '{"temperature": 3}', []),
    (
        "pythonic",
        '<|python_start|>[get_weather(city="Tōkyō", days=3), now()]<|python_end|>',
        "",
        "",
        [TOKYO, NOW],
    ),
    ("pythonic", "[get_weather(city='it\\'s ]', days=-1, extra={'a': [1, true, None]})]", "", "",
     [("get_weather", {"city": "it's ]", "days": -1, "extra": {"a": [1, True, None]}})]),
    ("pythonic", "[1, 2] are numbers", "", "[1, 2] are numbers", []),
    ("pythonic", "[link](http://x)", "", "[link](http://x)", []),
    (
        "qwen3_coder",
        "<think>\nHm.\n</think>\n\nSure.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nTōkyō\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "Hm.",
        "Sure.\n\n",
        [TOKYO, NOW],
    ),
    (
        "qwen3_coder",  # reasoning that a call ends, and values of several lines
        "<think>\nHm.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\na\n\n b <c>\n</parameter>\n<parameter=exact>\nTrue\n"
        "</parameter>\n<parameter=units>\nNone\n</parameter>\n<parameter=extra>\n{\"a\": 1}\n</parameter>\n</function>\n</tool_call>",
        "Hm.",
        "",
        [("get_weather", {"city": "a\n\n b <c>", "exact": True, "units": None, "extra": {"a": 1}})],
    ),
    (
        "seed_oss",
        "<seed:think>\nHm.\n</seed:think>\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
        "Hm.",
        "",
        [NOW],
    ),
    (
        "glm45",
        "<think>Hm.</think>\nNow:\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Tōkyō</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        "Hm.",
        "Now:\n",
        [TOKYO, NOW],
    ),
    ("glm45", "<tool_call>get_weather<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>", "", "",
     [("get_weather", {"days": 3})]),
    (
        "deepseek_v3",
        "One moment.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Tōkyō", "days": 3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n'
        "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        "One moment.",
        [TOKYO, NOW],
    ),
    (
        "deepseek_v3",  # 3.1
        "<think>Hm.</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Tōkyō", "days": 3}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "Hm.",
        "",
        [TOKYO, NOW],
    ),
    (
        "deepseek_v32",
        'So:\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Tōkyō'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "",
        "So:\n\n",
        [TOKYO, NOW],
    ),
    (
        "minimax_m2",
        '<think>Hm.</think>\n\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Tōkyō</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        "Hm.",
        "",
        [TOKYO, NOW],
    ),
    (
        "kimi_k2",
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Tōkyō", "days": 3}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        "",
        "I look.",
        [TOKYO, NOW],
    ),
    (
        "mistral",  # before version 11 of the tokenizer
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Tōkyō", "days": 3}}, {"name": "now", "arguments": {}}]',
        "",
        "",
        [TOKYO, NOW],
    ),
    (
        "mistral",
        '[THINK]Hm.[/THINK]I look.[TOOL_CALLS]get_weather[ARGS]{"city": "Tōkyō", "days": 3}[TOOL_CALLS]now[CALL_ID]a1b2[ARGS]{}',
        "Hm.",
        "I look.",
        [TOKYO, NOW],
    ),
    ("mistral", '[TOOL_CALLS]now{}', "", "", [NOW]),
    (
        "granite",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Tōkyō", "days": 3}}, {"name": "now", "arguments": {}}]',
        "",
        "",
        [TOKYO, NOW],
    ),
    ("phi4_mini", 'functools[{"name": "now", "arguments": {}}]', "", "", [NOW]),
    (
        "gemma4",
        '<|channel>thought\nHm.\n<channel|>I look.<|tool_call>call:get_weather{city:<|"|>Tōkyō<|"|>,days:3}<tool_call|>'
        '<|tool_call>call:get_weather{extra:{a:[<|"|>x:{<|"|>,1.5,true],b:{}},exact:false}<tool_call|><|tool_call>call:now{}<tool_call|>',
        "Hm.",
        "I look.",
        [TOKYO, ("get_weather", {"extra": {"a": ["x:{", 1.5, True], "b": {}}, "exact": False}), NOW],
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Tōkyō", "days": 3}<|call|>',
        "Hm.",
        "I look.",
        [TOKYO],
    ),
    (
        "harmony",  # the recipient before the channel
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
        "Hm.",
        "",
        [NOW],
    ),
    ("harmony", "<|channel|>final<|message|>a < b<|return|>", "", "a < b", []),
    ("harmony", "plain", "", "plain", []),
    ("hermes", "a <think> b", "", "a <think> b", []),
    ("hermes", "<think>never ended", "never ended", "", []),
    ("hermes", "\n<think>a\n\nb </think>\n\n c <tool", "a\n\nb", "c <tool", []),
    ("glm45", "<tool_call>{}", "", "<tool_call>{}", []),
    ("kimi_k2", "<|tool_call_begin|>{}", "", "<|tool_call_begin|>{}", []),
]  # fmt: skip


def output_format(name: str) -> OutputFormat:
    reasoning = {"mistral": "mistral", "seed_oss": "seed_oss", "gemma4": "gemma4", "harmony": "harmony"}
    return OutputFormat(name, reasoning.get(name, "qwen3_coder" if name == "qwen3_coder" else "think"))


def parsed(name: str, parts: list[str], prompt: str = "", schemas: Any = SCHEMAS) -> tuple[str, str, list[Any]]:
    """Returns reasoning, content and calls, the latter with the text of their arguments."""
    form = output_format(name)
    parser = ExpectedOutput(form, schemas, form.opened_by(prompt)).parser()
    events: list[OutputEvent] = [event for part in parts for event in parser.push(part)] + parser.finish()
    calls: list[Any] = []
    for event in events:
        if isinstance(event, ToolCallStarted):
            assert event.index == len(calls)
            calls.append([event.name, ""])
        elif isinstance(event, ToolCallDelta):
            assert event.index == len(calls) - 1
            calls[-1][1] += event.arguments
    assert parser.calls == len(calls)
    texts = ["".join(event.text for event in events if isinstance(event, kind)) for kind in (ReasoningDelta, TextDelta)]
    return texts[0], texts[1], calls


@pytest.mark.parametrize("name, text, reasoning, content, calls", TRANSCRIPTS)
def test_transcripts_are_read_the_same_in_every_split(name, text, reasoning, content, calls):
    cuts = [[text], list(text)]
    cuts += [[text[:cut], text[cut:]] for cut in range(1, len(text))]
    cuts += [[text[i : i + 7] for i in range(0, len(text), 7)]]
    for parts in cuts:
        got = parsed(name, parts)
        assert got[:2] == (reasoning, content), parts
        assert [(function, json.loads(arguments)) for function, arguments in got[2]] == calls, parts


@pytest.mark.parametrize("name", [*CALL_FORMATS, "harmony"])
def test_any_text_is_read_the_same_in_every_split(name: str) -> None:
    pieces = [*output_format(name).tags, '{"name": "now", "parameters": {}}', '"name": "now"', "now", "get_weather", "[", "]",
              "{", "}", "(", ")", '"', ":", ",", " ", "\n", "\\", "x=1", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
              "</function>", "<parameter=city>", "</parameter>", ">", "[ARGS]", "<｜tool▁sep｜>", "to=functions.now"]  # fmt: skip

    @given(st.lists(st.sampled_from(pieces), max_size=12))
    def check(parts: list[str]) -> None:
        assert parsed(name, ["".join(parts)]) == parsed(name, list("".join(parts))) == parsed(name, parts)

    check()


def test_arguments_are_passed_on_while_they_are_generated() -> None:
    parser = ExpectedOutput(OutputFormat("hermes"), SCHEMAS).parser()
    started, arguments = parser.push('<tool_call>{"name": "get_weather", "arguments": {"city": "Tō')
    assert isinstance(started, ToolCallStarted)
    assert started.name == "get_weather"
    assert arguments == ToolCallDelta(0, '{"city": "Tō')


def test_reasoning_that_the_prompt_begins_is_told_apart() -> None:
    assert parsed("hermes", ["Hm.</think>Yes."], "<|im_start|>assistant\n<think>\n")[:2] == ("Hm.", "Yes.")
    assert parsed("hermes", ["<think>Hm.</think>Yes."], "<|im_start|>assistant\n<think>\n")[:2] == ("Hm.", "Yes.")
    assert parsed("hermes", ["Yes."], "assistant\n<think>\n\n</think>\n\n")[:2] == ("", "Yes.")


def test_tokens_of_the_reasoning_are_counted() -> None:
    form = OutputFormat("hermes", "think")
    whole = ExpectedOutput(form, None, True, 9).parser()
    by_share, in_pieces = ExpectedOutput(form, None, True).parser(), ExpectedOutput(form, None, True).parser()
    whole.push("Hm, hm.</think>Yes.", [1, 2, 3, 9, 4])
    assert whole.reasoning_tokens == 4
    by_share.push("Hm.</think>Yes.Yes.....", [1, 2, 3, 9])
    assert by_share.reasoning_tokens == 2
    for token in ("Hm", ", hm", ".", "</think>", "Yes"):
        in_pieces.push(token, [1])
    assert in_pieces.reasoning_tokens == 4


def test_without_functions_their_format_is_content() -> None:
    text = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert parsed("hermes", ["<think>a</think>" + text], schemas=None) == ("a", text, [])


@pytest.mark.parametrize(
    "sign, calls, reasoning",
    [
        ("<|start|>assistant<|channel|>final<|message|>", "harmony", "harmony"),
        ("<tool_call>\n<function=x>\n<parameter=y>\n<think></think>", "qwen3_coder", "qwen3_coder"),
        ("<tool_call>", "auto", None),
        ("{{ tools }}<think>\n</think>", "auto", "think"),
        ("[TOOL_CALLS][ARGS]", "mistral", None),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜></think>", "deepseek_v3", "think"),
        ("<|tool_call>call:<channel|>", "gemma4", "gemma4"),
        ("", "auto", None),
    ],
)
def test_the_chat_template_shows_the_format(sign: str, calls: str, reasoning: str | None) -> None:
    assert OutputFormat.of(sign) == OutputFormat(calls, reasoning)


def test_named_parsers_take_the_place_of_the_template() -> None:
    assert chosen_format("<tool_call></think>", "mistral") == OutputFormat("mistral", "think")
    assert chosen_format("<tool_call></think>", None, "none") == OutputFormat("auto", None)
    with pytest.raises(InvalidRequest, match=r"--tool-call-parser must be one of hermes, .*, got 'qwen9'"):
        check_parsers("qwen9", None)
    with pytest.raises(InvalidRequest, match=r"--reasoning-parser must be one of think, .*, got 'x'"):
        check_parsers(None, "x")


def test_special_tokens_that_are_no_part_of_the_format_are_dropped() -> None:
    parser = ExpectedOutput(OutputFormat("granite"), SCHEMAS, dropped=("<|end|>", "<|end_of_text|>")).parser()
    events = [*parser.push("a<|end_of_text|>b<|tool_call|>"), *parser.push('[{"name": "now", "arguments": {}}]<|end|>')]
    assert events[:2] == [TextDelta("ab"), ToolCallStarted(0, events[1].id, "now")]  # type: ignore[union-attr]
    assert parser.finish() == []


@pytest.mark.parametrize(
    "text, schema, value",
    [
        ("3", {"type": "integer"}, 3),
        ("3.0", {"type": "integer"}, 3),
        ("3.5", {"type": "number"}, 3.5),
        ("3", {"type": "string"}, "3"),
        ("3", None, "3"),
        ("True", {"type": "boolean"}, True),
        ("no", {"type": "boolean"}, False),
        ("null", {"type": "string"}, "null"),
        ("None", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("[1, 2]", {"type": "array"}, [1, 2]),
        ("{'a': (1,)}", {"type": "object"}, {"a": (1,)}),
        ("nonsense", {"type": "object"}, "nonsense"),
        ("1" * 5000, {"type": "integer"}, "1" * 5000),
    ],
)
def test_values_take_the_type_of_the_schema(text: str, schema: Any, value: Any) -> None:
    assert typed(text, schema) == value


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda e: st.lists(e) | st.dictionaries(st.text(), e)
    )
)
@example({"a": '}"\\'})
def test_json_arguments_come_out_as_they_went_in(value: Any) -> None:
    text = json.dumps({"name": "now", "arguments": {"value": value}}, ensure_ascii=False)
    for parts in ([text], list(text)):
        (call,) = parsed("hermes", ["<tool_call>", *parts, "</tool_call>"])[2]
        assert json.loads(call[1]) == {"value": value}


def test_long_arguments_take_linear_time() -> None:
    text = '{"name": "now", "arguments": {"a": "' + "x" * 200_000 + '"}}'
    assert len(parsed("hermes", ["<tool_call>", *text])[2][0][1]) > 200_000
