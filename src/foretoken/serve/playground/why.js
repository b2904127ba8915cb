// Why a token is there, or is not: one sentence, true to the rule that decided.

import { probability, visible } from "./dom.js";
import { refused } from "./trace.js";

const quote = (text) => `“${visible(text)}”`;

/**
 * A token of the text.
 *
 * grade: "greedy" (temperature 0), "trajectory" (a seed: the target draws with the seed's noise) or "distribution".
 */
export function whyEmitted(token, grade) {
  const { draft } = token.step;
  if (token.origin === "accepted") return whyAccepted(token, grade);
  if (!draft.length) return "Nothing was drafted for this place: the target’s own token.";
  const wrong = refused(draft)[0];
  if (wrong === undefined) return "Bonus: the draft stood to its end, and the same pass gave one token more.";
  return `Correction: the draft token ${quote(draft[wrong].text)} was rejected, and the target put its own token there.`;
}

function whyAccepted({ p, q }, grade) {
  if (grade === "greedy") return "Accepted: it is the target’s likeliest token, and the draft had guessed it.";
  if (grade === "trajectory") {
    return "Accepted: the target draws this token with the noise that the seed fixes; the draft guessed the same.";
  }
  if (q === null) {
    return "Accepted: the draft put it up as a candidate, and the target’s own draw, which has the law p, fell on it.";
  }
  return (
    `Accepted: the target’s law gives p, the draft drew it with q. By itself it would be kept with probability ` +
    `min(1, p/q) = ${probability(ratio(p, q))}; judging the whole path at once keeps at least as many on average.`
  );
}

/** A drafted token that is not in the text. */
export function whyRefused(index, step, grade) {
  const { parent, p, q } = step.draft[index];
  const path = step.draft.findLastIndex((node) => node.accepted);
  if (parent >= 0 && !step.draft[parent].accepted) return "Never judged: it hangs below a draft token that was refused.";
  if (parent !== path) return "Not taken: another branch of the tree was.";
  if (step.tokens.at(-1)?.origin === "accepted") return "Not taken: the text ended before it.";
  if (grade === "greedy") return "Refused: the target’s likeliest token is another one.";
  if (grade === "trajectory") return "Refused: with the noise that the seed fixes, the target draws another token.";
  if (q === null) return "Refused: the target’s own draw, which hits it with probability p, fell on another token.";
  return (
    `Refused: the draft drew it with q, the target’s law gives p. By itself it would be kept with probability ` +
    `min(1, p/q) = ${probability(ratio(p, q))}. What comes instead is drawn from what p has left above q.`
  );
}

const ratio = (p, q) => (q > 0 ? Math.min(1, p / q) : 1);
