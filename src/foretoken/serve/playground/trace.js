// What one lane received: its chunks with their times, and everything that follows from the steps. Pure.

const PART = "\ufffd"; // stands where a token holds a part of a character

/**
 * Shares out the text of a chunk among tokens, so that the pieces joined are the text.
 *
 * A token's own text can differ from what it adds: a part of a character, a blank that its tokenizer drops at the
 * beginning, text held back for a stop string. Tokens that cannot be distinguished share one piece; those whose text has
 * not come yet are left.
 */
export function align(tokens, text) {
  const pieces = [];
  let at = 0;
  let i = 0;
  while (i < tokens.length && at < text.length) {
    const own = tokens[i].text;
    const found = place(own, text, at);
    if (found === at || (found > at && text.slice(at, found).trim() === "")) {
      pieces.push({ text: text.slice(at, found + own.length), tokens: [tokens[i++]] });
      at = found + own.length;
    } else if (own.length > text.length - at && own.startsWith(text.slice(at))) {
      pieces.push({ text: text.slice(at), tokens: [tokens[i]] });
      return { pieces, left: [{ ...tokens[i], text: own.slice(text.length - at) }, ...tokens.slice(i + 1)] };
    } else {
      let next = i + 1;
      while (next < tokens.length && place(tokens[next].text, text, at) < 0) next += 1;
      const end = next < tokens.length ? place(tokens[next].text, text, at) : text.length;
      pieces.push({ text: text.slice(at, end), tokens: tokens.slice(i, next) });
      [at, i] = [end, next];
    }
  }
  if (at < text.length && pieces.length) pieces[pieces.length - 1].text += text.slice(at);
  else if (at < text.length) pieces.push({ text: text.slice(at), tokens: [] });
  return { pieces, left: tokens.slice(i) };
}

function place(own, text, from) {
  return own === "" || own.includes(PART) ? -1 : text.indexOf(own, from);
}

/** Depth of each drafted token; children of the last committed token have depth 1. */
export function depths(draft) {
  const found = [];
  for (const { parent } of draft) found.push(parent < 0 ? 1 : found[parent] + 1);
  return found;
}

/** The longest drafted path below the last accepted token that was not taken, as node indices. */
export function rejected(draft) {
  const deep = depths(draft);
  const end = draft.findLastIndex((node) => node.accepted);
  const paths = draft.map((_, node) => pathTo(draft, node).filter((each) => !draft[each].accepted));
  const below = draft.map((_, node) => node).filter((node) => node > end && draft[paths[node][0]]?.parent === end);
  const deepest = below.reduce((best, node) => (best < 0 || deep[node] > deep[best] ? node : best), -1);
  return deepest < 0 ? [] : paths[deepest];
}

function pathTo(draft, node) {
  const path = [];
  for (let at = node; at >= 0; at = draft[at].parent) path.unshift(at);
  return path;
}

/**
 * Counts over steps, by the names of the field.
 *
 * byPosition[i]: steps that drafted position i + 1, and those in which it was accepted.
 */
export function statistics(steps) {
  const byPosition = [];
  const sum = { steps: steps.length, drafts: 0, drafted: 0, accepted: 0, tokens: 0 };
  for (const { draft, tokens } of steps) {
    const deep = depths(draft);
    const accepted = draft.filter((node) => node.accepted).length;
    sum.drafts += draft.length > 0;
    sum.drafted += draft.length;
    sum.accepted += accepted;
    sum.tokens += tokens.length;
    for (let depth = 1; depth <= Math.max(0, ...deep); depth += 1) {
      byPosition[depth - 1] ??= { drafted: 0, accepted: 0 };
      byPosition[depth - 1].drafted += 1;
      byPosition[depth - 1].accepted += depth <= accepted;
    }
  }
  return { ...sum, byPosition, length: sum.drafts ? 1 + sum.accepted / sum.drafts : 1 };
}

/** The record of one lane. An event is what one chunk brought: {at (s since the request), pieces, steps}. */
export class Trace {
  events = [];
  steps = [];
  text = ""; // all of it, as the lane shows it
  reasoning = ""; // in a conversation, the part before the answer
  answer = "";
  tokens = 0;
  finish = null; // the API's finish_reason
  #left = [];
  #held = ""; // text whose step comes in a later chunk

  /** Takes a chunk that came `at` seconds after the request; returns its event. */
  push(chunk, at) {
    const choice = chunk.choices?.[0];
    const steps = (chunk.steps ?? []).map((record) => this.#step(record));
    this.#held += this.#read(choice);
    this.finish = choice?.finish_reason ?? this.finish;
    if (!steps.length) return this.#keep({ at, pieces: [], steps });
    const { pieces, left } = align([...this.#left, ...steps.flatMap((step) => step.tokens)], this.#held);
    this.#left = left;
    this.#held = "";
    return this.#keep({ at, pieces, steps });
  }

  /** The new text of a choice: of a completion, or the delta of a conversation's answer. */
  #read(choice) {
    const { content, reasoning_content: reasoning } = choice?.delta ?? { content: choice?.text };
    const gap = content && this.reasoning && !this.answer ? "\n\n" : "";
    const text = (reasoning ?? "") + gap + (content ?? "");
    this.reasoning += reasoning ?? "";
    this.answer += content ?? "";
    this.text += text;
    return text;
  }

  /** What remains when the stream has ended: tokens that show no text of their own, as end marks. */
  close() {
    const left = this.#left.filter((token) => !token.text.includes(PART));
    const pieces = left.map((token) => ({ text: "", tokens: [token], end: true }));
    if (this.#held) pieces.unshift({ text: this.#held, tokens: [] });
    [this.#left, this.#held] = [[], ""];
    return this.#keep({ at: this.seconds, pieces, steps: [] });
  }

  /** From the request to the last token. */
  get seconds() {
    return this.events.findLast((event) => event.steps.length)?.at ?? 0;
  }

  #keep(event) {
    this.events.push(event);
    return event;
  }

  #step(record) {
    const path = record.draft.filter((node) => node.accepted);
    const step = { number: this.steps.length, before: this.steps.at(-1)?.tokens.at(-1)?.text ?? "", ...record };
    step.tokens = record.tokens.map((token, i) => {
      const node = token.origin === "accepted" ? path[i] : undefined;
      return { ...token, q: node?.q ?? null, p: token.p ?? node?.p ?? null, step };
    });
    this.steps.push(step);
    this.tokens += record.tokens.length;
    return step;
  }
}
