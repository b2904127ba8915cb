// One lane: a text that grows, coloured by origin, above its own figures.

import { said } from "./conversation.js";
import { $, el, rate, seconds } from "./dom.js";
import { tell, walkable, whyEmitted, whyRejected } from "./tip.js";
import { rejected } from "./trace.js";

const PROMPT = 1500; // characters of it that are shown: its end

export class Lane {
  /** onStep(number) is called when a token's step is asked for. */
  constructor(name, onStep) {
    this.box = $(`${name}-text`);
    this.figures = $(`${name}-figures`);
    this.root = $(name);
    this.onStep = onStep;
    walkable(this.box);
  }

  /** An empty lane for `prompt`. asked: whether it is a message that is answered. grade: as in tip.js. */
  reset({ prompt, asked }, grade) {
    this.grade = grade;
    this.tokens = 0;
    this.tabbable = false;
    const shown = (prompt.length > PROMPT ? "…" : "") + prompt.slice(-PROMPT);
    this.box.replaceChildren(shown && asked ? said("user", shown) : el("span", { class: "prompt" }, shown));
    this.figures.replaceChildren();
    this.state("");
  }

  /** "", "waiting", "running" or "done": what the lane is at. */
  state(word) {
    this.root.dataset.state = word;
    this.root.setAttribute("aria-busy", String(word === "running"));
  }

  /** What one event of a trace adds. */
  show(event) {
    const follow = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 40;
    this.box.append(...event.pieces.flatMap((piece) => this.#piece(piece)));
    if (follow) this.box.scrollTop = this.box.scrollHeight;
    this.tokens += event.steps.reduce((sum, step) => sum + step.tokens.length, 0);
  }

  /** The lane's own clock. elapsed: seconds since its request. */
  tick(elapsed) {
    const parts = [[this.tokens, "tokens"], [seconds(elapsed), ""], [rate(this.tokens / elapsed), "tokens/s"]];
    const figure = ([value, name]) => el("span", {}, el("b", {}, String(value)), ` ${name}`);
    this.figures.replaceChildren(...parts.map(figure));
  }

  /** Underlines the tokens of one step. seek: brings them into view, too. */
  mark(number, seek) {
    for (const node of this.box.querySelectorAll(".lit")) node.classList.remove("lit");
    const lit = [...this.box.querySelectorAll(`[data-step="${number}"]`)];
    for (const node of lit) node.classList.add("lit");
    const at = lit.at(-1)?.offsetTop;
    const { scrollTop, clientHeight } = this.box;
    if (seek && (at < scrollTop || at > scrollTop + clientHeight - 24)) this.box.scrollTop = at - clientHeight / 2;
  }

  #piece({ text, tokens, end }) {
    const last = tokens.at(-1);
    if (!last) return [document.createTextNode(text)];
    const first = !this.tabbable; // the text is one stop of the tab key
    this.tabbable = true;
    const kind = end ? " end" : /^\n+$/.test(text) ? " break" : ""; // what would have no width gets a sign
    const span = el("span", { class: `token ${last.origin}${kind}`, tabindex: first ? 0 : -1,
      "data-step": last.step.number }, text);
    tell(span, () => tokens.map((token) => ({
      ...token, step: token.step.number, why: whyEmitted(token, this.grade),
    })));
    span.addEventListener("click", () => this.onStep(last.step.number));
    const own = tokens.filter((token) => token.origin === "target" && token === token.step.tokens.at(-1));
    const struck = own.map((token) => this.#rejected(token.step));
    return [...struck.filter(Boolean), span];
  }

  /** The drafted tokens that were struck out in front of the target's own; the sheet hides them unless asked for. */
  #rejected(step) {
    const nodes = rejected(step.draft);
    if (!nodes.length) return null;
    const struck = el("s", { class: "rejected", "data-step": step.number, tabindex: -1 },
      nodes.map((node) => step.draft[node].text).join("").replaceAll("\n", "↵"));
    tell(struck, () => nodes.map((node) => ({
      ...step.draft[node], origin: "rejected", step: step.number, why: whyRejected(node, step, this.grade),
    })));
    return struck;
  }
}
