"""Shows ``StreamPiece``s: the origin of each character, and its style."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from foretoken.cli.theme import MARKS, STYLES, TokenOrigin
from foretoken.core.step import StepOutput
from foretoken.engine.stopping import Detokenizer, Tokenizer
from foretoken.outputs import SpeculationStats, StreamPiece


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive characters of one origin."""

    text: str
    origin: TokenOrigin


class Origins:
    """Cuts the pieces of one completion into spans.

    A piece's text may lag behind its tokens (unfinished characters, a possible stop string), so the tokens'
    texts wait in a queue until the stream emits them.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens)
        self._waiting: deque[Span] = deque()

    def push(self, piece: StreamPiece) -> list[Span]:
        """Returns the spans of ``piece.text``. Rejected tokens come before the token that replaced them."""
        for index, token in enumerate(piece.token_ids):
            origin = TokenOrigin.ACCEPTED if index < piece.step.accepted else TokenOrigin.TARGET
            self._waiting.append(Span(self._detokenizer.push(token), origin))
        spans = self._take(piece.text)
        rejected = [piece.step.draft.ids[node] for node in piece.step.rejected]
        if rejected:
            at = next((i for i, span in enumerate(spans) if span.origin is TokenOrigin.TARGET), len(spans))
            spans.insert(at, Span(self._tokenizer.decode(rejected), TokenOrigin.REJECTED))
        return spans

    def _take(self, text: str) -> list[Span]:
        spans: list[Span] = []
        while text:
            known = self._waiting.popleft() if self._waiting else Span(text, TokenOrigin.TARGET)
            given, rest = known.text[: len(text)], known.text[len(text) :]
            if rest:
                self._waiting.appendleft(Span(rest, known.origin))
            if given:
                spans.append(Span(text[: len(given)], known.origin))
                text = text[len(given) :]
        return spans


def styled(spans: Iterable[Span], rejected: bool = True) -> Text:
    """Returns spans as rich text. Line breaks in rejected drafts are shown as a sign."""
    text = Text()
    for span in spans:
        if span.origin is not TokenOrigin.REJECTED:
            text.append(span.text, STYLES[span.origin])
        elif rejected:
            text.append(span.text.replace("\n", "⏎"), STYLES[span.origin])
    return text


def marked(spans: Iterable[Span]) -> str:
    """Returns spans as plain text with marks. Adjacent spans of one origin share a mark."""
    merged: list[Span] = []
    for span in spans:
        text = span.text.replace("\n", "⏎") if span.origin is TokenOrigin.REJECTED else span.text
        if merged and merged[-1].origin is span.origin:
            merged[-1] = Span(merged[-1].text + text, span.origin)
        elif text:
            merged.append(Span(text, span.origin))
    return "".join(MARKS[span.origin][0] + span.text + MARKS[span.origin][1] for span in merged)


def legend(coloured: bool) -> Text:
    words = {
        TokenOrigin.ACCEPTED: "draft, accepted",
        TokenOrigin.REJECTED: "draft, rejected",
        TokenOrigin.TARGET: "the target's own",
    }
    parts = [
        Text(word, STYLES[origin]) if coloured else Text(word.join(MARKS[origin])) for origin, word in words.items()
    ]
    return Text("   ").join(parts)


class TextWriter:
    """Streams spans to a console: styled if it has colours, otherwise unchanged."""

    def __init__(self, console: Console, *, rejected: bool = False) -> None:
        self._console, self._rejected = console, rejected
        self._coloured = console.color_system is not None
        self.at_line_start = True

    def write(self, spans: Sequence[Span]) -> None:
        plain = "".join(span.text for span in spans if span.origin is not TokenOrigin.REJECTED)
        if self._coloured:
            self._console.print(styled(spans, self._rejected), end="", soft_wrap=True)
        else:
            self._console.file.write(plain)
        self._console.file.flush()
        if plain:
            self.at_line_start = plain.endswith("\n")

    def end_line(self) -> None:
        """Begins a new line unless at the start of one."""
        if not self.at_line_start:
            self._console.file.write("\n")
            self._console.file.flush()
            self.at_line_start = True


def summary(stats: Sequence[SpeculationStats], seconds: float) -> str:
    """Returns the line at the end: "128 tokens · 41.0 tok/s · mean acceptance 3.40 · 61 % of drafts accepted"."""
    tokens, drafts = sum(s.tokens for s in stats), sum(s.drafts for s in stats)
    accepted, drafted = sum(s.accepted for s in stats), sum(s.drafted for s in stats)
    parts = [f"{tokens} token{'s' if tokens != 1 else ''}"]
    if seconds > 0:
        parts.append(f"{tokens / seconds:.1f} tok/s")
    if drafts:
        parts += [f"mean acceptance {1 + accepted / drafts:.2f}", f"{accepted} of {drafted} drafted tokens accepted"]
    else:
        parts.append("no drafts")
    return " · ".join(parts)


def decisions(steps: Sequence[StepOutput]) -> Table:
    """Returns a line for each step with the draft policy's numbers, see ``core.draft.Decision``."""
    names = ("token", "candidates", "drafted", "expected", "price", "speedup", "accepted", "sources")
    table = Table(*names, box=None, header_style="dim")
    for step in steps:
        decision, row = step.draft.decision, [""] * 6
        if decision is not None and decision.candidates:
            numbers = (f"{x:.2f}" for x in (decision.expected, decision.price, decision.speedup))
            sources = ", ".join(f"{name} {count}" for name, count in Counter(decision.sources).items())
            row = [str(decision.candidates), str(len(step.draft)), *numbers, sources]
        table.add_row(str(step.position), *row[:5], str(step.accepted or ""), row[5])
    return table
