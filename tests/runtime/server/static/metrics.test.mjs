import assert from "node:assert/strict";
import { test } from "node:test";

import { serverLoad, sumByName } from "../../../../runtime/server/static/metrics.js";

const TEXT = String.raw`# HELP trtllm_lite_requests_running Requests that are computed.
# TYPE trtllm_lite_requests_running gauge
trtllm_lite_requests_running{model="a"} 2.0
trtllm_lite_requests_running{model="b } \" 9",x="y"} 3 1700000000000
trtllm_lite_requests_running_total 50
trtllm_lite_requests_waiting 0
trtllm_lite_kv_slots_used 4
trtllm_lite_kv_slots_total 1.6e1
trtllm_lite_kv_tokens_used{model="a"} 20
trtllm_lite_kv_tokens_used{model="b"} 2
trtllm_lite_kv_tokens_total 512
odd_value NaN
odd_value{le="+Inf"} +Inf
`;

test("a metric is summed over its labels, whatever they hold", () => {
  const sums = sumByName(TEXT, ["trtllm_lite_requests_running", "odd_value", "missing"]);
  assert.deepEqual([...sums], [["trtllm_lite_requests_running", 5]]);
});

test("the load of the server", () => {
  const slots = { slotsUsed: 4, slotsTotal: 16 };
  const load = { running: 5, waiting: 0, ...slots, tokensUsed: 22, tokensTotal: 512 };
  assert.deepEqual(serverLoad(TEXT), load);
  assert.deepEqual(serverLoad(TEXT.replaceAll("\n", "\r\n")), load);
});

test("what the server does not tell is null, not zero", () => {
  const names = ["running", "waiting", "slotsUsed", "slotsTotal", "tokensUsed", "tokensTotal"];
  const nothing = Object.fromEntries(names.map((name) => [name, null]));
  assert.deepEqual(serverLoad(""), nothing);
  assert.deepEqual(serverLoad("<html>not metrics</html>"), nothing);
});
