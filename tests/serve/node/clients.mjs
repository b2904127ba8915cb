// The clients of Node against a running server: node clients.mjs URL. Prints one line of JSON for each.
import Anthropic from "@anthropic-ai/sdk";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { z } from "zod";

const [url] = process.argv.slice(2);
const model = "stdlib";
const messages = [{ role: "user", content: "def main(args):" }];
const settings = { prompt: "def f", maxOutputTokens: 8, maxRetries: 0 };
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

async function collected(stream) {
  const parts = [];
  for await (const part of stream) parts.push(part);
  return parts;
}

async function steps(options) {
  const { steps } = await generateText({ ...loop, stopWhen: stepCountIs(3), ...options });
  if (steps.length !== 3 || steps.some((step) => step.toolResults.length === 0)) throw new Error("a step has no call");
  return steps.length;
}

const checks = {
  "openai: chat completions": async () =>
    (await openai.chat.completions.create({ model, messages, max_completion_tokens: 8 })).choices[0].message.content,
  "openai: completions": async () =>
    (await openai.completions.create({ model, prompt: "x", max_tokens: 8 })).choices[0].text,
  "openai: responses": async () =>
    (await openai.responses.create({ model, input: "def f", max_output_tokens: 8 })).output_text,
  "openai: responses, streamed": async () => {
    const stream = openai.responses.stream({ model, input: "def f", max_output_tokens: 8 });
    const events = await collected(stream);
    return [events.length, (await stream.finalResponse()).status];
  },
  "openai: responses, tools in several steps": async () => {
    const tools = [{ type: "function", name: "add", strict: true, parameters }];
    const input = [...messages];
    for (let step = 0; step < 3; step++) {
      const body = { model, input, tools, tool_choice: "required", parallel_tool_calls: false, max_output_tokens: 200 };
      const { output } = await openai.responses.create(body);
      const [call] = output;
      input.push(...output, { type: "function_call_output", call_id: call.call_id, output: call.arguments });
    }
    return input.length;
  },
  "anthropic: messages": async () => (await anthropic.messages.create({ model, messages, max_tokens: 8 })).stop_reason,
  "anthropic: messages, streamed": async () =>
    (await anthropic.messages.stream({ model, messages, max_tokens: 8 }).finalMessage()).content,
  "anthropic: count_tokens": async () => (await anthropic.messages.countTokens({ model, messages })).input_tokens,
  "anthropic: tools": async () => {
    const tools = [{ name: "add", input_schema: parameters }];
    const body = { model, messages, tools, tool_choice: { type: "any" }, max_tokens: 400 };
    return (await anthropic.messages.create(body)).stop_reason;
  },
  "ai: @ai-sdk/openai, its default": async () => (await generateText({ model: aiOpenai(model), ...settings })).text,
  "ai: @ai-sdk/openai, chat": async () => (await generateText({ model: aiOpenai.chat(model), ...settings })).text,
  "ai: streamed": async () => {
    let failure = null;
    const onError = ({ error }) => (failure = error);
    const parts = await collected(streamText({ model: aiOpenai(model), ...settings, onError }).textStream);
    if (failure) throw failure;
    return parts.length;
  },
  "ai: an object": async () => {
    const output = Output.object({ schema: z.object({ on: z.boolean() }) });
    return (await generateText({ model: aiOpenai(model), prompt: "x", maxRetries: 0, output })).output;
  },
  "ai: tools in several steps": () => steps({ model: aiOpenai(model) }),
  "ai: tools in several steps, store: false": () =>
    steps({ model: aiOpenai(model), providerOptions: { openai: { store: false } } }),
  "ai: @ai-sdk/anthropic": async () => (await generateText({ model: aiAnthropic(model), ...settings })).text,
  "ai: @ai-sdk/anthropic, tools in several steps": () => steps({ model: aiAnthropic(model) }),
};

for (const [name, check] of Object.entries(checks)) {
  try {
    console.log(JSON.stringify({ name, got: await check() }));
  } catch (error) {
    console.log(JSON.stringify({ name, error: `${error?.message ?? error} ${error?.responseBody ?? ""}`.slice(0, 500) }));
  }
}
