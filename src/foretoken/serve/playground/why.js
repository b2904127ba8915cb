// One sentence that explains why a token is in the text or not, by the verification rule that decided.

import { probability, visible } from "./dom.js";
import { rejected } from "./trace.js";

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
