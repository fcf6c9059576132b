// One conversation with tools through the AI SDK:
// ai_sdk.mjs PROVIDER URL KEY MODEL QUESTION QUESTION
// PROVIDER: openai (its responses, which the server is to store), openai-stateless (which it isn't), openai-chat,
// anthropic or google.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createGoogleGenerativeAI } from "@ai-sdk/google";
import { createOpenAI } from "@ai-sdk/openai";
import * as ai from "ai";
import { z } from "zod";

const [provider, url, apiKey, name, ...questions] = process.argv.slice(2);
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey });
const models = {
  openai: () => openai.responses(name),
  "openai-stateless": () => openai.responses(name),
  "openai-chat": () => openai.chat(name),
  anthropic: () => createAnthropic({ baseURL: `${url}/v1`, apiKey })(name),
  google: () => createGoogleGenerativeAI({ baseURL: `${url}/v1beta`, apiKey })(name),
};
const model = models[provider]();
const rules =
  "You answer questions about a manual. Name the page of each answer. Look it up before you answer. ".repeat(4);
const tools = {
  find_page: ai.tool({
    description: "Find the page of the manual that explains a topic.",
    inputSchema: z.object({ topic: z.string().describe("What the page explains.") }),
    execute: async ({ topic }) => `${topic}: page ${topic === "pins" ? 12 : 40}`,
  }),
  read_page: ai.tool({
    description: "Read a page of the manual.",
    inputSchema: z.object({ page: z.number().int() }),
    execute: async ({ page }) => `Page ${page} explains ${page === 12 ? "pins" : "forks"}.`,
  }),
};
const system =
  provider === "anthropic"
    ? { role: "system", content: rules, providerOptions: { anthropic: { cacheControl: { type: "ephemeral" } } } }
    : { role: "system", content: rules };
const providerOptions = provider === "openai-stateless" ? { openai: { store: false } } : undefined;
const fixed = {
  model,
  tools,
  stopWhen: ai.stepCountIs(8),
  maxRetries: 0,
  allowSystemInMessages: true,
  providerOptions,
};

const messages = [system, { role: "user", content: questions[0] }];
const first = await ai.generateText({ ...fixed, messages });
messages.push(...first.responseMessages, { role: "user", content: questions[1] });
const second = ai.streamText({ ...fixed, messages });
for await (const part of second.fullStream) {
  if (part.type === "error") throw part.error;
}
const schema = z.object({ number: z.number().int(), topic: z.string() });
await ai.generateText({ model, maxRetries: 0, prompt: questions[0], output: ai.Output.object({ schema }) });
