// A tooltip for the element under the pointer, or the one reached with the keyboard.

import { $, el, probability, visible } from "./dom.js";

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
