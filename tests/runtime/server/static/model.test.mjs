import assert from "node:assert/strict";
import { test } from "node:test";

import { facts, parity } from "../../../../runtime/server/static/model.js";

const MODEL = {
  id: "m",
  trtllm_lite: {
    target: "cpu",
    limits: { max_model_len: 8192 },
    parity: {
      passed: true,
      gates: [{ name: "decode_top1", value: 0.97076648, passed: true, meaning: "" }, { value: 1 }],
    },
    revision: null,
  },
};

test("the badge says what the certificate says, and nothing where there is none", () => {
  assert.equal(parity(MODEL), true);
  assert.equal(parity({ trtllm_lite: { parity: { passed: false } } }), false);
  for (const other of [undefined, {}, { trtllm_lite: {} }, { trtllm_lite: { parity: null } }]) {
    assert.equal(parity(other), null);
  }
  assert.equal(parity({ trtllm_lite: { parity: { passed: "yes" } } }), null);
});

test("everything about the bundle is told, lists by the names in them", () => {
  assert.deepEqual(facts(MODEL), [
    ["target", "cpu"],
    ["limits.max_model_len", "8192"],
    ["parity.passed", "true"],
    ["parity.gates.decode_top1", "value 0.9708, passed true"],
    ["parity.gates.1.value", "1"],
  ]);
  assert.deepEqual(facts(undefined), []);
});

test("a long account is cut", () => {
  const many = Object.fromEntries(Array.from({ length: 500 }, (_, i) => [`k${i}`, i]));
  assert.equal(facts({ trtllm_lite: many }).length, 99);
});
