// The draft of one step as a tree: it grows level by level, and rejected tokens are struck out.

import { $, calm, probability, svg, visible } from "./dom.js";
import { tell, walkable, whyEmitted, whyRejected } from "./tip.js";
import { depths } from "./trace.js";

const ROW = 46;
const GAP = 26;
const HEIGHT = 36;
const LABEL = '13px ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace';
const ruler = document.createElement("canvas").getContext("2d");

/**
 * Places of the nodes: [{parent, depth, row, state, ...}], parents before children.
 *
 * Node 0 is the last committed token; the draft follows, then the target's own token. What stands comes first among
 * its siblings, so the emitted path is the top line.
 */
export function layout(step) {
  const deep = depths(step.draft);
  const nodes = [{ text: step.before, parent: -1, depth: 0, state: "root" }];
  step.draft.forEach((each, i) => nodes.push({
    ...each, index: i, parent: each.parent + 1, depth: deep[i], state: each.accepted ? "accepted" : "rejected",
  }));
  const own = step.tokens.at(-1);
  if (own?.origin === "target") {
    const parent = step.draft.findLastIndex((each) => each.accepted) + 1;
    nodes.push({ ...own, own, parent, depth: nodes[parent].depth + 1, state: "target" });
  }
  // Level by level, in the order of the parents, each no higher than its parent: so no two edges cross.
  const rank = { accepted: 0, target: 1, rejected: 2 };
  nodes[0].row = 0;
  for (let level = [nodes[0]]; level.length; ) {
    const below = level.flatMap((node) =>
      nodes.filter((each) => nodes[each.parent] === node).sort((a, b) => rank[a.state] - rank[b.state]));
    let free = 0;
    for (const node of below) {
      node.row = Math.max(nodes[node.parent].row, free);
      free = node.row + 1;
    }
    level = below;
  }
  return nodes;
}

export class Tree {
  constructor() {
    this.box = $("tree");
    walkable(this.box);
  }

  /** Forgets how tall trees were. */
  reset() {
    this.tallest = 0;
    this.box.replaceChildren();
  }

  /**
   * Draws `step`.
   *
   * pace: milliseconds until the next one, to grow and be pruned in; 0 draws what came of it at once. steady: the
   * picture keeps the height of the tallest so far, so that nothing below it jumps.
   */
  show(step, grade, pace, steady) {
    const nodes = layout(step);
    const [columns, width] = this.#columns(nodes);
    const rows = 1 + Math.max(...nodes.map((node) => node.row));
    this.tallest = Math.max(this.tallest, rows * ROW + 8);
    const height = steady ? this.tallest : rows * ROW + 8;
    const deepest = Math.max(...nodes.map((node) => node.depth));
    const beat = calm() ? 0 : Math.min(150, pace / (deepest + 4));
    const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group",
      "aria-label": `Draft of step ${step.number + 1}`, class: beat < 12 ? "still" : null });
    picture.style.setProperty("--beat", `${beat}ms`);
    picture.style.setProperty("--deepest", Math.max(0, ...depths(step.draft)));
    picture.append(...nodes.slice(1).map((node) => edge(node, nodes[node.parent], columns)));
    picture.append(...nodes.map((node) => this.#node(node, columns, step, grade)));
    picture.querySelector(".described")?.setAttribute("tabindex", "0");
    this.box.replaceChildren(picture);
  }

  /** Left edge and width of each depth's column, and the width of all. */
  #columns(nodes) {
    ruler.font = LABEL;
    const columns = [];
    for (const node of nodes) {
      node.label = visible(node.text, 16) || (node.state === "root" ? "prompt" : "∎");
      node.ink = Math.ceil(ruler.measureText(node.label).width);
      const width = Math.max(64, node.ink + 20);
      columns[node.depth] ??= { width: 0 };
      columns[node.depth].width = Math.max(columns[node.depth].width, width);
    }
    let left = 2;
    for (const column of columns) {
      column.left = left;
      left += column.width + GAP;
    }
    return [columns, left - GAP + 2];
  }

  #node(node, columns, step, grade) {
    const { left, width } = columns[node.depth];
    const law = node.state === "root" ? "" : `p ${probability(node.p)}`;
    const inner = svg("g", { class: "verified" },
      svg("rect", { width, height: HEIGHT, rx: 7 }),
      svg("text", { x: width / 2, y: law ? 15 : 22, class: "label" }, node.label),
      law ? svg("text", { x: width / 2, y: 29, class: "law-of" }, law) : null,
      node.state === "rejected" ? svg("line", { ...across(width, node.ink + 6), y1: 11, y2: 11, pathLength: 1 }) : null);
    const place = svg("g", { transform: `translate(${left} ${node.row * ROW + 4})` },
      svg("g", { class: `node ${node.state}` }, inner));
    place.firstChild.style.setProperty("--depth", node.depth);
    if (node.state === "root") return place;
    place.setAttribute("tabindex", "-1");
    place.setAttribute("role", "img");
    const state = node.state === "target" ? "the target’s own" : node.state;
    place.setAttribute("aria-label", `${node.label}, ${state}, ${law}`);
    tell(place, () => [described(node, step, grade)]);
    return place;
  }
}

/** The ends of a line of some length in the middle of a box. */
function across(width, length) {
  return { x1: (width - length) / 2, x2: (width + length) / 2 };
}

function described(node, step, grade) {
  if (node.own) return { ...node.own, origin: "target", step: step.number, why: whyEmitted(node.own, grade) };
  const why = node.accepted
    ? whyEmitted({ ...node, origin: "accepted", step }, grade)
    : whyRejected(node.index, step, grade);
  return { ...node, origin: node.accepted ? "accepted" : "rejected", step: step.number, why };
}

function edge(node, parent, columns) {
  const from = { x: columns[parent.depth].left + columns[parent.depth].width, y: parent.row * ROW + 4 + HEIGHT / 2 };
  const to = { x: columns[node.depth].left, y: node.row * ROW + 4 + HEIGHT / 2 };
  const middle = (from.x + to.x) / 2;
  const line = svg("path", { class: `edge ${node.state}`,
    d: `M${from.x} ${from.y}C${middle} ${from.y} ${middle} ${to.y} ${to.x} ${to.y}` });
  line.style.setProperty("--depth", node.depth);
  return line;
}
