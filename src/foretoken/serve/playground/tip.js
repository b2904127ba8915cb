// A tooltip for the element under the pointer or the keyboard, and the sentences that explain why a token is in the text.

import { $, el, probability, visible } from "./dom.js";
import { rejected } from "./trace.js";

const ORIGINS = {
  accepted: "draft, accepted",
  rejected: "draft, rejected",
  target: "the target’s own",
};
const described = new WeakMap(); // element -> the function that says what to tell
let open = null;

/** Tells `facts()` = [{text, token, origin, p, q, why, step}, ...] whenever `node` is pointed at or focused. */
export function tell(node, facts) {
  described.set(node, facts);
  node.classList.add("described");
}

/** Makes arrow keys walk through the described elements of `box`, which is one stop of the tab key; Enter presses. */
export function walkable(box) {
  box.addEventListener("focusin", (event) => {
    const at = event.target.closest(".described");
    for (const node of at ? box.querySelectorAll("[tabindex='0']") : []) node.setAttribute("tabindex", "-1");
    at?.setAttribute("tabindex", "0");
  });
  box.addEventListener("keydown", (event) => {
    const at = event.target.closest(".described");
    if (!at) return;
    const all = [...box.querySelectorAll(".described")].filter((node) => node.getClientRects().length);
    const here = all.indexOf(at);
    const to = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: all.length - 1 }[event.key];
    if (event.key === "Enter") at.dispatchEvent(new MouseEvent("click", { bubbles: true }));
    if (!all[to]) return;
    event.preventDefault();
    all[to].focus();
  });
}

export function hide() {
  $("tip").hidden = true;
  open?.removeAttribute("aria-describedby");
  open = null;
}

function show(node) {
  if (node === open) return;
  hide();
  const tip = $("tip");
  tip.replaceChildren(...described.get(node)().map(entry));
  tip.hidden = false;
  node.setAttribute("aria-describedby", "tip");
  open = node;
  place();
}

/** Puts the box below what it tells of, or above where there is no room. */
function place() {
  if (!open) return;
  const [node, tip] = [open, $("tip")];
  const [line, box] = [node.getClientRects()[0] ?? node.getBoundingClientRect(), tip.getBoundingClientRect()];
  const below = line.bottom + box.height + 14 < innerHeight || line.top < box.height + 14;
  tip.style.left = `${Math.max(8, Math.min(line.left, innerWidth - box.width - 8))}px`;
  tip.style.top = `${below ? line.bottom + 6 : line.top - box.height - 6}px`;
}

function entry({ text, token, origin, p, q, why, step }) {
  return el("div", { class: `tip-of ${origin}` },
    el("p", { class: "tip-head" },
      el("code", {}, visible(text, 40) || "∅"), el("span", { class: "badge" }, ORIGINS[origin]),
      el("span", { class: "dim" }, `token ${token} · step ${step + 1}`)),
    el("dl", {}, ...law("p", "target", p), ...(origin === "target" ? [] : law("q", "draft", q))),
    el("p", {}, why));
}

function law(name, whose, value) {
  const known = value !== null && value !== undefined;
  const unknown = name === "q" ? "none: the draft token is fixed, not sampled" : "not sent";
  const bar = el("span", { class: `law law-${name}` });
  bar.style.setProperty("--share", known ? value : 0);
  return [
    el("dt", {}, el("i", {}, name), ` ${whose}`),
    el("dd", {}, known ? bar : null, known ? probability(value) : unknown),
  ];
}

document.addEventListener("pointerover", (event) => {
  const node = event.target.closest?.(".described");
  if (node) show(node);
  else if (open && document.activeElement !== open && !event.target.closest?.("#tip")) hide();
});
document.addEventListener("focusin", (event) => (event.target.matches(".described") ? show(event.target) : hide()));
document.addEventListener("focusout", hide);
addEventListener("scroll", place, { passive: true, capture: true });

const quote = (text) => `“${visible(text)}”`;

/**
 * A token of the text.
 *
 * grade: "greedy" (temperature 0), "trajectory" (a seed: the target draws with the seed's noise) or "distribution".
 */
export function whyEmitted(token, grade) {
  const { draft } = token.step;
  if (token.origin === "accepted") return whyAccepted(token, grade);
  if (!draft.length) return "Nothing was drafted at this position: the target’s own token.";
  const wrong = rejected(draft)[0];
  if (wrong === undefined) return "Bonus token: the whole draft was accepted, and the same pass gave one more token.";
  return `Recovered token: the draft token ${quote(draft[wrong].text)} was rejected, and the target sampled this one.`;
}

function whyAccepted({ p, q }, grade) {
  if (grade === "greedy") return "Accepted: it is the target’s most probable token, and the draft had it too.";
  if (grade === "trajectory") {
    return "Accepted: the target samples this token with the noise that the seed fixes, and so did the draft.";
  }
  if (q === null) {
    return "Accepted: it was a candidate of the draft, and the target’s own sample from p was this token.";
  }
  return (
    `Accepted: p is the target’s probability, q the draft’s. Alone it would be accepted with probability ` +
    `min(1, p/q) = ${probability(ratio(p, q))}; verifying the whole path at once accepts at least as many on average.`
  );
}

/** A drafted token that is not in the text. */
export function whyRejected(index, step, grade) {
  const { parent, p, q } = step.draft[index];
  const path = step.draft.findLastIndex((node) => node.accepted);
  if (parent >= 0 && !step.draft[parent].accepted) return "Not verified: it follows a draft token that was rejected.";
  if (parent !== path) return "Not accepted: another branch of the tree was.";
  if (step.tokens.at(-1)?.origin === "accepted") return "Not emitted: the text ended before it.";
  if (grade === "greedy") return "Rejected: the target’s most probable token is another one.";
  if (grade === "trajectory") return "Rejected: with the noise that the seed fixes, the target samples another token.";
  if (q === null) return "Rejected: the target’s own sample, which is this token with probability p, was another one.";
  return (
    `Rejected: p is the target’s probability, q the draft’s. Alone it would be accepted with probability ` +
    `min(1, p/q) = ${probability(ratio(p, q))}. The recovered token is sampled from the residual (p − q)+.`
  );
}

const ratio = (p, q) => (q > 0 ? Math.min(1, p / q) : 1);
