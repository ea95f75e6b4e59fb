// Runs the checks of one client in Node: `node SCRIPT TARGET.json REPORT.jsonl`.

import { appendFileSync, readFileSync } from 'node:fs';

const MAX_ERROR = 600;
export const QUESTION = 'What is the capital of France?';
export const messages = [{ role: 'user', content: QUESTION }];
export const SHAPE = {
  type: 'object',
  properties: { city: { enum: ['Paris', 'London', 'Rome'] }, large: { type: 'boolean' } },
  required: ['city', 'large'],
  additionalProperties: false,
};

const [, , targetPath, reportPath] = process.argv;
export const target = JSON.parse(readFileSync(targetPath, 'utf-8'));
export const base = `${target.url}/v1`;

// What plain HTTP gives for the same request: what the client's answer is compared with.
export async function chat(fields = {}) {
  const response = await post('/v1/chat/completions', {
    messages,
    temperature: 0,
    max_tokens: 32,
    ...fields,
  });
  if (response.status !== 200) throw new Error(await response.text());
  return response.json();
}

export function post(path, body) {
  return fetch(target.url + path, {
    method: 'POST',
    headers: { authorization: `Bearer ${target.key}`, 'content-type': 'application/json' },
    body: JSON.stringify(body),
  });
}

// Whatever the work raises. Throws when it raises nothing.
export async function failure(work) {
  try {
    await work();
  } catch (error) {
    return error;
  }
  throw new Error('nothing was raised');
}

export function isCity(value) {
  return SHAPE.properties.city.enum.includes(value.city) && typeof value.large === 'boolean';
}

// One line for each check: its name, its seconds, and what was wrong, if anything was.
export async function run(checks) {
  for (const [name, check] of Object.entries(checks)) {
    const started = performance.now();
    let error = null;
    try {
      await check();
    } catch (raised) {
      error = `${raised?.name}: ${raised?.message ?? raised}`.slice(0, MAX_ERROR);
    }
    const seconds = Math.round((performance.now() - started) / 10) / 100;
    const line = { check: name.replaceAll('_', ' '), seconds, error };
    appendFileSync(reportPath, `${JSON.stringify(line)}\n`);
  }
}
