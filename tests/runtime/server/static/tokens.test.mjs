import assert from "node:assert/strict";
import { test } from "node:test";

import {
  TokenTexts,
  alternatives,
  band,
  percent,
  probability,
  visible,
} from "../../../../runtime/server/static/tokens.js";
import { cut, dice } from "./dice.mjs";

test("characters that tokens share appear once, whole, at the last of them", () => {
  const roll = dice(4);
  const text = "\uFEFFnaïve 日本語 👩‍👩‍👧 \uFEFFend";
  for (let round = 0; round < 300; round += 1) {
    const bytes = String.fromCharCode(...new TextEncoder().encode(text));
    const pieces = cut(bytes, roll, 4).map((piece) => [...piece].map((c) => c.charCodeAt(0)));
    const texts = new TokenTexts();
    const shown = pieces.map((piece) => texts.next({ token: "\uFFFD", bytes: piece }));
    assert.equal(shown.join(""), text);
    assert.ok(shown.every((part) => !part.includes("\uFFFD")));
  }
});

test("a server that tells no bytes is taken at its word", () => {
  assert.equal(new TokenTexts().next({ token: " a", bytes: null }), " a");
});

test("probabilities and their bands", () => {
  assert.equal(probability(0), 1);
  assert.ok(Math.abs(probability(Math.log(0.25)) - 0.25) < 1e-12);
  assert.equal(probability(-9999), 0);
  assert.equal(probability(null), 0);
  assert.deepEqual([0, 0.149, 0.15, 0.4, 0.69, 0.7, 0.9, 1].map(band), [0, 0, 1, 2, 2, 3, 4, 4]);
  assert.deepEqual([0, 0.0004, 0.0005, 0.123, 1].map(percent), [
    "0.0%",
    "<0.1%",
    "0.1%",
    "12.3%",
    "100.0%",
  ]);
});

function entry(token, p, top_logprobs) {
  const bytes = [...new TextEncoder().encode(token)];
  return { token, logprob: Math.log(p), bytes, top_logprobs };
}

test("the chosen token stands among its rivals by probability", () => {
  const rivals = [entry(" a", 0.5), entry(" b", 0.25)];
  const shown = (rows) => rows.map(({ text, p, chosen }) => [text, p.toFixed(2), chosen]);
  assert.deepEqual(shown(alternatives(entry(" b", 0.25, rivals))), [
    ["␣a", "0.50", false],
    ["␣b", "0.25", true],
  ]);
  assert.deepEqual(shown(alternatives(entry("c", 0.3, rivals))), [
    ["␣a", "0.50", false],
    ["c", "0.30", true],
    ["␣b", "0.25", false],
  ]);
  assert.equal(alternatives({ token: "x", logprob: -1, bytes: null }).length, 1);
});

test("of parts of characters, which look alike, one is the chosen", () => {
  const part = (byte, logprob) => ({ token: "\uFFFD", logprob, bytes: [byte] });
  const rivals = [part(0xc3, -0.5), part(0xe2, -1)];
  const rows = alternatives({ ...part(0xe2, -1), top_logprobs: rivals });
  const chosen = rows.map(({ text, chosen: own }) => [text, own]);
  assert.deepEqual(chosen, [["c3", false], ["e2", true]]);
});

test("blanks and control characters can be seen", () => {
  assert.equal(visible(" a\n\t\r\u0000\u007f", null), "␣a\\n\\t\\r\\x00\\x7f");
});
