import assert from "node:assert/strict";
import { test } from "node:test";

import { StreamStats, duration, figures } from "../../../../runtime/server/static/stats.js";
import { addChunk, newTurn, sentenceEnd } from "../../../../runtime/server/static/turn.js";

function chunk(delta, more = {}) {
  return { choices: [{ index: 0, delta, finish_reason: null, ...more }], usage: null };
}

const USAGE = {
  prompt_tokens: 40,
  completion_tokens: 5,
  prompt_tokens_details: { cached_tokens: 32 },
};

test("chunks add up to a reply, its tokens and its figures", () => {
  const turn = newTurn("hi", 1000);
  addChunk(turn, chunk({ role: "assistant", content: "" }), 1050);
  assert.equal(turn.stats.ttft, null);
  addChunk(turn, chunk({ reasoning_content: "hm" }), 1200);
  addChunk(turn, chunk({ content: "a" }, { logprobs: { content: [{ token: "a" }] } }), 1220);
  const two = { logprobs: { content: [{ token: "b" }, { token: "c" }] } };
  addChunk(turn, chunk({ content: "bc" }, two), 1240);
  assert.equal(turn.stats.tokens, 4);
  addChunk(turn, chunk({}, { finish_reason: "stop" }), 1260);
  addChunk(turn, { choices: [], usage: USAGE }, 1300);
  assert.equal(turn.text, "abc");
  assert.equal(turn.reasoning, "hm");
  assert.deepEqual(turn.tokens, [{ token: "a" }, { token: "b" }, { token: "c" }]);
  assert.equal(turn.finishReason, "stop");
  assert.equal(turn.stats.ttft, 200);
  assert.equal(turn.stats.tpot, (1260 - 1200) / (5 - 1));
  assert.equal(turn.stats.tokens, 5);
});

test("total time is TTFT + (tokens - 1) x TPOT", () => {
  const stats = new StreamStats(500);
  for (const now of [700, 720, 750, 755, 801]) stats.progress(now, 2);
  assert.ok(Math.abs(stats.ttft + (stats.tokens - 1) * stats.tpot - (801 - 500)) < 1e-9);
  assert.ok(Math.abs(stats.tokensPerSecond * stats.tpot - 1000) < 1e-9);
});

test("figures are told as soon as they are known, as guesses until the server counts", () => {
  const stats = new StreamStats(0);
  assert.deepEqual(figures(stats), []);
  stats.progress(212.4, 1);
  assert.deepEqual(figures(stats), ["TTFT 212 ms", "≈1 token"]);
  stats.progress(252.4, 4);
  assert.deepEqual(figures(stats).slice(1), ["TPOT ≈10.0 ms", "≈100.0 tokens/s", "≈5 tokens"]);
  stats.setUsage(USAGE);
  const exact = ["TPOT 10.0 ms", "100.0 tokens/s", "5 tokens", "prompt 40 (32 cached)"];
  assert.deepEqual(figures(stats).slice(1), exact);
});

test("a reply that comes all at once has no TPOT", () => {
  const stats = new StreamStats(0);
  stats.progress(100, 1);
  stats.progress(100, 1);
  assert.equal(stats.tpot, null);
  assert.equal(stats.tokensPerSecond, null);
});

test("durations keep three figures or so", () => {
  assert.deepEqual(
    [0.04, 8.34, 99.94, 99.96, 999.4, 999.6, 61234].map(duration),
    ["0.0 ms", "8.3 ms", "99.9 ms", "100 ms", "999 ms", "1.00 s", "61.23 s"],
  );
});

test("screen readers are given whole sentences", () => {
  const text = "One. Two? 3.5 is\nthree: and";
  const said = [];
  let from = 0;
  for (let size = 0; size <= text.length; size += 1) {
    const end = sentenceEnd(text.slice(0, size), from);
    if (end > from) said.push(text.slice(from, end));
    from = end;
  }
  assert.deepEqual(said, ["One. ", "Two? ", "3.5 is\n", "three: "]);
  assert.equal(sentenceEnd(text, 0), text.length - "and".length);
});
