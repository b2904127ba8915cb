// What the server knows of all its requests, in one line that follows it while the page is seen.

import { speculation } from "./api.js";
import { $ } from "./dom.js";

const EVERY = 3000; // milliseconds
let timer = 0;

/** Says what /v1/speculation told. */
export function sentence(state) {
  const of = state.acceptance[state.method];
  const words = [`${state.running} running`];
  if (of?.num_drafts) {
    words.push(`${Math.round(100 * of.draft_acceptance_rate)} % of drafted tokens accepted`);
    words.push(`mean acceptance length ${of.mean_acceptance_length.toFixed(2)}`);
  }
  if (state.max_draft_tokens !== null) words.push(`at most ${state.max_draft_tokens} a step`);
  if (state.paused) words.push(`no drafts now: ${state.paused}`);
  return `${state.method} since the server began: ${words.join(", ")}.`;
}

/** Follows the server with this key, until it refuses or goes away. */
export function watch(key) {
  clearTimeout(timer);
  const look = async () => {
    try {
      if (!document.hidden) $("live").lastElementChild.textContent = sentence(await speculation(key));
      $("live").hidden = false;
      timer = setTimeout(look, EVERY);
    } catch {
      $("live").hidden = true; // a key may lack the scope, and errors of the server show elsewhere
    }
  };
  look();
}
