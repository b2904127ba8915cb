// The form, the keys, and the order in which a race goes.

import { Problem, model, speculation } from "./api.js";
import { pace, speed } from "./charts.js";
import { Conversation } from "./conversation.js";
import { $, calm, el } from "./dom.js";
import { fresh, gradeOf, play, record, requests, warm } from "./race.js";
import { NAMES, Stage, longest, result } from "./stage.js";
import { hide } from "./tip.js";

const EVERY = 3000; // milliseconds between looks at the state of speculation
let timer = 0;

const CODE = {
  function: 'def read_lines(path):\n    """Return the lines of a file, without their ends."""\n',
  class: 'class Stack:\n    """A last-in, first-out queue."""\n\n    def __init__(self):\n',
  script: 'import argparse\nimport sys\n\n\ndef main():\n    parser = argparse.ArgumentParser(',
};
const MESSAGES = {
  explain: "Why is the sky blue? Answer in three sentences.",
  correct: "Correct the spelling and repeat the text: Teh quick brown fox jumps ovr the lazy dog, becuase teh dog is slow.",
  code: "Write a Python function that counts how often each word occurs in a text.",
};
const stage = new Stage();
const talk = new Conversation();
let served = null; // the model's entry in /v1/models
let running = null; // the AbortController of what goes on
let last = null; // the finished race: {shown, grade, traces, shared}

/** Tells what goes on. What the page shows elsewhere in large letters is only spoken. */
function say(words, shown = true) {
  $("status").textContent = words;
  $("status").classList.toggle("hidden", !shown);
}

function complain(error) {
  $("problem").hidden = !error;
  $("problem").textContent = error?.message ?? "";
  if (error?.status === 401) $("key").focus();
}

/** Shows the value of each slider beside its name. */
function sliders() {
  $("depth-value").textContent = $("depth").value === "0" ? "auto" : $("depth").value;
  $("temperature-value").textContent = $("temperature").value === "0" ? "0, greedy" : $("temperature").value;
  $("top-p-value").textContent = $("top-p").value;
}

/** again: whether the last turn of the conversation is answered once more. */
function settings(again) {
  const [prompt, system] = [again ? talk.question : $("prompt").value, $("system").value.trim()];
  return {
    model: served.id,
    prompt,
    messages: served.chat ? (again ? talk.messages(system) : talk.ask(prompt, system)) : null,
    method: $("method").value,
    depth: Number($("depth").value),
    temperature: Number($("temperature").value),
    topP: Number($("top-p").value),
    maxTokens: Number($("max-tokens").value),
    seed: $("seed").value === "" ? null : Number($("seed").value),
  };
}

/** Asks what is served, and offers its methods. */
async function meet() {
  served = await model($("key").value);
  watch($("key").value);
  const { methods = [], default: usual } = served.speculation ?? {};
  const others = methods.filter((method) => method !== usual && method !== "none");
  const options = usual && usual !== "none" ? [usual, ...others] : others;
  $("method").replaceChildren(...options.map((method) => el("option", { value: method }, method)));
  $("method").disabled = !options.length;
  if (!options.length) $("method").append(el("option", { value: "" }, "none loaded"));
  if (served.max_model_len) $("max-tokens").max = served.max_model_len;
  offer(served.chat ? MESSAGES : CODE);
  $("about").textContent = `${served.id}: a cheap draft proposes, the target verifies, the text stays the target’s own.`;
}

/** Makes the form one for messages or for code, with examples that fit; what the user has typed stays. */
function offer(examples) {
  const chat = examples === MESSAGES;
  document.body.dataset.kind = chat ? "chat" : "text";
  $("prompt-name").textContent = chat ? "Message" : "Prompt";
  $("prompt").rows = chat ? 4 : 8;
  for (const node of [$("system-field"), $("again"), $("anew")]) node.hidden = !chat;
  $("examples").replaceChildren(...Object.entries(examples).map(([name, prompt]) => {
    const button = el("button", { type: "button", class: "chip" }, name);
    button.addEventListener("click", () => ($("prompt").value = prompt));
    return button;
  }));
  const known = ["", ...Object.values(CODE), ...Object.values(MESSAGES)];
  if (!talk.question && known.includes($("prompt").value)) $("prompt").value = Object.values(examples)[0];
}

/** One lane, live. */
async function lane(name, body, traces, key, signal) {
  let over = false;
  const start = performance.now();
  stage.lanes[name].state("running");
  const frame = () => {
    if (over || signal.aborted) return;
    stage.frame({ [name]: (performance.now() - start) / 1000 });
    requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
  try {
    await record(body, key, signal, traces[name], (event) => stage.show(name, event));
    stage.finish(name);
  } finally {
    over = true;
  }
}

async function race(signal, again = false) {
  if (!served) await meet();
  const chosen = settings(again);
  const shown = { prompt: chosen.prompt, asked: Boolean(chosen.messages) };
  const [key, together] = [$("key").value, $("mode").value === "together"];
  const bodies = requests(chosen);
  const grade = gradeOf(chosen);
  const traces = { speculative: fresh(), plain: fresh() };
  stage.reset(shown, grade, traces, 0);
  $("drafter").textContent = `${chosen.method || "no drafting"}, ${chosen.depth || "auto"}`;
  if (together) {
    say("Both lanes run.");
    for (const name of NAMES) await warm(bodies[name], key, signal);
    await Promise.all(NAMES.map((name) => lane(name, bodies[name], traces, key, signal)));
  } else {
    for (const name of NAMES) {
      stage.lanes[name].state("waiting");
      say(`The ${name} lane runs, alone on the machine.`);
      await warm(bodies[name], key, signal);
      await lane(name, bodies[name], traces, key, signal);
    }
  }
  last = { shown, grade, traces, shared: together };
  $("replays").hidden = false;
  if (served.chat) {
    talk.answered(traces.speculative);
    if (!again) $("prompt").value = "";
    $("prompt").placeholder = "The next message";
  }
  if (!together && !calm()) await replay(signal);
  else say(result(traces, grade, together), false);
}

async function replay(signal) {
  const { shown, grade, traces, shared } = last;
  const end = longest(traces);
  const rate = Number($("speed").value) || pace(end);
  stage.reset(shown, grade, traces, end);
  say(`Both recordings on one clock, ${speed(rate)}.`);
  await play(end, rate, signal, (now) => NAMES.forEach((name) => stage.until(name, now)));
  NAMES.forEach((name) => stage.until(name, Infinity));
  say(result(traces, grade, shared), false);
}

/** Runs `work(signal)` as the one thing that goes on; the button stops it meanwhile. */
async function during(work) {
  running = new AbortController();
  complain(null);
  $("go").textContent = "Stop";
  document.body.dataset.busy = "true";
  try {
    await work(running.signal);
  } catch (error) {
    if (error.name === "AbortError") say("Stopped.");
    else {
      say("");
      complain(error instanceof Problem ? error : new Problem(`This page made a mistake: ${error.message}`));
    }
    NAMES.forEach((name) => stage.lanes[name].state(""));
  } finally {
    running.abort(); // where one lane failed, the other ends too
    running = null;
    $("go").textContent = "Race";
    delete document.body.dataset.busy;
  }
}

function go() {
  if (running) running.abort();
  else if ($("form").reportValidity()) during(race);
}

/** Nothing has been raced. */
function empty() {
  stage.reset({ prompt: "", asked: false }, "greedy", { speculative: fresh(), plain: fresh() }, 1);
  say("");
}

function theme(choice) {
  if (choice) document.documentElement.dataset.theme = choice;
  try {
    if (choice) localStorage.setItem("theme", choice);
    return localStorage.getItem("theme");
  } catch {
    return choice ?? null; // storage may be forbidden; the choice then lasts as long as the page
  }
}

function start() {
  theme(theme());
  $("theme").addEventListener("click", () => {
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const now = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
    theme(now === "dark" ? "light" : "dark");
  });
  $("settings").addEventListener("input", sliders);
  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    go();
  });
  $("replay").addEventListener("click", () => running || during(replay));
  $("again").addEventListener("click", () => running || during((signal) => race(signal, true)));
  $("anew").addEventListener("click", () => {
    if (running) return;
    talk.clear();
    $("prompt").placeholder = "";
    last = null;
    $("replays").hidden = true;
    empty();
    offer(MESSAGES);
    $("prompt").focus();
  });
  const { root } = stage.lanes.speculative;
  $("struck").addEventListener("change", () => root.classList.toggle("struck", $("struck").checked));
  $("key").addEventListener("change", () => meet().then(() => complain(null), complain));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      if (!running) go();
    } else if (event.key === "Escape") {
      hide();
      running?.abort();
    }
  });
  sliders();
  empty();
  meet().catch(complain);
}

/** The state of speculation in one line. */
function sentence(state) {
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
function watch(key) {
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

start();
