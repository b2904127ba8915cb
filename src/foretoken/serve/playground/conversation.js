// The turns of a conversation before the one that is raced, and the messages that are sent.

import { $, el } from "./dom.js";

/** A message as the page shows it. role: "user" or "assistant". */
export function said(role, text) {
  return el("p", { class: `said ${role}` }, el("span", { class: "hidden" }, role === "user" ? "You: " : "Model: "), text);
}

/** What was said. The last turn is the one that the lanes show; `answer` is null until both have written it. */
export class Conversation {
  #turns = []; // [{question, answer}, ...]

  /** The question of the last turn; null before the first. */
  get question() {
    return this.#turns.at(-1)?.question ?? null;
  }

  /** Begins a turn, in the place of the last one if that has no answer. Returns the messages to send. */
  ask(question, system) {
    if (this.#turns.at(-1)?.answer === null) this.#turns.pop();
    this.#turns.push({ question, answer: null });
    this.#show();
    return this.messages(system);
  }

  /** The messages up to the question of the last turn. */
  messages(system) {
    const earlier = this.#turns.slice(0, -1).flatMap((turn) => [{ role: "user", content: turn.question }, turn.answer]);
    const leading = system ? [{ role: "system", content: system }] : [];
    return [...leading, ...earlier, { role: "user", content: this.question }];
  }

  /** The answer of the last turn, from a lane's trace. */
  answered({ answer, reasoning }) {
    this.#turns.at(-1).answer = {
      role: "assistant", content: answer, ...(reasoning ? { reasoning_content: reasoning } : {}),
    };
  }

  /** Forgets everything. */
  clear() {
    this.#turns = [];
    this.#show();
  }

  #show() {
    const turns = this.#turns.slice(0, -1);
    $("earlier").hidden = !turns.length;
    $("turns").replaceChildren(...turns.flatMap(({ question, answer }) => [
      said("user", question), said("assistant", answer.content || "(no answer)"),
    ]));
    $("turns").scrollTop = $("turns").scrollHeight;
  }
}
