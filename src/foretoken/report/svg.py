"""Matplotlib's drawings as inline SVG: the page's colours, no references to other elements, and tooltips.

Colours become variables of the style sheet, so that a drawing follows the page's light or dark theme.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from io import StringIO
from typing import TYPE_CHECKING, Any

from foretoken.core.errors import InvalidRequest
from foretoken.report.markup import Html, compact, element, text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SERIES = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f")  # "C0", "C1", ...
_VARIABLES = {"#000000": "ink", "#8b98ab": "theirs", "#808080": "dim", "#b0b0b0": "line", "#ffffff": "paper"} | {
    colour: f"c{i}" for i, colour in enumerate(_SERIES)
}
_STYLE: dict[Any, Any] = {
    "axes.prop_cycle": f"cycler('color', {list(_SERIES)})",
    "text.color": "k",
    "grid.color": "#b0b0b0",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    **dict.fromkeys(("font.size", "axes.titlesize", "legend.fontsize"), 13),
    "axes.titlelocation": "left",
    **dict.fromkeys(("axes.titlecolor", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), "0.5"),
    **dict.fromkeys(("axes.spines.left", "axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.xmargin", "axes.ymargin", "xtick.major.size", "ytick.major.size"), 0),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor"), "none"),
    **dict.fromkeys(("xtick.major.pad", "ytick.major.pad"), 6),
    "axes.axisbelow": True,
    "axes.autolimit_mode": "round_numbers",
    "lines.solid_capstyle": "butt",
}


def render(width: float, height: float, paint: Callable[[Figure], None], tips: Iterable[str]) -> Html:
    """Returns the shapes that ``paint`` renders, in the page's colours, without references, and with tooltips.

    Args:
        width: Width of the canvas, in the units of the drawing.
        paint: Draws on a figure of matplotlib.
        tips: Tooltips of the markers, or of the shapes with ids "step-<number>", in drawing order.

    Raises:
        InvalidRequest: Matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidRequest("charts need matplotlib; pip install 'foretoken[report]'") from error
    buffer = StringIO()
    with rc_context(_STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # matplotlib's font lacks a character; browsers have more fonts
        canvas = Figure(figsize=(width / 72, height / 72))
        paint(canvas)
        canvas.savefig(buffer, format="svg")
    return _inline(buffer.getvalue(), tips)


def _inline(svg: str, tips: Iterable[str]) -> Html:
    pending = iter(tips)
    shapes = svg[svg.index('<g id="figure_1">') : svg.rindex("</svg>")]
    shapes = re.sub("<[^>]+>", lambda tag: _in_page_style(tag[0]), shapes)
    markers: Mapping[str, str] = dict(re.findall(r'<path id="(m\w+)" d="([^"]*)"', shapes))

    def marker(use: re.Match[str]) -> str:
        name, x, y, style = use.groups()
        shape = element("path", d=Html(markers[name]), transform=f"translate({x} {y})", style=Html(style))
        tip = next(pending, None)
        return shape if tip is None else element("g", element("title", tip), shape, class_="mark")

    def step(group: re.Match[str]) -> str:
        tip = next(pending, "")
        return f'<g class="step" data-step="{group[1]}" data-tip="{text(tip)}">{element("title", tip)}'

    shapes = re.sub(r"<defs>.*?</defs>\s*", "", shapes, flags=re.DOTALL)
    shapes = re.sub(r'<use xlink:href="#(\w+)" x="([^"]*)" y="([^"]*)" style="([^"]*)"/>', marker, shapes)
    shapes = re.sub(r'<g id="step-(\d+)">', step, shapes)
    shapes = re.sub(r'<g id="[^"]*"/>', "", shapes)
    return Html(re.sub(r'<g id="[^"]*">', "<g>", re.sub(r">\s+<", "><", shapes)))


def _in_page_style(tag: str) -> str:
    """Returns a tag with rounded coordinates, with variables for colours, and without a font family."""

    def rounded(attribute: re.Match[str]) -> str:
        value = " ".join(attribute[2].split())
        return attribute[1] + re.sub(r"-?\d+\.\d+", lambda number: compact(float(number[0])), value)

    tag = re.sub(r' transform="rotate\(-0 [^"]*"|font-family: [^;"]*;? ?', "", tag)
    tag = re.sub(r'( (?:d|x|y|transform)=")([^"]*)', rounded, tag)
    return re.sub("#[0-9a-f]{6}", lambda colour: f"var(--{_VARIABLES.get(colour[0], 'dim')})", tag)
