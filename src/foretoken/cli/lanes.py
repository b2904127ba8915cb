"""Output of the demo: two lanes that fill while they are measured, or plain blocks without a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from foretoken.bench.measure import TimedCompletion
from foretoken.cli.render import Origins, Span, legend, marked, styled
from foretoken.cli.theme import waiting
from foretoken.outputs import StreamPiece

NAMES = ("plain", "speculative")
_NARROW = 90  # columns under which two lanes are not readable side by side
_REFRESH = 0.1  # seconds between redraws, which are not measured


@dataclass
class Lane:
    """One side: the spans so far and the seconds its run has taken."""

    name: str
    tokens: int = 0
    seconds: float = 0.0
    spans: list[Span] = field(default_factory=list)
    run: TimedCompletion | None = None
    _origins: Origins | None = None

    def begin(self, origins: Origins) -> None:
        """Prepares for the first piece."""
        self._origins = origins

    def push(self, piece: StreamPiece, seconds: float) -> None:
        """Adds a piece. seconds: time of the run."""
        if self._origins is not None:
            self.spans += self._origins.push(piece)
        self.tokens += len(piece.token_ids)
        self.seconds = seconds

    def end(self, run: TimedCompletion) -> None:
        """Stores the finished run."""
        self.run, self.seconds = run, run.seconds

    @property
    def title(self) -> str:
        """Name, tokens, seconds and rate."""
        rate = f"{self.tokens / self.seconds:.1f} tok/s" if self.seconds else "waiting"
        return f"{self.name} · {self.tokens} tokens · {self.seconds:.2f} s · {rate}"

    @property
    def acceptance(self) -> str:
        """The mean acceptance length of a finished run that drafted, else nothing."""
        if self.run is None or not self.run.output.stats.drafts:
            return ""
        return f"mean acceptance {self.run.output.stats.mean_acceptance_length:.2f}"


class Stage(Protocol):
    """Output of the demo."""

    def say(self, text: str) -> None:
        """Shows a sentence about what happens."""
        ...

    def status(self, text: str) -> AbstractContextManager[Any]:
        """Shows that something takes a while."""
        ...

    def race(self, prompt: str, index: int, count: int, tokens: int) -> AbstractContextManager[tuple[Lane, Lane]]:
        """Yields the two lanes of one prompt."""
        ...

    def result(self, record: dict[str, Any]) -> None:
        """Shows the final figures."""
        ...


def stage(console: Console, *, quiet: bool = False) -> Stage:
    """Returns two live lanes on a wide terminal, blocks of text elsewhere, and only progress if ``quiet``."""
    if quiet:
        return Quiet(console)
    if console.file.isatty() and console.width >= _NARROW and console.color_system is not None:
        return Lanes(console)
    return StackedLanes(console)


class Quiet:
    """Writes nothing to standard output, and shows a spinner on a terminal."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, text: str) -> None:
        """Nothing."""

    def status(self, text: str) -> AbstractContextManager[Any]:
        return waiting(self.console, text)

    @contextmanager
    def race(self, prompt: str, index: int, count: int, tokens: int) -> Iterator[tuple[Lane, Lane]]:
        yield Lane(NAMES[0]), Lane(NAMES[1])

    def result(self, record: dict[str, Any]) -> None:
        """Nothing."""


class StackedLanes(Quiet):
    """Plain blocks one after another, for pipes, logs and narrow windows."""

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=not self.console.is_terminal)

    @contextmanager
    def race(self, prompt: str, index: int, count: int, tokens: int) -> Iterator[tuple[Lane, Lane]]:
        lanes = Lane(NAMES[0]), Lane(NAMES[1])
        yield lanes
        coloured = self.console.color_system is not None
        self.say(f"\n--- {index + 1} of {count}")
        for lane in lanes:
            self.say(" · ".join(filter(None, (lane.title, lane.acceptance))))
        self.console.print(legend(coloured), soft_wrap=True)
        spans = lanes[1].spans
        self.console.print(prompt, end="", style="dim", markup=False, soft_wrap=True)
        body = styled(spans) if coloured else Text(marked(spans))
        self.console.print(body, soft_wrap=True)

    def result(self, record: dict[str, Any]) -> None:
        plain, fast = record["plain"], record["speculative"]
        self.console.print()
        table = Table(box=None, pad_edge=False)
        table.add_column("")
        for head in ("tokens/s", "speed-up", "mean acceptance length"):
            table.add_column(head, justify="right")
        table.add_row("plain", f"{plain['tokens_per_second']:.1f}", "1.00x", "")
        table.add_row(
            "speculative",
            f"{fast['tokens_per_second']:.1f}",
            f"{record['speedup']:.2f}x",
            f"{fast['mean_acceptance_length']:.2f}",
        )
        self.console.print(table)
        self.say(f"texts identical: {'yes' if record['identical'] else 'NO'}")


class Lanes(StackedLanes):
    """Two panels side by side, redrawn between pieces, never while the clock runs."""

    @contextmanager
    def race(self, prompt: str, index: int, count: int, tokens: int) -> Iterator[tuple[Lane, Lane]]:
        lanes = _LiveLane(NAMES[0]), _LiveLane(NAMES[1])
        heading = Text.assemble((f"{index + 1} of {count}   ", "dim"), legend(coloured=True))
        self.console.print()
        self.console.print(heading)
        height = max(8, min(22, self.console.height - 5))

        def frame() -> Table:
            grid = Table.grid(expand=True)
            for _ in lanes:
                grid.add_column(ratio=1)
            width = self.console.width // 2 - 4
            grid.add_row(*(_panel(self.console, lane, prompt, width, height) for lane in lanes))
            return grid

        with Live(frame(), console=self.console, auto_refresh=False, vertical_overflow="crop") as live:

            def draw() -> None:
                live.update(frame(), refresh=True)

            for lane in lanes:
                lane.draw = draw
            yield lanes
            draw()


class _LiveLane(Lane):
    """A lane that is redrawn from time to time."""

    draw: Any = None
    drawn: float = 0.0

    def push(self, piece: StreamPiece, seconds: float) -> None:
        super().push(piece, seconds)
        now = monotonic()
        if self.draw is not None and now - self.drawn >= _REFRESH:
            self.drawn = now
            self.draw()


def _panel(console: Console, lane: Lane, prompt: str, width: int, height: int) -> Panel:
    """Returns the last lines of prompt and completion that fit."""
    body = Text.assemble((prompt, "dim"), styled(lane.spans))
    body.expand_tabs(4)
    lines = body.wrap(console, width)[-height + 2 :]
    finished = lane.run is not None and lane.name == NAMES[1]
    return Panel(
        Text("\n").join(lines),
        title=lane.title,
        title_align="left",
        subtitle=lane.acceptance or None,
        subtitle_align="left",
        height=height,
        border_style="green" if finished else "dim",
    )
