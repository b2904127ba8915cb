"""HTML page of a generated text: origin and probabilities of every token, and a timeline of the decode steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.core.acceptance_run import KINDS
from foretoken.report.charts import Axis, Bar, Point, Series, StepLap, bars, lines, missing, timeline
from foretoken.report.document import cards, document, folded, grid, paragraph, table
from foretoken.report.markup import Html, element, figure, join, percent
from foretoken.report.trace import ACCEPTED, REJECTED, TARGET, Token, Trace, TraceStep, wilson

WORDS = {ACCEPTED: "draft, accepted", REJECTED: "draft, rejected", TARGET: "the target's own"}
PARTS = ("propose", "score", "verify", "commit")
PROMPT = 4000  # characters of the prompt's end that are shown


def page(traces: Sequence[Trace], setting: Mapping[str, Any] | None = None) -> str:
    """Returns an HTML document of one completion, or of several of one prompt."""
    count = len(traces)
    parts = [
        _completion(trace, f"Completion {at} of {count}" if count > 1 else "") for at, trace in enumerate(traces, 1)
    ]
    return document(
        "A text, token by token",
        [_key(), *parts, element("div", id="tip", role="status", aria_live="polite")],
        setting,
        lead="Point at a token, or reach the text with the tab key and walk through it with the arrow keys, to see how "
        "probable both models found it. Whatever was drafted, the text has the target's distribution.",
        footer="p: the target's softmax, before temperature and other parameters; q: the distribution from which the "
        "token was drafted, after them. For a rejected draft token, p is known if it was among the likeliest.",
        script="tokens.js",
    )


def _completion(trace: Trace, title: str) -> Html:
    return element(
        "section",
        element("h2", title) if title else "",
        _summary(trace),
        _text(trace),
        paragraph(_ending(trace), note=True),
        element("h3", "Decode steps"),
        _timeline(trace),
        grid(_positions(trace), _sizes(trace)),
        _table(trace.tokens),
    )


def _key() -> Html:
    return paragraph(*(join(element("span", word, class_=f"key {origin}"), "  ") for origin, word in WORDS.items()))


def _summary(trace: Trace) -> Html:
    stats = trace.stats
    return cards(
        [
            (stats.tokens, "tokens"),
            (figure(stats.tokens_per_second), "tokens/s, prompt included"),
            (figure(stats.mean_acceptance_length), "mean acceptance length"),
            (f"{stats.accepted} of {stats.drafted}", "draft tokens accepted"),
            (stats.steps, "target passes"),
        ]
    )


def _ending(trace: Trace) -> str:
    reasons: dict[str, str] = {
        "length": "The text reached its maximum length.",
        **dict.fromkeys(KINDS, "The text ended because of its acceptance."),
        "stop": "The text ended at an end-of-text token or a stop string.",
    }
    grade = f" Exactness: {trace.exactness}." if trace.exactness else ""
    return reasons.get(trace.finish_reason or "", "The text is not finished.") + grade


def _text(trace: Trace) -> Html:
    shown = ("…" if len(trace.prompt) > PROMPT else "") + trace.prompt[-PROMPT:]
    tokens = [_token(token, first=at == 0) for at, token in enumerate(trace.tokens)]
    return element(
        "div", element("span", shown, class_="prompt"), *tokens, class_="text", role="group", aria_label="text"
    )


def _token(token: Token, first: bool) -> Html:
    """Line breaks of rejected tokens are shown as a sign, so that they do not break the text's lines."""
    outside = token.origin == REJECTED or token.cut
    text = token.text.replace("\n", "⏎") if outside else token.text
    kind = f"token {token.origin}" + (" cut" if token.cut else "") + ("" if token.text else " part")
    return element(
        "span", text or "·", class_=kind, tabindex=0 if first else -1, data_step=token.step, data_tip=_tip(token)
    )


def _tip(token: Token) -> str:
    rank = f" (its choice no. {token.rank})" if token.rank else ""
    facts = [
        f"{visible(token.text)}  {WORDS[token.origin]}, step {token.step}",
        f"target p {percent(token.p)}{rank}" if token.p is not None else "",
        f"draft q {percent(token.q)}" if token.q is not None else "",
        f"predicted acceptance {percent(token.score)}" if token.score is not None else "",
        "not in the text" if token.cut else "",
        "target also: " + ", ".join(f"{visible(t)} {percent(p)}" for t, p in token.others[:4]) if token.others else "",
    ]
    return " · ".join(fact for fact in facts if fact)


def visible(text: str) -> str:
    """Returns a token's text with visible signs for white space."""
    signs = {"\n": "⏎", "\t": "⇥", " ": "␣", "\r": "␍"}
    return "".join(signs.get(char, char) for char in text) or "(part of a character)"


def _timeline(trace: Trace) -> Html:
    """Timeline of the steps. The prefill's step takes much longer, so its time is only stated."""
    laps = [_lap(step) for step in trace.steps if not step.prompt or len(trace.steps) == 1]
    first = next((step for step in trace.steps if step.prompt), None)
    note = "Above each step the number of tokens that it emitted."
    if first is not None and len(trace.steps) > 1:
        note += f" The first step, with the prefill, took {figure(first.timings.total * 1e3)} ms and is not shown."
    return timeline("Time of each step, by part", PARTS, laps, note=note)


def _lap(step: TraceStep) -> StepLap:
    t = step.timings
    shared = f", {t.batch} sequences" if t.batch > 1 else ""
    note = f"{step.drafted} drafted, {step.accepted} accepted, {step.emitted} emitted{shared}"
    return StepLap(step.number, (t.propose, t.score, t.verify, t.commit), f"+{step.emitted}", note)


def _positions(trace: Trace) -> Html:
    points = [
        Point(position, accepted / tried, *wilson(accepted, tried), f"{accepted} of {tried}")
        for position, (accepted, tried) in enumerate(trace.acceptance(), 1)
    ]
    at = tuple(float(k) for k in range(1, len(points) + 1)) if len(points) <= 12 else ()
    if not points:
        return missing("Acceptance by position", "nothing was drafted")
    return lines(
        "Acceptance by position",
        [Series("accepted", tuple(points))],
        Axis("position in the draft", at=at),
        Axis("accepted, given those before", zero=True, high=1.0),
        note="Shaded: the 95 % interval.",
    )


def _sizes(trace: Trace) -> Html:
    counts = Counter(step.emitted for step in trace.steps)
    items = [Bar(f"{size} token{'s' if size != 1 else ''}", count) for size, count in sorted(counts.items())]
    return bars("Steps by tokens emitted", items, "steps")


def _table(tokens: Sequence[Token]) -> Html:
    heads = ("token", "from", "step", "p", "choice no.", "q", "predicted acceptance")
    rows = [
        (
            element("code", visible(t.text)),
            WORDS[t.origin],
            t.step,
            percent(t.p),
            t.rank or "–",
            percent(t.q),
            percent(t.score),
        )
        for t in tokens
    ]
    return folded("Every token in a table", table(heads, rows, names=2)) if rows else Html()
