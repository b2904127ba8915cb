// Server-sent events out of a byte stream: pure, and indifferent to how the bytes were cut.

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

/** Text in, finished events out. */
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
