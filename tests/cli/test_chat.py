"""``foretoken chat``: lines through a pipe, commands, the conversation as a prompt, and keys at a terminal."""

import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from foretoken.cli.chat_commands import ChatSettings, Conversation, Session, names, parse
from foretoken.cli.chat_commands import run as carry_out
from foretoken.cli.chat_screen import TextScreen, state_folder, typed
from foretoken.cli.theme import ColorMode
from foretoken.core.draft import Draft
from foretoken.core.errors import InvalidRequest, WriteError
from foretoken.core.step import StepOutput, Timings
from foretoken.core.verdict import Verdict
from foretoken.outputs import StreamPiece

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture
def chat(run: Any, pair: Any, tmp_path: Path) -> Any:
    """``chat("a line", .., "--option")``: what is said, then options."""
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    names = ("--model", str(pair.target), "--draft-model", str(pair.draft), "--dtype", "float32")
    names += ("--seed", "1")  # by default each chat has another one, and may end early or write any byte

    def call(*lines: str, options: tuple[str, ...] = ()) -> Any:
        stdin = "".join(line + "\n" for line in lines)
        return run("chat", *names, "--chat-template", str(template), "--max-tokens", "8", *options, stdin=stdin)

    return call


def records(result: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.out.splitlines()]


def answers(result: Any) -> list[dict[str, Any]]:
    return [record for record in records(result) if record["type"] == "answer"]


def test_through_a_pipe_answers_alone_go_to_standard_output(chat):
    told = chat("def f(x):", "", "/temperature 0", "import os").ok()
    assert told.err.count("8 tokens · ") == 2 and "temperature: 0" in told.err and "cut at 8 tokens" in told.err
    assert "\x1b" not in told.out + told.err and "tok/s" not in told.out and "temperature" not in told.out


def test_json_is_a_line_for_everything(chat):
    told = chat("def f(x):", "/speculative 3", "import os", options=("--json-lines",))
    assert [record["type"] for record in records(told)] == ["ready", "answer", "notice", "answer"]
    answer = answers(told)[1]
    assert set(answer) == {
        "type",
        "message",
        "text",
        "token_ids",
        "finish_reason",
        "dropped_messages",
        "stats",
        "wall_seconds",
    }
    assert answer["message"] == "import os" and answer["finish_reason"] == "length" and len(answer["token_ids"]) == 8
    assert told.err == ""


def test_a_seed_fixes_the_conversation_however_it_is_drafted(chat):
    told = [
        chat(
            "def f(x):",
            f"/speculative {depth}",
            "import os",
            options=("--json-lines", "--seed", "5", "--temperature", "1"),
        )
        for depth in ("off", "on", "5")
    ]
    texts = [[answer["token_ids"] for answer in answers(each)] for each in told]
    assert texts[0] == texts[1] == texts[2]
    assert texts[0][0] != texts[0][1]
    assert answers(told[0])[1]["stats"]["drafts"] == 0 < answers(told[2])[1]["stats"]["drafts"]


def test_another_method_is_loaded_and_chosen(chat):
    more = ("--method", "ngram", "--method", '{"method": "suffix", "num_speculative_tokens": 2}', "--json-lines")
    told = chat("/method suffix", "a b a b a b a b", "/method", options=more)
    assert told.code == 0 and answers(told)
    assert [r["text"] for r in records(told) if r["type"] == "notice"] == ["speculation: on, method suffix"] * 2
    assert "drafts by auto or draft_model or ngram or suffix" in records(told)[0]["text"]
    assert "--method is not JSON" in chat(options=("--method", "{oops")).err


def test_a_backslash_at_the_end_joins_lines(chat):
    assert [a["message"] for a in answers(chat("class A:\\", "    x = 1", "b\\", options=("--json-lines",)))] == [
        "class A:\n    x = 1",
        "b",
    ]


def test_refused_requests_do_not_end_the_chat(chat, tmp_path):
    told = chat("/nonsense", "/method nobody", "/temperature -2", "/save", "def f():", "/quit", "import os")
    assert told.code == 1  # a script is to know
    for part in (
        "no command /nonsense; known: /speculative",
        "'nobody' is not loaded; loaded: auto, draft_model",
        "/temperature takes",
        "/save takes",
    ):
        assert part in told.err
    assert told.err.count("tok/s") == 1


def test_a_conversation_is_saved_with_its_figures(chat, tmp_path):
    file = tmp_path / "talk.json"
    chat("/system be brief", "def f():", f"/save {file}")
    record = json.loads(file.read_text())
    assert [m["role"] for m in record["messages"]] == ["system", "user", "assistant"]
    assert record["messages"][0]["content"] == "be brief"
    assert record["answers"][0]["tokens"] == 8 and record["settings"]["max_tokens"] == 8


def test_the_oldest_turns_go_when_the_model_is_full(chat):
    told = chat(*["some words to fill it"] * 6, options=("--json-lines", "--max-model-len", "96"))
    dropped = [answer["dropped_messages"] for answer in answers(told)]
    assert dropped[0] == 0 and sum(dropped) >= 2 and told.code == 0
    assert any("outgrown the model's 96 tokens" in r["text"] for r in records(told) if r["type"] == "notice")


def test_without_a_template_the_error_names_the_option(run, pair):
    run("chat", "--model", str(pair.target)).refused("--chat-template FILE")


def test_bad_options_are_refused_before_anything_is_loaded(run, tmp_path):
    assert "cannot read the chat template" in run("chat", "--chat-template", str(tmp_path / "none")).err
    (tmp_path / "broken").write_text("{{ messages[0].")
    assert "is not valid Jinja (line 1" in run("chat", "--chat-template", str(tmp_path / "broken")).err
    assert "temperature must be" in run("chat", "--model", "/nowhere", "--temperature", "-1").err


class Letters:
    chat_template = "there is one"

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
        return [ord(letter) for m in messages for letter in f"{m['role'][0]}{m['content']}"]

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, ids))


def said(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def test_conversation_drops_whole_turns_and_keeps_the_system_message():
    talk = Conversation(Letters(), 20, "m")
    talk.system = "SYS"
    assert said(talk.ask("aaaa", 5)[0]) == "sSYSuaaaa"
    talk.answer("bbbb")
    ids, dropped = talk.ask("cccc", 5)
    assert (said(ids), dropped) == ("sSYSucccc", 2)
    talk.answer("d")
    assert (said(talk.ask("e", 5)[0]), len(talk.messages)) == ("sSYSuccccadue", 6)


def test_a_message_too_long_changes_nothing():
    talk = Conversation(Letters(), 20, "m")
    talk.ask("aa", 5)
    talk.answer("b")
    with pytest.raises(InvalidRequest, match="31 tokens by itself and the model holds 20"):
        talk.ask("c" * 30, 5)
    assert len(talk.turns) == 2 and said(talk.ask("d", 5)[0]) == "uaaabud"
    talk.withdraw()
    talk.reset()
    assert talk.messages == []


def test_a_command_is_one_word_in_small_letters():
    assert parse("/temperature  0.5 ") == ("temperature", "0.5")
    assert parse("/system be\nbrief") == ("system", "be\nbrief")
    assert [parse(text) for text in ("/usr/bin", "// a comment", " /help", "a /help", "/")] == [None] * 5


def fake(*methods: str, llm: Any = None, stream: Any = None) -> Session:
    told = llm or SimpleNamespace(
        stream=stream,
        methods=methods,
        speculative_config=SimpleNamespace(method_in_force=methods[0] if methods else "none"),
        target=SimpleNamespace(max_length=100),
        tokenizer=Letters(),
        model="m",
        draft_model=None,
    )
    settings = ChatSettings(max_tokens=9, temperature=0.5)
    return Session(told, Conversation(Letters(), 100, "m"), settings, TextScreen(ColorMode.NEVER))


def test_methods_among_those_loaded():
    session = fake("ngram", "suffix")
    assert carry_out(session, "method", "suffix") == "speculation: on, method suffix"
    assert session.settings.params(0).speculative_method == "suffix"
    assert carry_out(session, "speculative", "3") == "speculation: 3 tokens a step, method suffix"
    with pytest.raises(InvalidRequest, match="loaded: ngram, suffix"):
        carry_out(session, "method", "eagle3")
    assert "no method is loaded" in carry_out(fake(), "speculative", "")


@pytest.mark.parametrize(
    "name, argument",
    [
        ("speculative", "maybe"),
        ("speculative", "-1"),
        ("temperature", "warm"),
        ("temperature", "-1"),
        ("rejected", "1"),
    ],
)
def test_bad_arguments_change_nothing(name, argument):
    session = fake("ngram")
    before = session.settings
    with pytest.raises(InvalidRequest, match=f"/{name} takes"):
        carry_out(session, name, argument)
    assert session.settings == before


def test_other_commands():
    session = fake("ngram")
    assert carry_out(session, "stats", "").endswith("no answers yet")
    assert "no colours" in carry_out(session, "rejected", "on") and session.settings.rejected
    assert all(name in carry_out(session, "help", "") for name in names())
    with pytest.raises(WriteError):
        carry_out(session, "save", "/nowhere/at/all.json")
    carry_out(session, "quit", "")
    assert session.finished


def test_ctrl_c_stops_the_answer_and_not_the_program(capsys):
    def stream(ids: list[int], params: Any) -> Iterator[StreamPiece]:
        for position, letter in enumerate("answer"):
            step = StepOutput(
                0, position, Draft.empty(), Verdict((), ord(letter)), (ord(letter),), Timings(0, 0, 0, 0, 1)
            )
            if position == 2:
                signal.raise_signal(signal.SIGINT)
            yield StreamPiece(0, 0, letter, step.tokens, step)

    session = fake("ngram", stream=stream)
    session.run(["q", "/stats"])
    out, err = capsys.readouterr()
    assert out == "ans\n" and "3 tokens" in err and "stopped" in err and "1 answer" in err
    assert [turn["content"] for turn in session.conversation.turns] == ["q", "ans"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_refused_request_is_taken_back(capsys):
    def stream(ids: list[int], params: Any) -> Iterator[StreamPiece]:
        raise InvalidRequest("not like that")
        yield

    session = fake("ngram", stream=stream)
    session.run(["q"])
    assert "error: not like that" in capsys.readouterr().err
    assert session.conversation.turns == [] and session.refused


def test_every_answer_has_random_numbers_of_its_own():
    settings = replace(ChatSettings(max_tokens=9, temperature=0.5), seed=7)
    assert [settings.params(turn).seed for turn in range(2)] == [7, 8]


def test_typing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        keys.send_text("one\r" + "two\x1b\rlines\r" + "back\\\rslash\r" + "gone\x03" + "/temperature 1\r" + "\x04")
        assert list(typed(names(), ColorMode.NEVER)) == ["one", "two\nlines", "back\nslash", "/temperature 1"]
    history = state_folder() / "chat_history"
    assert history.parent.parent == tmp_path and "+lines" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_without_a_writable_folder_the_history_is_in_memory(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        keys.send_text("one\r\x04")
        assert list(typed(names(), ColorMode.AUTO)) == ["one"]
