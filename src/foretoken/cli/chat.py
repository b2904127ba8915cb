"""``foretoken chat``: a conversation in the terminal, with tokens coloured by origin."""

from __future__ import annotations

import secrets
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from foretoken.cli.chat_commands import AnswerOptions, ChatSettings, Conversation, Session, names
from foretoken.cli.files import json_object
from foretoken.cli.grouped import grouped, option
from foretoken.cli.options import MaxModelLen, PositionalModelOptions, RuntimeOptions, TextColor, load
from foretoken.cli.theme import ColorMode
from foretoken.engine.prompts import read_template

if TYPE_CHECKING:
    from foretoken.cli.chat_screen import Screen


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Further methods, and the beginning of the conversation."""

    method: list[str] | None = option(
        None, "Another way to speculate, to be had by /method; may be repeated.", metavar="NAME|JSON"
    )
    system: str | None = option(None, "System message before the conversation.")
    chat_template: Path | None = option(None, "Jinja in the place of the tokenizer's chat template.", metavar="FILE")


@grouped
def chat(
    models: PositionalModelOptions,
    wanted: ChatOptions,
    answers: AnswerOptions,
    runtime: RuntimeOptions,
    max_model_len: MaxModelLen = None,
    rejected: bool = option(False, "Show drafted tokens that were refused."),
    color: TextColor = ColorMode.AUTO,
    stats: bool = option(True, "A line of figures after each answer, on standard error."),
    json_lines: bool = option(False, "Print one JSON object a line instead."),
) -> None:
    """Talk to a model. /help lists commands that change settings. Without a terminal it reads one message a line."""
    config, template = models.config, read_template(wanted.chat_template)
    settings = ChatSettings(**vars(answers), rejected=rejected)
    settings.params(0)  # refused before anything is loaded
    llm = load(
        models.model,
        models.draft_model,
        color,
        speculative_config=config,
        max_model_len=max_model_len,
        methods=[_way(each) for each in wanted.method or ()],
        enable_prefix_caching=True,
        seed=secrets.randbits(63),  # the library's default would make all conversations equal
        **vars(runtime),
    )
    with closing(llm):
        from foretoken.cli.chat_screen import JsonScreen, TextScreen, piped, typed

        conversation = Conversation(llm.tokenizer, llm.target.max_length, llm.model, template)
        conversation.system = wanted.system
        screen: Screen = JsonScreen() if json_lines else TextScreen(color)
        session = Session(llm, conversation, settings, screen, figures=stats)
        watched = sys.stdin.isatty() and sys.stdout.isatty() and not json_lines
        if watched or json_lines:
            screen.welcome(session.greeting)
        session.run(typed(names(), color) if watched else piped())
        if session.refused and not watched:
            raise typer.Exit(1)


def _way(text: str) -> str | dict[str, Any]:
    """Returns a method's name, or a configuration parsed from JSON. Raises InvalidRequest."""
    if not text.lstrip().startswith("{"):
        return text
    return json_object("--method", text, """a name, or for instance '{"method": "ngram"}'""")
