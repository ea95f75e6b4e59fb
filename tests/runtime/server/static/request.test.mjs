import assert from "node:assert/strict";
import { test } from "node:test";

import {
  messagesOf,
  parameters,
  requestBody,
  stopStrings,
} from "../../../../runtime/server/static/request.js";

test("blank fields are left to the server, others are numbers", () => {
  const typed = { temperature: "0", top_p: " 0.9 ", top_k: "", seed: "-7", stop: "" };
  assert.deepEqual(parameters(typed), { temperature: 0, top_p: 0.9, seed: -7 });
  assert.deepEqual(parameters({ stop: "END" }), { stop: ["END"] });
  const choice = { top_k: "3", form: "choice", form_text: "yes\nno" };
  assert.deepEqual(parameters(choice), { top_k: 3, structured_outputs: { choice: ["yes", "no"] } });
});

test("stop strings are lines, with the escapes of source code", () => {
  assert.deepEqual(stopStrings("a b\r\n\n\\n\\t\n\\\\n\n\\d "), ["a b", "\n\t", "\\n", "\\d "]);
  assert.deepEqual(stopStrings(""), []);
});

test("turns that brought no text are not told to the model", () => {
  const turns = [
    { user: "one", text: "1" },
    { user: "failed", text: "" },
    { user: "two", text: "" },
  ];
  assert.deepEqual(messagesOf(turns, " \n"), [
    { role: "user", content: "one" },
    { role: "assistant", content: "1" },
    { role: "user", content: "two" },
  ]);
  assert.deepEqual(messagesOf(turns.slice(2), "Be brief."), [
    { role: "system", content: "Be brief." },
    { role: "user", content: "two" },
  ]);
});

test("a question that is asked again goes without the reply it had", () => {
  const turns = [{ user: "one", text: "half a rep" }];
  assert.deepEqual(messagesOf(turns, ""), [{ role: "user", content: "one" }]);
});

test("the body of a request", () => {
  const turns = [{ user: "hi", text: "" }];
  const what = { model: "m", turns, system: "", typed: { min_p: "0.1" } };
  const plain = {
    model: "m",
    messages: [{ role: "user", content: "hi" }],
    min_p: 0.1,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  assert.deepEqual(requestBody({ ...what, wantTokens: false }), plain);
  const tokens = { logprobs: true, top_logprobs: 5 };
  assert.deepEqual(requestBody({ ...what, wantTokens: true }), { ...plain, ...tokens });
});
