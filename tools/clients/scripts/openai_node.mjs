// The openai package for Node.

import assert from 'node:assert/strict';

import OpenAI from 'openai';

import { QUESTION, SHAPE, base, chat, failure, isCity, messages, run, target } from './checks.mjs';

const client = new OpenAI({ baseURL: base, apiKey: target.key, maxRetries: 0 });
const greedy = { model: target.model, messages, temperature: 0, max_tokens: 32 };
const tool = { type: 'function', function: { name: 'show_city', parameters: SHAPE } };

async function models() {
  const ids = [];
  for await (const model of client.models.list()) ids.push(model.id);
  assert(ids.includes(target.model));
  assert.equal((await client.models.retrieve(target.model)).id, target.model);
}

async function answer() {
  const want = await chat();
  const made = await client.chat.completions.create(greedy);
  assert.equal(made.choices[0].message.content, want.choices[0].message.content);
  assert.equal(made.choices[0].finish_reason, want.choices[0].finish_reason);
  const { prompt_tokens, completion_tokens, total_tokens } = made.usage;
  assert.equal(prompt_tokens + completion_tokens, total_tokens);
  assert(made._request_id);
}

async function stream() {
  const want = await chat();
  const options = { stream: true, stream_options: { include_usage: true } };
  let text = '';
  let usage = null;
  for await (const chunk of await client.chat.completions.create({ ...greedy, ...options })) {
    text += chunk.choices[0]?.delta.content ?? '';
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, want.choices[0].message.content);
  assert.equal(usage.total_tokens, want.usage.total_tokens);
}

async function stream_helper() {
  const want = await chat();
  const made = client.chat.completions.stream(greedy);
  let text = '';
  made.on('content', (delta) => {
    text += delta;
  });
  const final = await made.finalChatCompletion();
  assert.equal(final.choices[0].message.content, want.choices[0].message.content);
  assert.equal(text, want.choices[0].message.content);
  assert.equal(final.choices[0].finish_reason, want.choices[0].finish_reason);
}

async function stream_that_is_left() {
  const long = { ...greedy, max_tokens: 1000, stream: true };
  const made = await client.chat.completions.create(long);
  let count = 0;
  for await (const chunk of made) {
    count += chunk.choices.length;
    if (count === 3) break;
  }
  assert(made.controller.signal.aborted);
  assert((await client.chat.completions.create(greedy)).choices[0].message.content);
}

async function completions() {
  const prompt = 'The capital of France is';
  const fields = { model: target.model, prompt, temperature: 0, max_tokens: 8 };
  const whole = await client.completions.create(fields);
  let text = '';
  for await (const part of await client.completions.create({ ...fields, stream: true })) {
    text += part.choices[0]?.text ?? '';
  }
  assert(whole.choices[0].text.length > 0);
  assert.equal(text, whole.choices[0].text);
}

async function json_schema() {
  const format = { type: 'json_schema', json_schema: { name: 'city', schema: SHAPE, strict: true } };
  const made = await client.chat.completions.create({ ...greedy, response_format: format, max_tokens: 64 });
  assert(isCity(JSON.parse(made.choices[0].message.content)));
}

async function tools() {
  const choice = { type: 'function', function: { name: 'show_city' } };
  const fields = { ...greedy, tools: [tool], tool_choice: choice, max_tokens: 64 };
  const made = await client.chat.completions.create(fields);
  const [call] = made.choices[0].message.tool_calls;
  assert.equal(made.choices[0].finish_reason, 'tool_calls');
  assert.equal(call.function.name, 'show_city');
  assert(isCity(JSON.parse(call.function.arguments)));
  const streamed = await client.chat.completions.stream(fields).finalChatCompletion();
  const [again] = streamed.choices[0].message.tool_calls;
  assert.deepEqual(JSON.parse(again.function.arguments), JSON.parse(call.function.arguments));
}

async function a_tool_that_is_run() {
  const asked = [];
  const runnable = {
    type: 'function',
    function: {
      ...tool.function,
      parse: JSON.parse,
      function: (city) => {
        asked.push(city);
        return 'It is shown.';
      },
    },
  };
  const runner = client.chat.completions.runTools(
    { ...greedy, tools: [runnable], tool_choice: 'required', parallel_tool_calls: false, max_tokens: 64 },
    { maxChatCompletions: 1 },
  );
  await runner.done();
  assert.equal(asked.length, 1);
  assert(isCity(asked[0]));
}

async function responses() {
  const want = await chat();
  const fields = { model: target.model, input: QUESTION, temperature: 0, max_output_tokens: 32 };
  const made = await client.responses.create(fields);
  assert.equal(made.output_text, want.choices[0].message.content);
  const streamed = client.responses.stream(fields);
  let text = '';
  streamed.on('response.output_text.delta', (event) => {
    text += event.delta;
  });
  const final = await streamed.finalResponse();
  assert.equal(text, made.output_text);
  assert.equal(final.output_text, made.output_text);
}

async function errors() {
  const wrong = new OpenAI({ baseURL: base, apiKey: 'wrong', maxRetries: 0 });
  const refused = await failure(() => wrong.chat.completions.create(greedy));
  assert(refused instanceof OpenAI.AuthenticationError);
  assert.equal(refused.code, 'invalid_api_key');
  const range = await failure(() => client.chat.completions.create({ ...greedy, top_p: 7 }));
  assert(range instanceof OpenAI.BadRequestError);
  assert.equal(range.param, 'top_p');
  const missing = await failure(() => client.models.retrieve('no-such-model'));
  assert(missing instanceof OpenAI.NotFoundError);
  const content = 'word '.repeat(target.context + 1);
  const long = await failure(() =>
    client.chat.completions.create({ ...greedy, messages: [{ role: 'user', content }] }),
  );
  assert(long instanceof OpenAI.BadRequestError);
  assert.equal(long.code, 'context_length_exceeded');
}

await run({
  models,
  answer,
  stream,
  stream_helper,
  stream_that_is_left,
  completions,
  json_schema,
  tools,
  a_tool_that_is_run,
  responses,
  errors,
});
