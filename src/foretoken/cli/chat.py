"""``foretoken chat``: a conversation in the terminal, with tokens coloured by origin."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import typer

from foretoken.cli.chat_commands import AnswerOptions, Chat, ChatSettings, names, parse, run
from foretoken.cli.grouped import grouped, option
from foretoken.cli.options import MaxModelLen, PositionalModelOptions, RuntimeOptions, TextColor, load
from foretoken.cli.theme import ColorMode
from foretoken.core.errors import ForetokenError, InvalidRequest
from foretoken.engine.prompts import read_template
from foretoken.params import SamplingParams

if TYPE_CHECKING:
    from foretoken.cli.chat_commands import Conversation
    from foretoken.cli.chat_screen import Screen
    from foretoken.engine.sequence import Counts
    from foretoken.llm import LLM
    from foretoken.outputs import CompletionOutput


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
    from foretoken.cli.chat_commands import Conversation

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
    try:
        return dict(json.loads(text))
    except ValueError as error:
        raise InvalidRequest(
            f'--method {text} is no JSON ({error}); expected a name, or for instance \'{{"method": "ngram"}}\''
        ) from error


class Session(Chat):
    """A chat that answers messages on a screen. ``refused`` is whether any message was refused."""

    def __init__(
        self, llm: LLM, conversation: Conversation, settings: ChatSettings, screen: Screen, *, figures: bool = True
    ) -> None:
        super().__init__(llm, conversation, settings, screen.coloured)
        self._screen, self._figures = screen, figures
        self.refused = False

    @property
    def greeting(self) -> str:
        """The models' names, for the first line."""
        drafts = f"drafts by {' or '.join(self.methods)}" if self.methods else "no drafts"
        return f"{self.llm.model} · {drafts} · /help lists the commands, Ctrl-D leaves"

    def run(self, texts: Iterable[str]) -> None:
        """Answers messages until they end or one is /quit. Reports refused messages and continues."""
        for text in texts:
            try:
                self._handle(text)
            except ForetokenError as error:
                self.refused = True
                self._screen.error(error)
            if self.finished:
                return

    def _handle(self, text: str) -> None:
        if not text.strip():
            return
        command = parse(text.rstrip())
        if command is None:
            self.say(text)
            return
        reply = run(self, *command)
        if reply:
            self._screen.notice(reply)

    def say(self, text: str) -> None:
        """Sends a message and shows the answer. Raises InvalidRequest and then drops the message."""
        params = self.settings.params(len(self.done))
        ids, dropped = self.conversation.ask(text, params.max_tokens)
        if dropped:
            self._screen.notice(
                f"the conversation has outgrown the model's {self.llm.target.max_length} tokens: "
                f"its oldest {dropped} messages are no longer seen"
            )
        try:
            self._answer(text, ids, params, dropped)
        except ForetokenError:
            self.conversation.withdraw()
            raise

    def _answer(self, text: str, ids: list[int], params: SamplingParams, dropped: int) -> None:
        from foretoken.cli.render import Origins, summary
        from foretoken.engine.sequence import Counts

        show = self._screen.answering(Origins(self.llm.tokenizer, ids), self.settings.rejected)
        counts, words, started = Counts(), _Words(), perf_counter()
        output = self._listen(ids, params, counts, words, show)
        seconds = perf_counter() - started
        figures = counts.freeze()
        reason = output.finish_reason if output is not None else "abort"
        record = {
            "message": text,
            "text": words.text,
            "token_ids": words.ids,
            "finish_reason": reason,
            "dropped_messages": dropped,
            "stats": figures.to_dict(),
            "wall_seconds": seconds,
        }
        ends = {"abort": " · stopped", "length": f" · cut at {figures.tokens} tokens", "error": " · failed"}
        line = summary([figures], seconds) + ends.get(str(reason), "") if self._figures else None
        self._screen.answered(record, line)
        if words.text or reason in ("stop", "length"):
            self.conversation.answer(words.text)
        else:
            self.conversation.withdraw()  # there was no answer, so the message is dropped
        self.done.append((figures, seconds))

    def _listen(
        self, ids: list[int], params: SamplingParams, counts: Counts, words: _Words, show: Any
    ) -> CompletionOutput | None:
        """Streams an answer and returns it; None if Ctrl-C stopped it."""
        from foretoken.core.progress import interruptible

        with interruptible() as stopped:
            try:
                for piece in self.llm.stream(ids, params):
                    counts.add(piece.step)
                    words.add(piece.text, piece.token_ids)
                    show(piece)
                    if piece.output is not None:
                        return piece.output
                    if stopped():
                        break
            except KeyboardInterrupt:
                pass
        return None


class _Words:
    """An answer while it is generated."""

    def __init__(self) -> None:
        self.text, self.ids = "", list[int]()

    def add(self, text: str, ids: Iterable[int]) -> None:
        self.text += text
        self.ids.extend(ids)
