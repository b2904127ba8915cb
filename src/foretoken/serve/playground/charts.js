// The clock that both lanes race on, drawn at the size of its box so that text stays legible; acceptance by position.

import { $, el, svg } from "./dom.js";

const LANE = 26; // height of one lane on the clock
const LEFT = 92;
const RIGHT = 14;

// Round ends of an axis, and into how many round parts it is cut: where there is room, and where there is little.
const AXES = [[1, 5, 2], [1.5, 3, 3], [2, 4, 2], [3, 3, 3], [4, 4, 2], [6, 6, 3], [8, 4, 2], [10, 5, 2]];

/** The axis for so many seconds: its end, and its number of parts. */
function axis(value, narrow) {
  const unit = 10 ** Math.floor(Math.log10(Math.max(value, 0.05)));
  const [end, wide, few] = AXES.find(([each]) => each * unit >= value * 0.9999);
  return [end * unit, narrow ? few : wide];
}

/** Two lanes on one axis of seconds: a stroke for each arrival, as tall as the tokens it brought. */
export class Clock {
  constructor() {
    this.box = $("clock");
  }

  /** lanes: [{name, kind, trace, shown, end}], `shown` events of it being visible and `end` its last second or null. */
  draw(lanes, now, whole) {
    const width = Math.max(280, this.box.clientWidth);
    const [limit, count] = axis(Math.max(whole, now, 0.05), width < 480);
    const x = (at) => LEFT + (at / limit) * (width - LEFT - RIGHT);
    const bottom = 8 + lanes.length * (LANE + 10);
    const ticks = Array.from({ length: count + 1 }, (_, i) => (limit * i) / count);
    this.box.replaceChildren(svg("svg", { width, height: bottom + 22, "aria-hidden": "true" },
      ...ticks.map((at) => svg("line", { class: "grid", x1: x(at), x2: x(at), y1: 4, y2: bottom })),
      ...ticks.map((at, i) => svg("text", { class: "tick", x: x(at), y: bottom + 16,
        "text-anchor": i === count ? "end" : "middle" }, `${Number(at.toPrecision(3))} s`)),
      ...lanes.map((lane, i) => row(lane, 8 + i * (LANE + 10), x)),
      svg("line", { class: "now", x1: x(now), x2: x(now), y1: 2, y2: bottom })));
  }
}

function row({ name, kind, trace, shown, end }, top, x) {
  const events = trace ? trace.events.slice(0, shown).filter((event) => event.steps.length) : [];
  const base = top + LANE;
  const strokes = events.map(({ at, steps }) => {
    const tokens = steps.reduce((sum, step) => sum + step.tokens.length, 0);
    return `M${x(at).toFixed(1)} ${base}v${-Math.min(LANE, 5 + 3 * tokens)}`;
  });
  const last = events.at(-1)?.at ?? 0;
  return svg("g", { class: kind },
    svg("text", { class: "name", x: 0, y: base - 6 }, name),
    svg("line", { class: "track", x1: x(0), x2: x(last), y1: base, y2: base }),
    svg("path", { class: "strokes", d: strokes.join("") }),
    end === null ? null : svg("circle", { class: "end", cx: x(end), cy: base, r: 4 }));
}

/** Bars of how often each position of the draft was accepted. byPosition: as in trace.js. */
export function positions(byPosition) {
  const items = byPosition.map(({ drafted, accepted }, i) => {
    const share = accepted / drafted;
    const bar = el("span", { class: "bar" });
    bar.style.setProperty("--share", share);
    return el("li", {}, el("span", { class: "dim" }, String(i + 1)), bar,
      el("span", {}, `${Math.round(100 * share)} %`), el("span", { class: "dim" }, `${accepted} of ${drafted}`));
  });
  const none = el("li", { class: "empty" }, "Nothing drafted yet.");
  $("positions").replaceChildren(...(items.length ? items : [none]));
}

/** Key figures, each above what it is. figures: [[value, name], ...] */
export function cards(figures) {
  $("cards").replaceChildren(...figures.map(([value, name]) => el("li", {}, el("b", {}, value), el("span", {}, name))));
}

/** How fast a replay goes, so that the longer lane takes between some 4 and 8 seconds. */
export function pace(longest) {
  const speeds = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50];
  return speeds.find((speed) => longest / speed <= 8) ?? 100;
}

/** A speed in words. */
export function speed(value) {
  if (value === 1) return "at the speed it had";
  return value < 1 ? `slowed ${Math.round(1 / value)} times` : `sped up ${value} times`;
}
