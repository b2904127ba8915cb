// The clients of Node against a running server: node node.mjs URL. Prints one line of JSON for each check.
// The name of a check is "client | API | what"; the table of clients in docs/guides/serving.md lists the same.
import Anthropic from "@anthropic-ai/sdk";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { z } from "zod";

const [url] = process.argv.slice(2);
const model = "stdlib";
const messages = [{ role: "user", content: "def main(args):" }];
const greedy = { model, temperature: 0 };
const settings = { prompt: "def f", temperature: 0, maxOutputTokens: 8, maxRetries: 0 };
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const aiOpenai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const aiAnthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" });

const parameters = {
  type: "object",
  properties: { a: { type: "integer", minimum: 0, maximum: 9 } },
  required: ["a"],
  additionalProperties: false,
};
const called = tool({ description: "Adds.", inputSchema: z.object({ a: z.boolean() }), execute: ({ a }) => `${a}` });
const loop = { prompt: "x", tools: { called }, toolChoice: "required", maxOutputTokens: 200, maxRetries: 0 };
const single = { openai: { parallelToolCalls: false }, anthropic: { disableParallelToolUse: true } };

function check(condition, words) {
  if (!condition) throw new Error(words);
}

function has(text) {
  check(text, "no text");
}

async function collected(stream) {
  const parts = [];
  for await (const part of stream) parts.push(part);
  return parts;
}

// Three steps, of which each sends back what its calls returned.
async function steps(options) {
  const { steps } = await generateText({ ...loop, providerOptions: single, stopWhen: stepCountIs(3), ...options });
  check(steps.length === 3 && steps.every((step) => step.toolResults.length > 0), "a step has no call");
}

async function text(options) {
  const result = await generateText({ ...settings, ...options });
  check(result.text && result.usage.outputTokens === 8, "no text");
}

async function streamed(options) {
  let failure = null;
  const onError = ({ error }) => (failure = error);
  const parts = await collected(streamText({ ...settings, ...options, onError }).textStream);
  if (failure) throw failure;
  check(parts.length > 0, "no text");
}

async function schema(options) {
  const output = Output.object({ schema: z.object({ on: z.boolean() }) });
  const result = await generateText({ prompt: "x", maxRetries: 0, output, ...options });
  check(typeof result.output.on === "boolean", "no object");
}

const checks = {
  "openai (Node) | completions | text": async () =>
    has((await openai.completions.create({ ...greedy, prompt: "x", max_tokens: 8 })).choices[0].text),
  "openai (Node) | completions | stream": async () => {
    const body = { ...greedy, prompt: "x", max_tokens: 8, stream: true };
    check((await collected(await openai.completions.create(body))).length > 1, "no chunks");
  },
  "openai (Node) | chat completions | text": async () => {
    const { choices } = await openai.chat.completions.create({ ...greedy, messages, max_completion_tokens: 8 });
    check(choices[0].message.content, "no text");
  },
  "openai (Node) | chat completions | stream": async () => {
    const stream = openai.chat.completions.stream({ ...greedy, messages, max_completion_tokens: 8 });
    check((await stream.finalChatCompletion()).choices[0].message.content, "no text");
  },
  "openai (Node) | chat completions | tools": async () => {
    const tools = [{ type: "function", function: { name: "add", parameters } }];
    const said = [...messages];
    for (let step = 0; step < 3; step++) {
      const body = { model, messages: said, tools, tool_choice: "required", parallel_tool_calls: false };
      const { choices } = await openai.chat.completions.create({ ...body, max_completion_tokens: 200 });
      const [call] = choices[0].message.tool_calls;
      check(Number.isInteger(JSON.parse(call.function.arguments).a), "no argument");
      said.push(choices[0].message, { role: "tool", tool_call_id: call.id, content: call.function.arguments });
    }
  },
  "openai (Node) | chat completions | schema": async () => {
    const json_schema = { name: "one", strict: true, schema: parameters };
    const response_format = { type: "json_schema", json_schema };
    const body = { model, messages, response_format, max_completion_tokens: 200 };
    const { choices } = await openai.chat.completions.parse(body);
    check(Number.isInteger(choices[0].message.parsed.a), "no object");
  },
  "openai (Node) | responses | text": async () =>
    has((await openai.responses.create({ ...greedy, input: "def f", max_output_tokens: 8 })).output_text),
  "openai (Node) | responses | stream": async () => {
    const stream = openai.responses.stream({ ...greedy, input: "def f", max_output_tokens: 8 });
    check((await collected(stream)).length > 8, "no events");
    check((await stream.finalResponse()).output_text, "no text");
  },
  "openai (Node) | responses | tools": async () => {
    const tools = [{ type: "function", name: "add", strict: true, parameters }];
    const input = [...messages];
    for (let step = 0; step < 3; step++) {
      const body = { model, input, tools, tool_choice: "required", parallel_tool_calls: false };
      const { output } = await openai.responses.create({ ...body, max_output_tokens: 200 });
      const [call] = output;
      check(Number.isInteger(JSON.parse(call.arguments).a), "no argument");
      input.push(...output, { type: "function_call_output", call_id: call.call_id, output: call.arguments });
    }
  },
  "@anthropic-ai/sdk (Node) | messages | text": async () =>
    has((await anthropic.messages.create({ ...greedy, messages, max_tokens: 8 })).content[0].text),
  "@anthropic-ai/sdk (Node) | messages | stream": async () =>
    has((await anthropic.messages.stream({ ...greedy, messages, max_tokens: 8 }).finalMessage()).content[0].text),
  "@anthropic-ai/sdk (Node) | messages | tools": async () => {
    const tools = [{ name: "add", input_schema: parameters }];
    const tool_choice = { type: "any", disable_parallel_tool_use: true };
    const said = [...messages];
    for (let step = 0; step < 3; step++) {
      const body = { model, messages: said, tools, tool_choice, max_tokens: 400 };
      const { content, stop_reason } = await anthropic.messages.create(body);
      check(stop_reason === "tool_use" && Number.isInteger(content[0].input.a), "no argument");
      const results = [{ type: "tool_result", tool_use_id: content[0].id, content: "1" }];
      said.push({ role: "assistant", content }, { role: "user", content: results });
    }
  },
  "@anthropic-ai/sdk (Node) | messages | count_tokens": async () =>
    check((await anthropic.messages.countTokens({ model, messages })).input_tokens > 0, "no tokens"),
  "ai (Node) | chat completions | text": () => text({ model: aiOpenai.chat(model) }),
  "ai (Node) | chat completions | stream": () => streamed({ model: aiOpenai.chat(model) }),
  "ai (Node) | chat completions | tools": () => steps({ model: aiOpenai.chat(model) }),
  "ai (Node) | chat completions | schema": () => schema({ model: aiOpenai.chat(model) }),
  "ai (Node) | responses | text (its default)": () => text({ model: aiOpenai(model) }),
  "ai (Node) | responses | stream": () => streamed({ model: aiOpenai(model) }),
  "ai (Node) | responses | tools": async () => {
    await steps({ model: aiOpenai(model) });
    await steps({ model: aiOpenai(model), providerOptions: { openai: { ...single.openai, store: false } } });
  },
  "ai (Node) | responses | schema": () => schema({ model: aiOpenai(model) }),
  "ai (Node) | messages | text": () => text({ model: aiAnthropic(model) }),
  "ai (Node) | messages | stream": () => streamed({ model: aiAnthropic(model) }),
  "ai (Node) | messages | tools": () => steps({ model: aiAnthropic(model) }),
};

for (const [name, run] of Object.entries(checks)) {
  try {
    await run();
    console.log(JSON.stringify({ name }));
  } catch (error) {
    const words = `${error?.message ?? error} ${error?.responseBody ?? ""}`;
    console.log(JSON.stringify({ name, error: words.slice(0, 500) }));
  }
}
