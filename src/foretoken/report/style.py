"""Style sheet of the pages: light and dark, for screens from a phone's width up, and for print."""

from __future__ import annotations

SERIES = 8  # colours and shapes that series take in turn

_LIGHT = """
--ink: #1b1f24; --dim: #5b6472; --paper: #ffffff; --card: #f6f7f9; --line: #dde1e7; --good: #15703a; --bad: #b42318;
--open: #8a5a00; --good-wash: #e6f4ea; --bad-wash: #fdeceb; --open-wash: #fdf3dc; --ours: #2257d6; --theirs: #8b98ab;
--c0: #2257d6; --c1: #c2500a; --c2: #15803d; --c3: #8b35d6; --c4: #0b7d92; --c5: #be185d; --c6: #7a6200; --c7:
#4b5563;
"""
_DARK = """
--ink: #e7eaef; --dim: #9ca6b5; --paper: #13161b; --card: #1b2027; --line: #303742; --good: #5fd08a; --bad: #ff8f86;
--open: #f0bd58; --good-wash: #15301f; --bad-wash: #3a1b1a; --open-wash: #33280f; --ours: #6ea0ff; --theirs: #66738a;
--c0: #6ea0ff; --c1: #ff9d5c; --c2: #5fd08a; --c3: #c597ff; --c4: #4fcbe0; --c5: #ff85b3; --c6: #e0c341; --c7:
#a7b0be;
"""

_RULES = """
* { box-sizing: border-box; }
body { font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif;
  color: var(--ink); background: var(--paper); max-width: 62rem; margin: 0 auto; padding: 2rem 1rem 5rem;
  overflow-wrap: break-word; }
h1 { font-size: 1.55rem; line-height: 1.25; margin: 0 0 .5rem; } h2 { font-size: 1.2rem; margin: 2.6rem 0 .6rem; }
h3 { font-size: 1rem; margin: 1.6rem 0 .4rem; } p { margin: .5rem 0; max-width: 44rem; }
.note, footer, .about { color: var(--dim); font-size: .9rem; } ul.plain { padding-left: 1.2rem; margin: .4rem 0; }
code, pre { font: .86em/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
code { overflow-wrap: anywhere; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .7rem .8rem; margin: .4rem 0;
  white-space: pre-wrap; overflow-wrap: anywhere; }
a, summary { color: inherit; } summary { cursor: pointer; color: var(--dim); font-size: .9rem; padding: .2rem 0; }
:focus-visible { outline: 2px solid var(--ours); outline-offset: 2px; border-radius: 3px; }
.scroll { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; margin: .3rem 0; }
th, td { padding: .28rem .7rem .28rem 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--dim); font-weight: 500; vertical-align: bottom; }
th:last-child, td:last-child { padding-right: .2rem; }
.name { text-align: left; } td.wrap { white-space: normal; min-width: 15rem; text-align: left; }
tr.best td { font-weight: 650; }
dl { display: grid; grid-template-columns: minmax(6rem, max-content) 1fr; gap: .15rem 1rem; margin: .4rem 0;
  font-size: .9rem; }
dt { color: var(--dim); } dd { margin: 0; overflow-wrap: anywhere; }
.cards { display: flex; flex-wrap: wrap; gap: .6rem; margin: 1rem 0; padding: 0; list-style: none; }
.cards li { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .5rem .9rem;
  min-width: 7.5rem; }
.cards b { display: block; font-size: 1.25rem; line-height: 1.3; font-variant-numeric: tabular-nums; }
.cards span { color: var(--dim); font-size: .82rem; }
.verdict { border-left: 4px solid var(--line); background: var(--card); border-radius: 0 8px 8px 0; margin: 1rem 0;
  padding: .6rem 1rem; } .verdict b { font-size: 1.1rem; } .verdict p { margin: .2rem 0; }
.good { --tone: var(--good); --wash: var(--good-wash); } .bad { --tone: var(--bad); --wash: var(--bad-wash); }
.open { --tone: var(--open); --wash: var(--open-wash); }
.verdict.good, .verdict.bad, .verdict.open { border-color: var(--tone); background: var(--wash); }
.badge { display: inline-block; border-radius: 999px; padding: .05rem .6rem; font-size: .82rem; font-weight: 600;
  color: var(--tone, var(--dim)); background: var(--wash, var(--card)); border: 1px solid currentColor; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr)); gap: 1.2rem 2rem;
  align-items: start; }
figure { margin: .8rem 0; min-width: 0; max-width: 36rem; } figure.wide { max-width: none; }
figcaption { font-weight: 600; font-size: .95rem; } figcaption .note { font-weight: 400; display: block; }
figure > svg { width: 100%; height: auto; display: block; margin: .3rem 0; overflow: visible; }
svg text { font: 14px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif;
  fill: var(--ink); font-variant-numeric: tabular-nums; }
svg .dim { fill: var(--dim); } svg .grid-line { stroke: var(--line); stroke-width: 1; }
svg .axis { stroke: var(--dim); stroke-width: 1; } svg .rule { stroke: var(--ink); stroke-width: 1.3;
  stroke-dasharray: 5 4; fill: none; } svg .whisker { stroke: var(--ink); stroke-width: 1.5; }
svg .track { fill: var(--line); } svg .curve { fill: none; stroke: var(--c); stroke-width: 2;
  stroke-linejoin: round; } svg .reference .curve { stroke-dasharray: 3 4; stroke-width: 1.6; }
svg .band { fill: var(--c); opacity: .14; } svg .mark { fill: var(--c); stroke: var(--paper); stroke-width: 1.2; }
svg .reach { stroke: var(--c); stroke-width: 1.2; opacity: .65; } svg .hit { fill: transparent; stroke: none; }
svg .ours { fill: var(--ours); } svg .theirs { fill: var(--theirs); } svg .plain { fill-opacity: .55; }
svg .allowed { fill: var(--dim); opacity: .12; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .1rem 1rem; margin: .3rem 0; padding: 0;
  font-size: .85rem; } .legend svg { width: 1.5rem; height: .8rem; vertical-align: -.08rem; margin-right: .35rem; }
footer { margin-top: 3rem; border-top: 1px solid var(--line); padding-top: .6rem; }
@media (max-width: 34rem) { body { padding: 1.2rem .8rem 5rem; } h1 { font-size: 1.3rem; }
  dl { grid-template-columns: 1fr; } dd { margin-bottom: .3rem; } .cards li { flex: 1 1 7rem; min-width: 0; }
  .stack thead { display: none; } .stack tr { display: block; border-bottom: 1px solid var(--line); padding: .4rem 0; }
  .stack td { display: inline-block; border: 0; white-space: normal; } .stack td.wrap { display: block; min-width: 0; }
  .stack, .stack tbody { display: block; } }
@media print { body { max-width: none; padding: 0; } details { display: none; } }
"""


def sheet(extra: str = "") -> str:
    """Returns the style sheet, with ``extra`` rules."""
    colours = " ".join(f".s{i} {{ --c: var(--c{i}); }}" for i in range(SERIES))
    return (
        f":root {{ color-scheme: light dark; {_LIGHT} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}"
        f"{_RULES}{colours}\n{extra}"
    )
