// Everything that shows a race, live or replayed: it receives events and frames, and draws.

import { $, el, rate } from "./dom.js";
import { Clock, cards, positions } from "./charts.js";
import { Lane } from "./lane.js";
import { statistics } from "./trace.js";
import { Tree } from "./tree.js";

export const NAMES = ["speculative", "plain"];
const BROWSE = 1100; // milliseconds in which a step grows that the user went to
const HINT = "Drafts appear here: what the target accepts stays, what it refuses is struck out.";
const REFRESH = 90; // milliseconds that the picture of a step stays at least, in a race

export class Stage {
  constructor() {
    this.lanes = Object.fromEntries(NAMES.map((name) => [name, new Lane(name, (number) => this.browse(name, number))]));
    this.tree = new Tree();
    this.clock = new Clock();
    $("step").addEventListener("input", () => this.browse("speculative", Number($("step").value) - 1));
    $("back").addEventListener("click", () => this.browse("speculative", this.step - 1));
    $("on").addEventListener("click", () => this.browse("speculative", this.step + 1));
    new ResizeObserver(() => this.traces && this.#drawClock()).observe($("clock"));
    this.steps = [];
  }

  /** Empties everything. shown: as in lane.js. traces: {speculative, plain}, which may be growing. grade: as in tip.js. */
  reset(shown, grade, traces, whole) {
    Object.assign(this, { grade, traces, whole, steps: [], step: -1, drawn: 0, follow: true, dirty: true });
    this.shown = { speculative: 0, plain: 0 };
    this.nows = { speculative: null, plain: null };
    this.ends = { speculative: null, plain: null };
    this.gap = REFRESH;
    this.last = performance.now();
    for (const lane of Object.values(this.lanes)) lane.reset(shown, grade);
    this.tree.reset();
    $("step-said").textContent = HINT;
    $("result").hidden = true;
    this.#drawClock();
  }

  /** One event of a lane's trace, in order. */
  show(name, event) {
    this.lanes[name].show(event);
    this.shown[name] += 1;
    if (name !== "speculative" || !event.steps.length) return;
    const now = performance.now();
    this.gap += 0.3 * (now - this.last - this.gap);
    this.last = now;
    this.steps.push(...event.steps);
    this.dirty = true;
  }

  /** Shows all events up to `now`, seconds on the lane's clock. */
  until(name, now) {
    const { events, seconds: end } = this.traces[name];
    for (let next; (next = events[this.shown[name]]) && next.at <= now; ) this.show(name, next);
    this.frame({ [name]: Math.min(now, end) });
    if (now >= end) this.finish(name);
  }

  /** nows: the seconds on the clocks of the lanes that run. */
  frame(nows) {
    for (const [name, now] of Object.entries(nows)) {
      if (this.nows[name] === null) this.lanes[name].state("running");
      this.nows[name] = now;
      this.lanes[name].tick(now);
    }
    this.#drawClock();
    if (!this.dirty || performance.now() - this.drawn < REFRESH) return;
    this.#drawSteps(this.gap);
  }

  /** The lane has all its text. */
  finish(name) {
    if (this.ends[name] !== null) return;
    this.ends[name] = this.traces[name].seconds;
    this.nows[name] = this.ends[name];
    this.lanes[name].tick(this.ends[name]);
    this.lanes[name].state("done");
    if (name === "speculative") this.#drawSteps(0);
    this.#drawClock();
  }

  /** Goes to a step because the user asked for it; the race no longer moves the picture. */
  browse(name, number) {
    if (name !== "speculative" || !this.steps[number]) return;
    this.follow = false;
    this.#drawStep(number, BROWSE);
  }

  #drawSteps(gap) {
    const stats = statistics(this.steps);
    positions(stats.byPosition);
    cards([
      [stats.length.toFixed(2), "mean acceptance length"],
      [`${stats.accepted} of ${stats.drafted}`, "drafted tokens accepted"],
      [String(stats.steps), "target passes"],
    ]);
    $("step").max = Math.max(1, this.steps.length);
    this.dirty = false;
    this.drawn = performance.now();
    if (this.follow && this.steps.length) this.#drawStep(this.steps.length - 1, gap);
  }

  #drawStep(number, pace) {
    const step = this.steps[number];
    this.step = number;
    this.tree.show(step, this.grade, pace, this.follow);
    this.lanes.speculative.mark(number, !this.follow);
    $("step").value = number + 1;
    const accepted = step.draft.filter((node) => node.accepted).length;
    const part = ([name, value]) => `${name} ${(1000 * value).toFixed(1)}`;
    const times = Object.entries(step.seconds).map(part).join(", ");
    $("step-said").textContent =
      `Step ${number + 1} of ${this.steps.length}: ${step.draft.length} drafted, ${accepted} accepted, ` +
      `${step.tokens.length} emitted (${times} ms).`;
  }

  #drawClock() {
    const known = NAMES.map((name) => this.nows[name] ?? 0);
    const lanes = NAMES.map((name) => ({
      name: name === "plain" ? "Plain" : "Speculative", kind: name, trace: this.traces[name],
      shown: this.shown[name], end: this.ends[name],
    }));
    this.clock.draw(lanes, Math.max(...known), Math.max(this.whole, ...known));
  }
}

/** What a finished race came to. traces: both, whole. shared: whether the lanes ran at once. */
export function result(traces, grade, shared) {
  const [fast, slow] = NAMES.map((name) => traces[name].tokens / traces[name].seconds);
  const ratio = fast / slow;
  const how = shared ? " while sharing the machine" : "";
  $("ratio").replaceChildren(el("b", {}, `${ratio.toFixed(2)}×`),
    ` the speed of plain decoding${how}: ${rate(fast)} against ${rate(slow)} tokens/s`);
  const same = traces.speculative.text === traces.plain.text;
  const promised = grade !== "distribution";
  $("same").className = promised ? (same ? "good" : "bad") : "neutral";
  $("same").textContent = promised
    ? same
      ? "✓ Both texts are identical, byte for byte."
      : "✗ The texts differ, though they should not: please report it with prompt, seed and settings."
    : "No seed: each lane drew a text of its own from the same distribution.";
  $("result").hidden = false;
  return `${ratio.toFixed(2)} times the speed of plain decoding. ${$("same").textContent.replace(/^[✓✗] /, "")}`;
}

/** The longest of both recordings in seconds. */
export const longest = (traces) => Math.max(...NAMES.map((name) => traces[name].seconds));
