// The Vercel AI SDK: packages ai and @ai-sdk/openai-compatible.

import assert from 'node:assert/strict';

import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { APICallError, generateObject, generateText, jsonSchema, streamText, tool } from 'ai';

import { QUESTION, SHAPE, base, chat, failure, isCity, run, target } from './checks.mjs';

const provider = (apiKey) =>
  createOpenAICompatible({
    name: 'ours',
    baseURL: base,
    apiKey,
    includeUsage: true,
    supportsStructuredOutputs: true,
  });
const model = provider(target.key)(target.model);
const greedy = { model, prompt: QUESTION, temperature: 0, maxOutputTokens: 32, maxRetries: 0 };

async function generate_text() {
  const want = await chat();
  const made = await generateText(greedy);
  assert.equal(made.text, want.choices[0].message.content);
  assert.equal(made.finishReason, want.choices[0].finish_reason);
  assert.equal(made.usage.totalTokens, want.usage.total_tokens);
}

async function stream_text() {
  const want = await chat();
  const made = streamText(greedy);
  let text = '';
  for await (const part of made.textStream) text += part;
  assert.equal(text, want.choices[0].message.content);
  assert.equal((await made.usage).totalTokens, want.usage.total_tokens);
}

async function generate_object() {
  const made = await generateObject({
    ...greedy,
    schema: jsonSchema(SHAPE),
    maxOutputTokens: 64,
  });
  assert(isCity(made.object));
}

async function tools() {
  const show = tool({ description: 'Shows a city.', inputSchema: jsonSchema(SHAPE) });
  const fields = { ...greedy, tools: { show_city: show }, maxOutputTokens: 64 };
  const choice = { type: 'tool', toolName: 'show_city' };
  const made = await generateText({ ...fields, toolChoice: choice });
  const [call] = made.toolCalls;
  assert.equal(call.toolName, 'show_city');
  assert(isCity(call.input));
  const streamed = streamText({ ...fields, toolChoice: choice });
  await streamed.consumeStream();
  const [again] = await streamed.toolCalls;
  assert.deepEqual(again.input, call.input);
}

async function errors() {
  const wrong = provider('wrong')(target.model);
  const refused = await failure(() => generateText({ ...greedy, model: wrong }));
  assert(APICallError.isInstance(refused));
  assert.equal(refused.statusCode, 401);
  assert.equal(refused.isRetryable, false);
  const range = await failure(() => generateText({ ...greedy, topP: 7 }));
  assert.equal(range.statusCode, 400);
  assert.match(range.message, /top_p/);
}

await run({ generate_text, stream_text, generate_object, tools, errors });
