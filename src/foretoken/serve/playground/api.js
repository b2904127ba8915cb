// The public API, its errors in words, and server-sent events out of a byte stream.

/** Something to tell the user as it is. `status` is 0 where no answer came. */
export class Problem extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

function headers(key) {
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

/** The first model served: {id, max_model_len, chat, speculation: {default, methods}}. */
export async function model(key) {
  const answer = await ask("v1/models", { headers: headers(key) });
  const first = (await answer.json()).data?.[0];
  if (!first) throw new Problem("The server lists no model.");
  return first;
}

/** What the server knows about its speculation. */
export async function speculation(key) {
  return (await ask("v1/speculation", { headers: headers(key) })).json();
}

/** Yields the chunks of one streamed completion, or of an answer in a conversation if the body has messages. */
export async function* complete(body, key, signal) {
  const answer = await ask(body.messages ? "v1/chat/completions" : "v1/completions", {
    method: "POST",
    headers: headers(key),
    signal,
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true }, return_steps: true }),
  });
  try {
    for await (const data of events(answer.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Problem(`The server gave up on it: ${chunk.error.message ?? "it says no more"}`);
      yield chunk;
    }
  } catch (error) {
    throw lost(error, "The connection broke off in the middle of the text.");
  }
  throw new Problem("The stream ended before its end mark: the server went away, or something between cut it off.");
}

async function ask(path, options) {
  let answer;
  try {
    answer = await fetch(path, options);
  } catch (error) {
    throw lost(error, "No answer from the server. Is it still running, and is this page from it?");
  }
  if (!answer.ok) throw await refusal(answer);
  return answer;
}

/** What the browser says of a broken connection is not for people; a user's own stop is not a problem. */
function lost(error, words) {
  return error instanceof Problem || error.name === "AbortError" ? error : new Problem(words);
}

async function refusal(answer) {
  const said = await answer.json().then((body) => body.error?.message, () => null);
  const after = answer.headers.get("Retry-After");
  const words = {
    401: "The server asks for an API key. Type it into the field “API key”.",
    403: "The server does not accept this API key.",
    404: "The server does not have this model or this path.",
    413: "The request is larger than the server takes.",
    429: `The server is busy: its queue is full.${after ? ` Try again in ${after} s.` : " Try again in a moment."}`,
    503: "The server is shutting down or not ready; it takes no requests now.",
  }[answer.status];
  const own = answer.status === 401 || answer.status === 429; // clear enough; other errors show the message of the server, too
  const text = words ? (said && !own ? `${words} It says: ${said}` : words) : said;
  return new Problem(text ?? `The server answered ${answer.status} ${answer.statusText}`.trim(), answer.status);
}

/** Yields the data of each event of a stream of Uint8Array. */
export async function* events(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  const parser = new Parser();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      yield* parser.push(done ? decoder.decode() : decoder.decode(value, { stream: true }));
      if (done) return;
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}

/** Text in, finished events out, however the text was cut. */
export class Parser {
  #rest = "";
  #data = [];

  push(text) {
    const found = [];
    const held = (this.#rest + text).endsWith("\r") ? "\r" : ""; // its "\n" may be on the way
    const whole = (this.#rest + text).slice(0, held ? -1 : undefined);
    const lines = whole.split(/\r\n|\r|\n/);
    this.#rest = lines.pop() + held;
    for (const line of lines) {
      if (line === "") {
        if (this.#data.length) found.push(this.#data.join("\n"));
        this.#data = [];
      } else if (line.startsWith("data:")) {
        this.#data.push(line.slice(line.startsWith("data: ") ? 6 : 5));
      }
    }
    return found;
  }
}
