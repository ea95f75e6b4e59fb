import assert from "node:assert/strict";
import { test } from "node:test";

import { SSEParser } from "../../../../runtime/server/static/sse.js";
import { cut, dice } from "./dice.mjs";

function parse(pieces) {
  const parser = new SSEParser();
  return pieces.flatMap((piece) => parser.push(piece));
}

/** The rules of the specification, written down a second time over a whole text. */
function slowly(text) {
  const lines = text.replaceAll("\r\n", "\n").replaceAll("\r", "\n").split("\n").slice(0, -1);
  const events = [];
  let [data, event] = [[], "message"];
  for (const line of lines) {
    const [, name, value] = /^([^:]*)(?:: ?)?([^]*)$/.exec(line);
    if (name === "data") data.push(value);
    if (name === "event" && value) event = value;
    if (line !== "") continue;
    if (data.length) events.push({ event, data: data.join("\n") });
    [data, event] = [[], "message"];
  }
  return events;
}

const PARTS = ["data: {}", "data:x", "data", "data:  y:z", ": keep-alive", "event: e", "id: 7", ""];
const ENDS = ["\n", "\r\n", "\r"];

function randomStream(roll) {
  const lines = Array.from({ length: roll(12) }, () => PARTS[roll(PARTS.length)]);
  const text = lines.map((line) => line + ENDS[roll(3)]).join("");
  return roll(2) ? `${text}\n\n` : `${text}data: unfinished`;
}

test("any stream, cut anywhere, gives the events of the specification", () => {
  const roll = dice(1);
  for (let round = 0; round < 2000; round += 1) {
    const text = randomStream(roll);
    const pieces = cut(text, roll, 1 + roll(6));
    assert.deepEqual(parse(pieces), slowly(text), JSON.stringify(pieces));
  }
});

test("a chat stream", () => {
  const text = ': keep-alive\n\ndata: {"a":1}\n\ndata: one\ndata: two\n\ndata: [DONE]\n\n';
  const datas = parse([text]).map(({ data }) => data);
  assert.deepEqual(datas, ['{"a":1}', "one\ntwo", "[DONE]"]);
});

test("what is not finished is not an event", () => {
  assert.deepEqual(parse(["data: x\n"]), []);
  assert.deepEqual(parse(["data: x"]), []);
});
