"""A chat: its conversation, cut to the context length, its session, and commands such as ``/temperature 0.5``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from foretoken.cli.files import check_output_file, write_json
from foretoken.cli.grouped import option
from foretoken.cli.options import SpeculativeTokens, TopP
from foretoken.core.artifacts import JSON
from foretoken.core.errors import ForetokenError, InvalidRequest
from foretoken.engine.prompts import apply_template, own_template
from foretoken.params import SamplingParams

if TYPE_CHECKING:
    from foretoken.cli.chat_screen import Screen
    from foretoken.llm import LLM
    from foretoken.outputs import SpeculationStats, StreamPiece


class Conversation:
    """The turns of one chat.

    ``tokenizer`` has ``apply_chat_template``, ``template`` replaces its template, ``max_length`` is the number of
    tokens of prompt and answer together, and ``model`` is a name for error messages. Raises InvalidRequest if there is
    no valid template.
    """

    def __init__(self, tokenizer: Any, max_length: int, model: str, template: str | None = None) -> None:
        if template is None:
            own_template(tokenizer, model, "give one with --chat-template FILE, or use foretoken generate")
        self._tokenizer, self._max_length, self._template = tokenizer, max_length, template
        self.system: str | None = None
        self.turns: list[dict[str, str]] = []
        self._from = 0  # earlier turns do not fit the context

    @property
    def messages(self) -> list[dict[str, str]]:
        """All turns in OpenAI's format, including those that no longer fit the context."""
        return [*self._instructions, *self.turns]

    @property
    def _instructions(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system}] if self.system else []

    def ask(self, text: str, max_tokens: int) -> tuple[list[int], int]:
        """Adds a message. Returns the prompt's token ids, and how many more of the oldest turns do not fit.

        ``max_tokens`` are reserved for the answer, at most half of the context. Raises InvalidRequest if the message
        alone is too long or the template refuses it, and does not add it.
        """
        turns = [*self.turns, {"role": "user", "content": text}]
        first, budget = self._from, self._max_length - min(max_tokens, self._max_length // 2)
        ids = self._prompt(turns[first:])
        while len(ids) > budget and first < len(turns) - 1:
            first = next((i for i in range(first + 1, len(turns)) if turns[i]["role"] == "user"), len(turns) - 1)
            ids = self._prompt(turns[first:])
        if len(ids) >= self._max_length:
            raise InvalidRequest(
                f"the message has {len(ids)} tokens by itself and the model holds {self._max_length}, question and "
                "answer together; send a shorter one, or raise --max-model-len"
            )
        dropped, self._from, self.turns = first - self._from, first, turns
        return ids, dropped

    def answer(self, text: str) -> None:
        """Adds the answer to the last message."""
        self.turns.append({"role": "assistant", "content": text})

    def withdraw(self) -> None:
        """Removes the last message, which has no answer."""
        self.turns.pop()
        self._from = min(self._from, len(self.turns))

    def reset(self) -> None:
        """Removes all turns but the system message."""
        self.turns, self._from = [], 0

    def _prompt(self, turns: list[dict[str, str]]) -> list[int]:
        options = {} if self._template is None else {"chat_template": self._template}
        ids: list[int] = apply_template(
            self._tokenizer, [*self._instructions, *turns], add_generation_prompt=True, return_dict=False, **options
        )
        return ids


_COMMAND = re.compile(r"/([a-z_]+)(?:\s+(.*))?", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """Sampling parameters of the answers."""

    max_tokens: int = option(512, "Tokens of an answer at most.")
    temperature: float = option(0.7, "0 is greedy.")
    top_p: TopP = 1.0
    seed: int | None = option(None, "The same seed gives the same answers, however drafted.")
    speculative_tokens: SpeculativeTokens = None


@dataclass(frozen=True, kw_only=True)
class ChatSettings(AnswerOptions):
    """Settings of the next answer. None for ``speculative_tokens`` or ``method`` takes the engine's default."""

    method: str | None = None
    rejected: bool = False

    def params(self, turn: int) -> SamplingParams:
        """Returns the parameters of answer ``turn``, which has its own random numbers. Raises InvalidRequest."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=None if self.seed is None else self.seed + turn,
            speculative_tokens=self.speculative_tokens,
            speculative_method=self.method,
        )


class Session:
    """A conversation with a model on a screen, on which commands act.

    Attributes:
        conversation: The conversation so far.
        settings: Settings of the next answer.
        screen: Shows answers, and what commands did.
        figures: Whether answers have a line of statistics.
        done: Statistics and seconds of every answer so far.
        refused: Whether any message was refused.
        finished: Whether the chat ends.
    """

    def __init__(
        self, llm: LLM, conversation: Conversation, settings: ChatSettings, screen: Screen, *, figures: bool = True
    ) -> None:
        self.llm, self.conversation, self.settings = llm, conversation, settings
        self.screen, self.figures = screen, figures
        self.done: list[tuple[SpeculationStats, float]] = []
        self.refused = self.finished = False

    @property
    def methods(self) -> tuple[str, ...]:
        """The loaded methods, the selected one first; empty without speculation."""
        return tuple(name for name in self.llm.methods if name != "none")

    @property
    def greeting(self) -> str:
        """The models' names, for the first line."""
        drafts = f"drafts by {' or '.join(self.methods)}" if self.methods else "no drafts"
        return f"{self.llm.model} · {drafts} · /help lists the commands, Ctrl-D leaves"

    @property
    def record(self) -> dict[str, Any]:
        return {
            "model": self.llm.model,
            "draft_model": self.llm.draft_model,
            "methods": list(self.methods),
            "settings": asdict(self.settings),
            "messages": self.conversation.messages,
            "answers": [{**stats.to_dict(), "wall_seconds": seconds} for stats, seconds in self.done],
        }

    def run(self, texts: Iterable[str]) -> None:
        """Answers messages until they end or one is /quit. Reports refused messages and continues."""
        for text in texts:
            try:
                self._handle(text)
            except ForetokenError as error:
                self.refused = True
                self.screen.error(error)
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
            self.screen.notice(reply)

    def say(self, text: str) -> None:
        """Sends a message and shows the answer. Raises InvalidRequest and then drops the message."""
        params = self.settings.params(len(self.done))
        ids, dropped = self.conversation.ask(text, params.max_tokens)
        if dropped:
            self.screen.notice(
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

        show = self.screen.answering(Origins(self.llm.tokenizer, ids), self.settings.rejected)
        counts, started = Counts(), perf_counter()
        pieces: list[StreamPiece] = []

        def receive(piece: StreamPiece) -> None:
            counts.add(piece.step)
            pieces.append(piece)
            show(piece)

        self._listen(ids, params, receive)
        seconds, figures = perf_counter() - started, counts.freeze()
        answer, output = "".join(piece.text for piece in pieces), pieces[-1].output if pieces else None
        reason = output.finish_reason if output is not None else "abort"
        record = {
            "message": text,
            "text": answer,
            "token_ids": [token for piece in pieces for token in piece.token_ids],
            "finish_reason": reason,
            "dropped_messages": dropped,
            "stats": figures.to_dict(),
            "wall_seconds": seconds,
        }
        ends = {"abort": " · stopped", "length": f" · cut at {figures.tokens} tokens", "error": " · failed"}
        line = summary([figures], seconds) + ends.get(str(reason), "") if self.figures else None
        self.screen.answered(record, line)
        if answer or reason in ("stop", "length"):
            self.conversation.answer(answer)
        else:
            self.conversation.withdraw()  # there was no answer, so the message is dropped
        self.done.append((figures, seconds))

    def _listen(self, ids: list[int], params: SamplingParams, receive: Callable[[StreamPiece], None]) -> None:
        """Passes the pieces of an answer to ``receive`` until its end, or until Ctrl-C stops it."""
        from foretoken.core.progress import interruptible

        with interruptible() as stopped, suppress(KeyboardInterrupt):
            for piece in self.llm.stream(ids, params):
                receive(piece)
                if piece.output is not None or stopped():
                    break


@dataclass(frozen=True)
class Command:
    """A command. ``run(session, argument)`` returns what it did. Raises InvalidRequest or WriteError."""

    usage: str
    meaning: str
    run: Callable[[Session, str], str]


def parse(text: str) -> tuple[str, str] | None:
    """Returns the command in a message and its argument, or None for a message to the model.

    "/usr/bin" and "// a comment" are messages: a command is one word in lower case.
    """
    result = _COMMAND.fullmatch(text)
    return (result[1], (result[2] or "").strip()) if result else None


def run(session: Session, name: str, argument: str) -> str:
    """Runs a command and returns its message. Raises InvalidRequest for unknown names and bad arguments."""
    command = COMMANDS.get(name)
    if command is None:
        known = ", ".join(f"/{each}" for each in COMMANDS)
        raise InvalidRequest(f"there is no command /{name}; known: {known}; a space before it sends it to the model")
    return command.run(session, argument)


def _speculative(session: Session, argument: str) -> str:
    choices: dict[str, int | None] = {"on": None, "off": 0}
    if argument and argument not in choices and not argument.isdecimal():
        raise InvalidRequest(f"/speculative takes on, off or a number of tokens a step, got {argument!r}")
    if argument:
        depth = choices[argument] if argument in choices else int(argument)
        _change(session, speculative_tokens=depth)
    depth = session.settings.speculative_tokens
    if not session.methods:
        return "no speculation: no method is loaded (start with --draft-model or --speculative-config)"
    state = "off" if depth == 0 else "on" if depth is None else f"{depth} tokens a step"
    return f"speculation: {state}, method {session.settings.method or session.methods[0]}"


def _method(session: Session, argument: str) -> str:
    if argument and argument not in session.methods:
        loaded = ", ".join(session.methods) or "none"
        raise InvalidRequest(
            f"the method {argument!r} is not loaded; loaded: {loaded}. Start with --method {argument} to have it"
        )
    if argument:
        _change(session, method=argument if len(session.methods) > 1 else None)
    return _speculative(session, "")


def _temperature(session: Session, argument: str) -> str:
    if argument:
        try:
            _change(session, temperature=float(argument))
        except ValueError as error:  # InvalidRequest is one too
            raise InvalidRequest(f"/temperature takes a number from 0 (greedy) upwards, got {argument!r}") from error
    return f"temperature: {session.settings.temperature:g}"


def _system(session: Session, argument: str) -> str:
    session.conversation.system = argument or None
    return "system message set" if argument else "no system message"


def _stats(session: Session, argument: str) -> str:
    from foretoken.cli.render import summary

    settings = session.settings
    lines = [
        _speculative(session, ""),
        f"temperature {settings.temperature:g} · at most {settings.max_tokens} tokens"
        + ("" if settings.seed is None else f" · seed {settings.seed}"),
    ]
    if not session.done:
        return "\n".join([*lines, "no answers yet"])
    stats = [each for each, _ in session.done]
    answers = f"{len(stats)} answer{'s' if len(stats) > 1 else ''}"
    lines.append(f"{answers} · {summary(stats, sum(seconds for _, seconds in session.done))}")
    drafted = zip_longest(*(each.drafted_per_position for each in stats), fillvalue=0)
    accepted = zip_longest(*(each.accepted_per_position for each in stats), fillvalue=0)
    positions = [f"{sum(stood)}/{sum(reached)}" for stood, reached in zip(accepted, drafted, strict=True)]
    if positions:
        lines.append("accepted of drafted, by position: " + " ".join(positions))
    return "\n".join(lines)


def _rejected(session: Session, argument: str) -> str:
    if argument not in ("", "on", "off"):
        raise InvalidRequest(f"/rejected takes on or off, got {argument!r}")
    if argument:
        _change(session, rejected=argument == "on")
    shown = session.settings.rejected
    return f"rejected drafts: {'shown' if shown else 'not shown'}" + (
        " (this screen has no colours, so they stay away all the same)" if shown and not session.screen.coloured else ""
    )


def _reset(session: Session, argument: str) -> str:
    session.conversation.reset()
    return "the conversation starts over"


def _save(session: Session, argument: str) -> str:
    if not argument:
        raise InvalidRequest("/save takes the name of a file; it becomes JSON with the messages and the figures")
    file = Path(argument).expanduser()
    write_json(check_output_file(file, JSON), session.record)
    return f"saved {len(session.conversation.messages)} messages to {file}"


def _help(session: Session, argument: str) -> str:
    width = max(len(command.usage) for command in COMMANDS.values())
    lines = [f"{command.usage:<{width}}  {command.meaning}" for command in COMMANDS.values()]
    keys = "Enter sends; Esc-Enter, or a backslash at the end, begins another line"
    return "\n".join([*lines, keys, "Ctrl-C stops an answer, Ctrl-D leaves"])


def _quit(session: Session, argument: str) -> str:
    session.finished = True
    return ""


def _change(session: Session, **fields: Any) -> None:
    """Changes a setting. Raises InvalidRequest if the value is not valid."""
    changed = replace(session.settings, **fields)
    changed.params(0)
    session.settings = changed


COMMANDS = {
    "speculative": Command("/speculative on|off|DEPTH", "draft, do not draft, or set the draft length", _speculative),
    "method": Command("/method NAME", "draft with another of the loaded methods", _method),
    "temperature": Command("/temperature T", "0 is greedy", _temperature),
    "system": Command("/system TEXT", "system message before the conversation; without text: none", _system),
    "stats": Command("/stats", "settings, and figures over all answers", _stats),
    "rejected": Command("/rejected on|off", "show drafted tokens that were refused", _rejected),
    "reset": Command("/reset", "forget the conversation, not the system message", _reset),
    "save": Command("/save FILE", "write messages and figures as JSON", _save),
    "help": Command("/help", "this list", _help),
    "quit": Command("/quit", "leave", _quit),
}


def names() -> Sequence[str]:
    """Returns all commands as they are typed."""
    return [f"/{name}" for name in COMMANDS]
