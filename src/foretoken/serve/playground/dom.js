// Small helpers about elements and words; nothing here sets HTML from strings.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

/** An element with attributes (null leaves one out) and children; strings become text. */
export function el(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** The same for SVG. */
export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

/** A token as one line, its blanks made visible, cut to `most` characters. */
export function visible(text, most = 24) {
  const shown = text.replaceAll("\r", "␍").replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·");
  const characters = Array.from(shown.replace(/[\u0000-\u001f\u007f]/g, "␦"));
  return characters.length > most ? characters.slice(0, most - 1).join("") + "…" : characters.join("");
}

/** A probability in as many digits as mean something. */
export function probability(p) {
  if (p === null || p === undefined) return "–";
  if (p > 0 && p < 0.001) return "< 0.001";
  if (p < 1 && p > 0.999) return "> 0.999";
  return p.toFixed(3);
}

/** Seconds as the clocks show them. */
export function seconds(value) {
  return value < 10 ? `${value.toFixed(2)} s` : `${value.toFixed(1)} s`;
}

/** Tokens per second. */
export function rate(value) {
  return Number.isFinite(value) ? (value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en")) : "–";
}

export const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
