"""Input and output of a chat: a terminal, lines through a pipe, or lines of JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.cli.files import standard_input
from foretoken.cli.render import Origins, TextWriter, legend
from foretoken.cli.theme import ColorMode, console, note
from foretoken.core.errors import ForetokenError
from foretoken.outputs import StreamPiece

if TYPE_CHECKING:
    from prompt_toolkit.history import History

CONTINUED = "\\"  # at the end of a line: the message continues on the next


class TextScreen:
    """Writes answers to standard output, with colours if it has them, and everything else to standard error."""

    def __init__(self, color: ColorMode) -> None:
        self._out, self._err = console(color), console(color, stderr=True)
        self._writer = TextWriter(self._out)

    @property
    def coloured(self) -> bool:
        return self._out.color_system is not None

    def welcome(self, text: str) -> None:
        """Shows the models' names before the first message."""
        self.notice(text)
        if self.coloured:
            self._err.print(legend(True))

    def answering(self, origins: Origins, rejected: bool) -> Callable[[StreamPiece], None]:
        """Begins an answer. Returns a function to call with its pieces."""
        self._writer = TextWriter(self._out, rejected=rejected)
        return lambda piece: self._writer.write(origins.push(piece))

    def answered(self, record: dict[str, Any], figures: str | None) -> None:
        """Ends an answer, with a line of statistics if requested."""
        self._writer.end_line()
        if figures:
            self.notice(figures)

    def notice(self, text: str) -> None:
        """Shows the message of a command."""
        note(self._err, text)

    def error(self, error: ForetokenError) -> None:
        """Shows an error. The chat continues."""
        note(self._err, "error: " + " ".join(str(error).split()), "red")


class JsonScreen:
    """Writes one JSON object a line to standard output: ``{"type": "answer" | "notice" | "error" | "ready", ..}``."""

    coloured = False

    def welcome(self, text: str) -> None:
        self._say("ready", text=text)

    def answering(self, origins: Origins, rejected: bool) -> Callable[[StreamPiece], None]:
        return lambda piece: None

    def answered(self, record: dict[str, Any], figures: str | None) -> None:
        self._say("answer", **record)

    def notice(self, text: str) -> None:
        self._say("notice", text=text)

    def error(self, error: ForetokenError) -> None:
        self._say("error", text=str(error))

    def _say(self, kind: str, **record: Any) -> None:
        print(json.dumps({"type": kind, **record}, ensure_ascii=False), flush=True)


Screen = TextScreen | JsonScreen


def piped() -> Iterator[str]:
    """Yields messages of standard input, one a line."""
    waiting = ""
    for line in iter(partial(standard_input, sys.stdin.readline), ""):  # line by line, also from a pipe that stays open
        text = waiting + line.rstrip("\r\n")
        if text.endswith(CONTINUED):
            waiting = text.removesuffix(CONTINUED) + "\n"
            continue
        waiting = ""
        yield text
    if waiting:
        yield waiting.removesuffix("\n")


def typed(commands: Sequence[str], color: ColorMode) -> Iterator[str]:
    """Yields messages typed in the terminal until Ctrl-D. Ctrl-C clears the line."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.output import ColorDepth

    bare = color is ColorMode.NEVER or bool(os.environ.get("NO_COLOR"))
    session: PromptSession[str] = PromptSession(
        "> ",
        multiline=True,
        prompt_continuation="  ",
        key_bindings=_bindings(),
        history=_history(),
        completer=WordCompleter(list(commands), sentence=True),
        complete_while_typing=False,
        color_depth=ColorDepth.DEPTH_1_BIT if bare else None,
    )
    while True:
        try:
            yield session.prompt()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return


def _bindings() -> Any:
    """Returns key bindings: Enter sends; Esc-Enter or a trailing backslash begins another line."""
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith(CONTINUED) and buffer.document.is_cursor_at_the_end:
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def another_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def state_folder() -> Path:
    """Returns the folder of the history: $XDG_STATE_HOME/foretoken, else ~/.local/state/foretoken."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "foretoken"


def _history() -> History:
    """Returns the history: a file that only its user can read, or in memory if none can be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    file = state_folder() / "chat_history"
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.touch(mode=0o600)
        with file.open("ab"):
            return FileHistory(str(file))
    except OSError:
        return InMemoryHistory()
