// 64 clients that each want one streamed answer after another; every eighth one leaves early.

import exec from 'k6/execution';
import http from 'k6/http';
import { sleep } from 'k6';
import { Counter } from 'k6/metrics';

const target = JSON.parse(open(__ENV.TARGET));
const NAMES = ['whole', 'refused', 'left', 'wrong', 'healthy', 'unhealthy'];
const counters = Object.fromEntries(NAMES.map((name) => [name, new Counter(`seen_${name}`)]));
const headers = { authorization: `Bearer ${target.key}`, 'content-type': 'application/json' };

export const options = {
  scenarios: {
    streams: {
      executor: 'ramping-vus',
      startVUs: 1,
      stages: [
        { duration: '10s', target: 64 },
        { duration: '15s', target: 64 },
        { duration: '5s', target: 0 },
      ],
      gracefulRampDown: '60s',
      gracefulStop: '60s',
      exec: 'stream',
    },
    health: {
      executor: 'constant-arrival-rate',
      rate: 1,
      timeUnit: '1s',
      duration: '30s',
      preAllocatedVUs: 2,
      exec: 'health',
    },
  },
};

export function stream() {
  const number = exec.scenario.iterationInTest;
  const leaves = number % 8 === 7;
  const body = {
    model: target.model,
    messages: [{ role: 'user', content: `Tell me about the number ${number}.` }],
    max_tokens: leaves ? 400 : 8 + (number % 24),
    stream: true,
    stream_options: { include_usage: true },
  };
  const timeout = leaves ? '700ms' : '120s';
  const url = `${target.url}/v1/chat/completions`;
  const response = http.post(url, JSON.stringify(body), { headers, timeout });
  const kind = kindOf(response, leaves);
  counters[kind].add(1);
  if (kind === 'wrong') console.error(`${response.status} ${response.error} ${response.body}`);
  if (kind === 'refused') sleep(Number(response.headers['Retry-After']));
}

function kindOf(response, leaves) {
  if (response.status === 503) {
    const promised = response.headers['Retry-After'] && response.json('error.code') === 'queue_full';
    return promised ? 'refused' : 'wrong';
  }
  if (response.status === 200 && response.body) return isWhole(response.body) ? 'whole' : 'wrong';
  // What k6 knows of a request that it gave up is that it has no answer.
  return leaves && response.error_code === 1050 ? 'left' : 'wrong';
}

function isWhole(body) {
  const frames = body.split('\n\n');
  if (frames.pop() !== '' || frames.pop() !== 'data: [DONE]') return false;
  const events = frames.map((frame) => JSON.parse(frame.slice('data: '.length)));
  const { usage, choices } = events[events.length - 1];
  const ended = events.some((e) => e.choices.length && e.choices[0].finish_reason);
  return ended && choices.length === 0 && usage.completion_tokens >= 1;
}

export function health() {
  const response = http.get(`${target.url}/health`);
  counters[response.status === 200 ? 'healthy' : 'unhealthy'].add(1);
}

export function handleSummary(data) {
  const count = (name) => (data.metrics[`seen_${name}`] || { values: { count: 0 } }).values.count;
  return { [__ENV.SUMMARY]: JSON.stringify(Object.fromEntries(NAMES.map((n) => [n, count(n)]))) };
}
