"""Output of the demo: two lanes that fill while they are measured, or plain blocks without a terminal."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

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
    """One side: the spans so far and the seconds its run has taken. ``draw`` redraws it from time to time."""

    name: str
    draw: Callable[[], None] | None = None
    origins: Origins | None = None
    tokens: int = 0
    seconds: float = 0.0
    spans: list[Span] = field(default_factory=list)
    run: TimedCompletion | None = None
    _drawn: float = 0.0

    def push(self, piece: StreamPiece, seconds: float) -> None:
        """Adds a piece. seconds: time of the run."""
        if self.origins is not None:
            self.spans += self.origins.push(piece)
        self.tokens += len(piece.token_ids)
        self.seconds = seconds
        now = monotonic()
        if self.draw is not None and now - self._drawn >= _REFRESH:
            self._drawn = now
            self.draw()

    def end(self, run: TimedCompletion) -> None:
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


def stage(console: Console, *, quiet: bool = False) -> "Stage":
    """Returns two live lanes on a wide terminal, blocks of text elsewhere, and only progress if ``quiet``."""
    if quiet:
        return Stage(console)
    if console.file.isatty() and console.width >= _NARROW and console.color_system is not None:
        return Lanes(console)
    return StackedLanes(console)


class Stage:
    """Output of the demo. This one writes nothing to standard output, and shows a spinner on a terminal."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, text: str) -> None:
        """Shows a sentence about what happens."""

    def status(self, text: str) -> AbstractContextManager[Any]:
        """Shows that something takes a while."""
        return waiting(self.console, text)

    @contextmanager
    def race(self, prompt: str, number: str) -> Iterator[tuple[Lane, Lane]]:
        """Yields the two lanes of one prompt. number: such as "1 of 4"."""
        yield Lane(NAMES[0]), Lane(NAMES[1])

    def result(self, record: dict[str, Any]) -> None:
        """Shows the final figures."""


class StackedLanes(Stage):
    """Plain blocks one after another, for pipes, logs and narrow windows."""

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=not self.console.is_terminal)

    @contextmanager
    def race(self, prompt: str, number: str) -> Iterator[tuple[Lane, Lane]]:
        with super().race(prompt, number) as lanes:
            yield lanes
        coloured = self.console.color_system is not None
        self.say(f"\n--- {number}")
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
        table = Table("", box=None, pad_edge=False)
        for head in ("tokens/s", "speed-up", "mean acceptance length"):
            table.add_column(head, justify="right")
        table.add_row("plain", f"{plain['tokens_per_second']:.1f}", "1.00x", "")
        figures = f"{record['speedup']:.2f}x", f"{fast['mean_acceptance_length']:.2f}"
        table.add_row("speculative", f"{fast['tokens_per_second']:.1f}", *figures)
        self.console.print(table)
        self.say(f"texts identical: {'yes' if record['identical'] else 'NO'}")


class Lanes(StackedLanes):
    """Two panels side by side, redrawn between pieces, never while the clock runs."""

    @contextmanager
    def race(self, prompt: str, number: str) -> Iterator[tuple[Lane, Lane]]:
        heading = Text.assemble((f"{number}   ", "dim"), legend(coloured=True))
        self.console.print()
        self.console.print(heading)
        height = max(8, min(22, self.console.height - 5))

        def frame() -> Table:
            grid = Table.grid(expand=True)
            for _ in NAMES:
                grid.add_column(ratio=1)
            width = self.console.width // 2 - 4
            grid.add_row(*(_panel(self.console, lane, prompt, width, height) for lane in lanes))
            return grid

        def draw() -> None:
            live.update(frame(), refresh=True)

        lanes = Lane(NAMES[0], draw), Lane(NAMES[1], draw)
        with Live(frame(), console=self.console, auto_refresh=False, vertical_overflow="crop") as live:
            yield lanes
            draw()


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
