// Recording lanes, and replaying recordings on one clock.

import { complete } from "./api.js";
import { Trace } from "./trace.js";

/**
 * The requests of both lanes, from the settings of the form.
 *
 * settings: {model, prompt, messages (null: complete the prompt), method, depth (0: the engine's choice), temperature,
 *   topP, maxTokens, seed (null: none)}
 */
export function requests({ model, prompt, messages, method, depth, temperature, topP, maxTokens, seed }) {
  const common = { model, ...(messages ? { messages } : { prompt }), max_tokens: maxTokens, temperature, top_p: topP,
    ...(seed === null ? {} : { seed }) };
  return {
    plain: { ...common, speculative_tokens: 0 },
    speculative: {
      ...common,
      ...(method ? { speculative_method: method } : {}),
      ...(depth ? { speculative_tokens: depth } : {}),
    },
  };
}

/** Which promise holds for two texts of these settings: see tip.js. */
export function gradeOf({ temperature, seed }) {
  if (temperature === 0) return "greedy";
  return seed === null ? "distribution" : "trajectory";
}

/** Asks for one token and drops it: the prompt is read and the server warm when the clock starts. */
export async function warm(body, key, signal) {
  for await (const _ of complete({ ...body, max_tokens: 1 }, key, signal));
}

/** Runs one request; `onEvent` sees every event as it arrives. The clock starts when the request is sent. */
export async function record(body, key, signal, trace, onEvent) {
  const start = performance.now();
  for await (const chunk of complete(body, key, signal)) onEvent(trace.push(chunk, (performance.now() - start) / 1000));
  onEvent(trace.close());
  return trace;
}

/**
 * Calls `onFrame(now)`, seconds on the recordings' clock, until `end`; resolves early where `signal` aborts.
 *
 * speed: seconds of the recording for each second that passes here.
 */
export function play(end, speed, signal, onFrame) {
  return new Promise((done) => {
    const start = performance.now();
    const frame = () => {
      const now = ((performance.now() - start) / 1000) * speed;
      onFrame(signal.aborted ? end : Math.min(now, end));
      if (now < end && !signal.aborted) requestAnimationFrame(frame);
      else done();
    };
    requestAnimationFrame(frame);
  });
}

/** A fresh record of a lane. */
export const fresh = () => new Trace();
