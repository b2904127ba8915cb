"""A chat: its conversation, cut to the context length, its settings, and commands such as ``/temperature 0.5``."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.cli.files import check_output_file, write_json
from foretoken.cli.grouped import option
from foretoken.cli.options import SpeculativeTokens, TopP
from foretoken.core.artifacts import JSON
from foretoken.core.errors import InvalidRequest
from foretoken.engine.prompts import apply_template, own_template
from foretoken.params import SamplingParams

if TYPE_CHECKING:
    from foretoken.llm import LLM
    from foretoken.outputs import SpeculationStats


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


class Chat:
    """A conversation with a model, on which commands act.

    Attributes:
        conversation: The conversation so far.
        settings: Settings of the next answer.
        coloured: Whether rejected tokens can be shown.
        done: Statistics and seconds of every answer so far.
        finished: Whether the chat ends.
    """

    def __init__(self, llm: LLM, conversation: Conversation, settings: ChatSettings, coloured: bool) -> None:
        self.llm, self.conversation, self.settings, self.coloured = llm, conversation, settings, coloured
        self.done: list[tuple[SpeculationStats, float]] = []
        self.finished = False

    @property
    def methods(self) -> tuple[str, ...]:
        """The loaded methods, the selected one first; empty without speculation."""
        return tuple(name for name in self.llm.methods if name != "none")

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


@dataclass(frozen=True)
class Command:
    """A command. ``run(chat, argument)`` returns what it did. Raises InvalidRequest or WriteError."""

    usage: str
    meaning: str
    run: Callable[[Chat, str], str]


def parse(text: str) -> tuple[str, str] | None:
    """Returns the command in a message and its argument, or None for a message to the model.

    "/usr/bin" and "// a comment" are messages: a command is one word in lower case.
    """
    result = _COMMAND.fullmatch(text)
    return (result[1], (result[2] or "").strip()) if result else None


def run(chat: Chat, name: str, argument: str) -> str:
    """Runs a command and returns its message. Raises InvalidRequest for unknown names and bad arguments."""
    command = COMMANDS.get(name)
    if command is None:
        known = ", ".join(f"/{each}" for each in COMMANDS)
        raise InvalidRequest(f"there is no command /{name}; known: {known}; a space before it sends it to the model")
    return command.run(chat, argument)


def _speculative(chat: Chat, argument: str) -> str:
    choices: dict[str, int | None] = {"on": None, "off": 0}
    if argument and argument not in choices and not argument.isdecimal():
        raise InvalidRequest(f"/speculative takes on, off or a number of tokens a step, got {argument!r}")
    if argument:
        depth = choices[argument] if argument in choices else int(argument)
        _change(chat, speculative_tokens=depth)
    depth = chat.settings.speculative_tokens
    if not chat.methods:
        return "no speculation: no method is loaded (start with --draft-model or --speculative-config)"
    state = "off" if depth == 0 else "on" if depth is None else f"{depth} tokens a step"
    return f"speculation: {state}, method {chat.settings.method or chat.methods[0]}"


def _method(chat: Chat, argument: str) -> str:
    if argument and argument not in chat.methods:
        loaded = ", ".join(chat.methods) or "none"
        raise InvalidRequest(
            f"the method {argument!r} is not loaded; loaded: {loaded}. Start with --method {argument} to have it"
        )
    if argument:
        _change(chat, method=argument if len(chat.methods) > 1 else None)
    return _speculative(chat, "")


def _temperature(chat: Chat, argument: str) -> str:
    if argument:
        try:
            _change(chat, temperature=float(argument))
        except ValueError as error:  # InvalidRequest is one too
            raise InvalidRequest(f"/temperature takes a number from 0 (greedy) upwards, got {argument!r}") from error
    return f"temperature: {chat.settings.temperature:g}"


def _system(chat: Chat, argument: str) -> str:
    chat.conversation.system = argument or None
    return "system message set" if argument else "no system message"


def _stats(chat: Chat, argument: str) -> str:
    from foretoken.cli.render import summary

    settings = chat.settings
    lines = [
        _speculative(chat, ""),
        f"temperature {settings.temperature:g} · at most {settings.max_tokens} tokens"
        + ("" if settings.seed is None else f" · seed {settings.seed}"),
    ]
    if not chat.done:
        return "\n".join([*lines, "no answers yet"])
    stats = [each for each, _ in chat.done]
    answers = f"{len(stats)} answer{'s' if len(stats) > 1 else ''}"
    lines.append(f"{answers} · {summary(stats, sum(seconds for _, seconds in chat.done))}")
    drafted = zip_longest(*(each.drafted_per_position for each in stats), fillvalue=0)
    accepted = zip_longest(*(each.accepted_per_position for each in stats), fillvalue=0)
    positions = [f"{sum(stood)}/{sum(reached)}" for stood, reached in zip(accepted, drafted, strict=True)]
    if positions:
        lines.append("accepted of drafted, by position: " + " ".join(positions))
    return "\n".join(lines)


def _rejected(chat: Chat, argument: str) -> str:
    if argument not in ("", "on", "off"):
        raise InvalidRequest(f"/rejected takes on or off, got {argument!r}")
    if argument:
        _change(chat, rejected=argument == "on")
    shown = chat.settings.rejected
    return f"rejected drafts: {'shown' if shown else 'not shown'}" + (
        " (this screen has no colours, so they stay away all the same)" if shown and not chat.coloured else ""
    )


def _reset(chat: Chat, argument: str) -> str:
    chat.conversation.reset()
    return "the conversation starts over"


def _save(chat: Chat, argument: str) -> str:
    if not argument:
        raise InvalidRequest("/save takes the name of a file; it becomes JSON with the messages and the figures")
    file = Path(argument).expanduser()
    write_json(check_output_file(file, JSON), chat.record)
    return f"saved {len(chat.conversation.messages)} messages to {file}"


def _help(chat: Chat, argument: str) -> str:
    width = max(len(command.usage) for command in COMMANDS.values())
    lines = [f"{command.usage:<{width}}  {command.meaning}" for command in COMMANDS.values()]
    keys = "Enter sends; Esc-Enter, or a backslash at the end, begins another line"
    return "\n".join([*lines, keys, "Ctrl-C stops an answer, Ctrl-D leaves"])


def _quit(chat: Chat, argument: str) -> str:
    chat.finished = True
    return ""


def _change(chat: Chat, **fields: Any) -> None:
    """Changes a setting. Raises InvalidRequest if the value is not valid."""
    changed = replace(chat.settings, **fields)
    changed.params(0)
    chat.settings = changed


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
