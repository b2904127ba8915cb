"""Answers of /v1/completions and /v1/chat/completions, whole and as chunks."""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from foretoken.outputs import CompletionOutput, StreamPiece
from foretoken.serve.chat_schema import ChatRequest, NamedTool
from foretoken.serve.errors import ApiError
from foretoken.serve.generation import Generation
from foretoken.serve.parsers import OutputEvent, OutputParser, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStarted
from foretoken.serve.preparation import PreparedRequest
from foretoken.serve.schema import CompletionRequest
from foretoken.serve.stream import DONE, AnswerWriter, event
from foretoken.serve.token_text import LegacyLogprobs, TokenText, chat_logprobs, prompt_logprobs, step_record

Choice = dict[str, Any]


class ChoicesWriter(AnswerWriter):
    """Writes an answer of choices: one object, or chunks as events, the usage and the end mark.

    ``object`` is the type of the whole answer, ``chunk_object`` that of a chunk.
    """

    object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, prepared: PreparedRequest[Any], token_text: TokenText) -> None:
        self._body, self._token_text = prepared.body, token_text
        options = self._body.stream_options
        self._usage = bool(options and options.include_usage)
        self._continuous = bool(options and options.continuous_usage_stats)
        self._begun = False
        self._parsers: list[OutputParser] = []  # of the choices
        self._waiting: defaultdict[int, list[StreamPiece]] = defaultdict(list)  # pieces without text yet, by choice

    @property
    def _reasoning_tokens(self) -> int:
        return sum(parser.reasoning_tokens for parser in self._parsers)

    @abstractmethod
    def _all_choices(self, finals: Mapping[int, StreamPiece]) -> list[Choice]:
        """Returns the choices of the whole answer. finals: the last piece of every choice, by its number."""

    @abstractmethod
    def _new_choices(self, number: int, piece: StreamPiece) -> list[Choice]:
        """Returns the new content of a choice, one for each chunk; at least one for the choice's last piece."""

    @abstractmethod
    def _empty_choice(self, number: int) -> Choice:
        """Returns a choice without new content."""

    def _prompt_fields(self, final: StreamPiece | None) -> dict[str, Any]:
        """Returns further fields of the whole answer, whose first piece is ``final``, or of the first chunk."""
        return {}

    def _take_waiting(self, number: int) -> tuple[list[int], list[Any]]:
        """Returns tokens and log-probabilities of the pieces of a choice that waited for their text."""
        pieces = self._waiting.pop(number, [])
        tokens = [token for piece in pieces for token in piece.token_ids]
        return tokens, [entry for piece in pieces for entry in piece.logprobs or ()]

    def answer(self, generation: Generation, finals: Mapping[int, StreamPiece]) -> Mapping[str, Any]:
        choices = self._all_choices(finals)
        return {
            **self._head(generation, self.object),
            "choices": choices,
            "usage": generation.usage(self._reasoning_tokens),
            "metrics": generation.speculation(self._body.return_steps),
            **self._prompt_fields(finals[0]),
        }

    def piece(self, generation: Generation, piece: StreamPiece) -> bytes:
        number = generation.number(piece)
        choices = self._new_choices(number, piece)
        if self._body.return_steps and not choices:
            choices = [self._empty_choice(number)]
        usage = generation.usage(self._reasoning_tokens) if self._continuous else None
        extra = {"usage": usage} if self._usage else {}
        chunks = [self._head(generation, self.chunk_object) | {"choices": [choice]} | extra for choice in choices]
        if chunks and not self._begun:
            self._begun = True
            chunks[0] |= self._prompt_fields(None)
        if self._body.return_steps:
            chunks[-1]["steps"] = [step_record(piece, number, self._token_text)]
        if generation.finished and not self._usage:
            chunks[-1]["metrics"] = generation.speculation(self._body.return_steps)
        return b"".join(map(event, chunks))

    def closing(self, generation: Generation) -> bytes:
        if not self._usage:
            return DONE
        usage, metrics = generation.usage(self._reasoning_tokens), generation.speculation(self._body.return_steps)
        last = {"choices": [], "usage": usage, "metrics": metrics}
        return event(self._head(generation, self.chunk_object) | last) + DONE

    def failure(self, generation: Generation, error: ApiError) -> bytes:
        return event(error.body())  # no end mark follows

    def _head(self, generation: Generation, kind: str) -> dict[str, Any]:
        return {"id": generation.id, "object": kind, "created": generation.created, "model": generation.model}


class CompletionWriter(ChoicesWriter):
    """Writes completions. ``best_of`` returns those with the highest log-probability per token."""

    object = chunk_object = "text_completion"

    def __init__(self, prepared: PreparedRequest[CompletionRequest], token_text: TokenText) -> None:
        super().__init__(prepared, token_text)
        self._prompts = prepared.prompts
        self._per_prompt, self._shown = prepared.params.n, prepared.max_tokens > 0
        count = len(self._prompts) * self._per_prompt
        self._logprobs = [LegacyLogprobs(token_text, self._body.logprobs or 0) for _ in range(count)]

    def _all_choices(self, finals: Mapping[int, StreamPiece]) -> list[Choice]:
        n = self._body.n or 1
        choices: list[Choice] = []
        for start in range(0, len(finals), self._per_prompt):
            numbers: Sequence[int] = range(start, start + self._per_prompt)
            if n < self._per_prompt:
                numbers = sorted(numbers, key=lambda number: -_mean_logprob(finals[number].output))[:n]
            for number in numbers:
                output = finals[number].output
                assert output is not None
                choice = self._choice(number, output.text, output.token_ids, output.logprobs, finals[number])
                choices.append(choice | {"index": len(choices)})
        return choices

    def _new_choices(self, number: int, piece: StreamPiece) -> list[Choice]:
        waiting = self._waiting[number]
        waiting.append(piece)
        first = piece.step.position == 0
        if not (piece.text or piece.output is not None or (first and self._body.echo)):
            return []  # its log-probabilities come with the text
        text = "".join(part.text for part in waiting)
        tokens, logprobs = self._take_waiting(number)
        return [self._choice(number, text, tokens, logprobs, piece, waiting[0])]

    def _empty_choice(self, number: int) -> Choice:
        return {"index": number, "text": "", "logprobs": None, "finish_reason": None, "stop_reason": None}

    def _choice(
        self,
        number: int,
        text: str,
        tokens: Sequence[int],
        logprobs: Any,
        last: StreamPiece,
        first: StreamPiece | None = None,
    ) -> Choice:
        """Returns a choice. ``text`` is without the echo, ``first`` is None if ``last`` has the whole output."""
        if not self._shown:
            text, tokens, logprobs = "", (), ()
        entries = list(logprobs or ())
        generated = tokens = list(tokens)
        prompt, begins = self._prompts[number // self._per_prompt], first is None or first.step.position == 0
        if self._body.echo and begins:
            text = prompt.text + text
            tokens = [*prompt.ids, *tokens]
            entries = [*((first or last).prompt_logprobs or ()), *entries]
        output = last.output
        reason = None if output is None else "length" if not self._shown else output.finish_reason
        choice: Choice = {
            "index": number,
            "text": text,
            "logprobs": None if self._body.logprobs is None else self._logprobs[number].of(tokens, entries),
            "finish_reason": reason,
            "stop_reason": output.stop_reason if output is not None and self._shown else None,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = generated
            if begins:
                choice["prompt_token_ids"] = prompt.ids
        if (top := self._body.prompt_logprobs) is not None:
            choice["prompt_logprobs"] = prompt_logprobs(prompt.ids, last.prompt_logprobs or (), top)
        return choice


def _mean_logprob(output: CompletionOutput | None) -> float:
    """Returns the log-probability per token, by which ``best_of`` chooses."""
    assert output is not None and output.logprobs is not None
    total = sum(entries[token].logprob for token, entries in zip(output.token_ids, output.logprobs, strict=True))
    return total / max(1, len(output.token_ids))


class ChatWriter(ChoicesWriter):
    """Writes messages of a chat. In a stream, role, content, calls and finish reason are sent in separate chunks."""

    object, chunk_object = "chat.completion", "chat.completion.chunk"

    def __init__(self, prepared: PreparedRequest[ChatRequest], token_text: TokenText) -> None:
        super().__init__(prepared, token_text)
        self._prompt = prepared.prompts[0]
        self._parsers = [prepared.output.parser() for _ in range(prepared.params.n)]

    def _all_choices(self, finals: Mapping[int, StreamPiece]) -> list[Choice]:
        return [self._choice(number, final) for number, final in finals.items()]

    def _new_choices(self, number: int, piece: StreamPiece) -> list[Choice]:
        parser = self._parsers[number]
        self._waiting[number].append(piece)
        events = parser.push(piece.text, piece.token_ids)
        if piece.output is not None:
            events += parser.finish()
        choices = [self._empty_choice(number) | {"delta": delta} for delta in _deltas(events)]
        if piece.output is not None:
            reason = self._reason(parser, piece.output)
            ending = {"finish_reason": reason, "stop_reason": piece.output.stop_reason}
            choices.append(self._empty_choice(number) | ending)
        if choices:  # log-probabilities and ids are in the chunk of their tokens' text, or in a later one
            choices[0] |= self._token_fields(*self._take_waiting(number))
        if piece.step.position == 0:
            role = {"role": "assistant", "content": "", "refusal": None}
            choices.insert(0, self._empty_choice(number) | {"delta": role})
        return choices

    def _empty_choice(self, number: int) -> Choice:
        return {"index": number, "delta": {}, "logprobs": None, "finish_reason": None}

    def _prompt_fields(self, final: StreamPiece | None) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if final is not None and (top := self._body.prompt_logprobs) is not None:
            fields["prompt_logprobs"] = prompt_logprobs(self._prompt.ids, final.prompt_logprobs or (), top)
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = self._prompt.ids
        return fields

    def _choice(self, number: int, final: StreamPiece) -> Choice:
        output, parser = final.output, self._parsers[number]
        assert output is not None
        events = [*parser.push(output.text, output.token_ids), *parser.finish()]
        ending = {"finish_reason": self._reason(parser, output), "stop_reason": output.stop_reason}
        base = {"index": number, "message": message_of(events), "logprobs": None, **ending}
        return base | self._token_fields(list(output.token_ids), output.logprobs)

    def _token_fields(self, tokens: list[int], entries: Any) -> dict[str, Any]:
        """Returns the fields of a choice about its tokens, as far as the request asks for them."""
        fields: dict[str, Any] = {}
        if self._body.logprobs:
            logprobs = chat_logprobs(self._token_text, tokens, entries or (), self._body.top_logprobs or 0)
            fields["logprobs"] = {"content": logprobs, "refusal": None}
        return fields | ({"token_ids": tokens} if self._body.return_token_ids else {})

    def _reason(self, parser: OutputParser, output: CompletionOutput) -> str | None:
        """Returns OpenAI's finish reason.

        It is "tool_calls" after complete calls that the model chose; for a function that the client named, or after a
        call that a stop string cut, it is "stop".
        """
        named = isinstance(self._body.tool_choice, NamedTool)
        cut = parser.cut and isinstance(output.stop_reason, str)
        called = output.finish_reason == "stop" and parser.calls and not cut and not named
        return "tool_calls" if called else output.finish_reason


def _deltas(events: Iterable[OutputEvent]) -> list[dict[str, Any]]:
    """Returns OpenAI's deltas of a chat."""
    deltas: list[dict[str, Any]] = []
    for output_event in events:
        match output_event:
            case TextDelta(text):
                deltas.append({"content": text})
            case ReasoningDelta(text):
                deltas.append({"reasoning_content": text})
            case ToolCallStarted(index, identifier, name):
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": f"call_{identifier}", "type": "function", "function": function}
                deltas.append({"tool_calls": [call]})
            case ToolCallDelta(index, arguments):
                deltas.append({"tool_calls": [{"index": index, "function": {"arguments": arguments}}]})
    return deltas


def message_of(events: Iterable[OutputEvent]) -> dict[str, Any]:
    """Returns OpenAI's message that is the sum of an answer's events."""
    texts: dict[str, str] = {}
    calls: list[dict[str, Any]] = []
    for delta in _deltas(events):
        for call in delta.pop("tool_calls", ()):
            if "id" in call:
                calls.append({"id": call["id"], "type": call["type"], "function": call["function"]})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        for name, text in delta.items():
            texts[name] = texts.get(name, "") + text
    content = texts.get("content", None if calls else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning := texts.get("reasoning_content"):
        message["reasoning_content"] = reasoning
    return message | ({"tool_calls": calls} if calls else {})
