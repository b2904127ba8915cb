"""Records the race of ``foretoken demo`` as an animated SVG, for the README.

    .venv/bin/python docs/record_demo.py
    .venv/bin/python docs/record_demo.py --output race.svg -- --prompts 2 --temperature 1

The command runs in a pseudo-terminal. Its output is replayed on a small terminal emulator, and each change of the
screen becomes a frame. Frames keep their recorded times; only pauses longer than a second, which are loading and
warm-up, are cut to one. Leave the machine alone meanwhile: the clocks in the picture are those of the run.
"""

from __future__ import annotations

import argparse
import codecs
import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
import time
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

OUTPUT = Path(__file__).parent / "img" / "race.svg"
COLUMNS, ROWS = 100, 20
CELL_WIDTH, CELL_HEIGHT, MARGIN, TITLE_HEIGHT = 8.4, 17, 12, 30  # pixels
MAX_PAUSE, FINAL_PAUSE = 1.0, 5.0  # seconds
BURST = 0.02  # seconds; output with shorter gaps is one drawing of the screen
_CONTROL = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|\x1b.|[\r\n\b]|[^\x1b\r\n\b]+")
_CLASSES = {"1": "b", "2": "d", "9": "s", "32": "g"}  # SGR codes of bold, dim, struck out and green

Cell = tuple[str, str]  # a character and its CSS classes
Line = tuple[Cell, ...]
BLANK: Cell = (" ", "")


@dataclass
class Screen:
    """A terminal that knows what rich writes: colours, cursor movements, erasing and scrolling."""

    cells: list[list[Cell]] = field(default_factory=lambda: [[BLANK] * COLUMNS for _ in range(ROWS)])
    row: int = 0
    column: int = 0
    style: str = ""

    def feed(self, text: str) -> None:
        """Applies ``text``, which holds whole escape sequences."""
        for match in _CONTROL.finditer(text):
            if match[2]:
                self._control(match[1], match[2])
            elif match[0] == "\r":
                self.column = 0
            elif match[0] == "\n":
                self._line_feed()
            elif match[0] == "\b":
                self.column = max(0, self.column - 1)
            elif not match[0].startswith("\x1b"):
                for character in match[0]:
                    self._put(character)

    def lines(self) -> tuple[Line, ...]:
        """The rows of the screen."""
        return tuple(tuple(row) for row in self.cells)

    def _put(self, character: str) -> None:
        if self.column == COLUMNS:
            self.column = 0
            self._line_feed()
        self.cells[self.row][self.column] = (character, self.style)
        self.column += 1

    def _line_feed(self) -> None:
        self.row += 1
        if self.row == ROWS:
            self.row = ROWS - 1
            del self.cells[0]
            self.cells.append([BLANK] * COLUMNS)

    def _control(self, parameters: str, letter: str) -> None:
        count = int(parameters) if parameters.isdigit() else 1
        if letter == "m":
            for code in parameters.split(";"):
                self.style = " ".join(filter(None, (self.style, _CLASSES.get(code)))) if code not in ("", "0") else ""
        elif letter == "A":
            self.row = max(0, self.row - count)
        elif letter == "K":
            start = 0 if parameters == "2" else self.column
            self.cells[self.row][start:] = [BLANK] * (COLUMNS - start)


@dataclass(frozen=True)
class Frame:
    """The screen, and the seconds it stays."""

    lines: tuple[Line, ...]
    seconds: float


def record(arguments: list[str]) -> list[tuple[float, str]]:
    """Runs ``foretoken demo`` in a pseudo-terminal. Returns its output with the second each part came at."""
    parent, child = os.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    environment.pop("NO_COLOR", None)
    command = [sys.executable, "-m", "foretoken", "demo", *arguments]
    parts = []
    decoder = codecs.getincrementaldecoder("utf-8")()
    with subprocess.Popen(command, stdout=child, stderr=child, stdin=child, env=environment) as process:
        os.close(child)
        while True:
            try:
                data = os.read(parent, 1 << 16)
            except OSError:  # Linux reports the end of a pseudo-terminal as an error
                break
            if not data:
                break
            parts.append((time.monotonic(), decoder.decode(data)))
    os.close(parent)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return parts


def film(parts: list[tuple[float, str]]) -> list[Frame]:
    """The frames of a recording, from the first lane on."""
    bursts = [parts[0]]
    last = parts[0][0]
    for second, text in parts[1:]:
        if second - last < BURST:
            bursts[-1] = (bursts[-1][0], bursts[-1][1] + text)
        else:
            bursts.append((second, text))
        last = second
    screen, frames = Screen(), list[Frame]()
    shown, since = screen.lines(), bursts[0][0]
    for second, text in bursts:
        screen.feed(text)
        if screen.lines() != shown:
            frames.append(Frame(shown, min(second - since, MAX_PAUSE)))
            shown, since = screen.lines(), second
    frames.append(Frame(screen.lines(), FINAL_PAUSE))
    first = next(i for i, frame in enumerate(frames) if any("speculative ·" in _text(line) for line in frame.lines))
    return frames[first:]


def _text(line: Line) -> str:
    return "".join(character for character, _ in line)


def _svg_line(line: Line) -> str:
    """The runs of one style, each at its own place and width, so that any monospaced font fits the grid."""
    runs: list[tuple[int, str, str]] = []
    for column, (character, style) in enumerate(line):
        if runs and runs[-1][2] == style:
            runs[-1] = (runs[-1][0], runs[-1][1] + character, style)
        else:
            runs.append((column, character, style))
    spans = []
    for column, text, style in runs:
        inked = text.rstrip()
        if not inked:
            continue
        start = column + len(inked) - len(inked.lstrip())
        inked = inked.lstrip()
        kind = f' class="{style}"' if style else ""
        spans.append(
            f'<tspan x="{start * CELL_WIDTH:g}" textLength="{len(inked) * CELL_WIDTH:g}"{kind}>{escape(inked)}</tspan>'
        )
    return "".join(spans)


STYLE = """
text { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #c9d1d9;
  white-space: pre }
.b { font-weight: bold; fill: #ffffff } .d { fill: #8b949e } .g { fill: #3fb950 } .s { text-decoration: line-through }
.film { animation: film %(seconds)gs steps(1, end) infinite }
@keyframes film { %(keys)s }
@media (prefers-reduced-motion: reduce) { .film { animation: none; transform: translateX(%(last)gpx) } }
"""


def svg(frames: list[Frame], title: str) -> str:
    """One picture: all frames side by side behind a window that jumps from one to the next."""
    width, height = COLUMNS * CELL_WIDTH, ROWS * CELL_HEIGHT
    numbers: dict[Line, int] = {}
    groups, keys, passed = [], [], 0.0
    total = sum(frame.seconds for frame in frames)
    for index, frame in enumerate(frames):
        uses = []
        for row, line in enumerate(frame.lines):
            if _text(line).strip():
                number = numbers.setdefault(line, len(numbers))
                uses.append(f'<use href="#l{number}" y="{(row + 1) * CELL_HEIGHT - 4}"/>')
        groups.append(f'<g transform="translate({index * width:g})">{"".join(uses)}</g>')
        keys.append(f"{100 * passed / total:.3f}% {{ transform: translateX({-index * width:g}px) }}")
        passed += frame.seconds
    lines = "\n".join(f'<text id="l{number}">{_svg_line(line)}</text>' for line, number in numbers.items())
    style = STYLE % {"seconds": total, "keys": " ".join(keys), "last": -(len(frames) - 1) * width}
    outer_width, outer_height = width + 2 * MARGIN, height + TITLE_HEIGHT + MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {outer_width:g} {outer_height:g}" '
        f'width="{outer_width:g}" height="{outer_height:g}" role="img" aria-label="{escape(title)}">\n'
        f"<style>{style}</style>\n<defs>\n{lines}\n</defs>\n"
        f'<rect width="{outer_width:g}" height="{outer_height:g}" rx="8" fill="#0d1117"/>\n'
        f'<text x="{MARGIN}" y="20" class="d">$ {escape(title)}</text>\n'
        f'<svg x="{MARGIN}" y="{TITLE_HEIGHT}" width="{width:g}" height="{height}" viewBox="0 0 {width:g} {height}">\n'
        f'<g class="film">{"".join(groups)}</g>\n</svg>\n</svg>\n'
    )


def main(output: Path, arguments: list[str]) -> None:
    """Records, and writes the picture."""
    frames = film(record(arguments))
    output.write_text(svg(frames, " ".join(["foretoken demo", *arguments])), encoding="utf-8")
    sys.stdout.write(f"{output}: {len(frames)} frames, {output.stat().st_size / 1000:.0f} KB\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("arguments", nargs="*", help="options of foretoken demo, after --")
    options = parser.parse_args()
    main(options.output, options.arguments)
