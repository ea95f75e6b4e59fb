import assert from "node:assert/strict";
import { afterEach, test } from "node:test";

import {
  ApiError,
  listModels,
  openChat,
  readMetrics,
} from "../../../../runtime/server/static/api.js";

const realFetch = globalThis.fetch;
afterEach(() => {
  globalThis.fetch = realFetch;
});

/** Answers every request with this; returns the requests. */
function answer(makeResponse) {
  const requests = [];
  globalThis.fetch = async (path, init) => {
    requests.push({ path, ...init });
    return makeResponse(init);
  };
  return requests;
}

const EVENTS = { "Content-Type": "text/event-stream; charset=utf-8", "x-request-id": "req-1" };

function stream(text, size = 3) {
  const bytes = new TextEncoder().encode(text);
  const starts = Array.from({ length: Math.ceil(bytes.length / size) }, (_, i) => i * size);
  const pieces = starts.map((start) => bytes.slice(start, start + size));
  return new Response(ReadableStream.from(pieces), { headers: EVENTS });
}

async function collect(body = {}, signal = new AbortController().signal) {
  const chunks = [];
  for await (const chunk of await openChat(body, "", signal)) chunks.push(chunk);
  return chunks;
}

test("chunks arrive whole, whatever the pieces that they come in", async () => {
  const text = 'data: {"a":"é日"}\n\n: keep-alive\n\ndata: {"b":1}\n\ndata: [DONE]\n\n';
  for (const size of [1, 2, 3, 7, 1000]) {
    answer(() => stream(text, size));
    assert.deepEqual(await collect(), [{ a: "é日" }, { b: 1 }]);
  }
});

test("the request carries the body, and a key only if there is one", async () => {
  const requests = answer(() => stream("data: [DONE]\n\n"));
  const signal = new AbortController().signal;
  await (await openChat({ x: 1 }, "secret", signal)).next();
  await (await openChat({ x: 1 }, "", signal)).next();
  const [withKey, without] = requests;
  assert.equal(withKey.path, "v1/chat/completions");
  assert.equal(withKey.method, "POST");
  assert.equal(withKey.body, '{"x":1}');
  assert.equal(withKey.headers["Content-Type"], "application/json");
  assert.equal(withKey.headers.Authorization, "Bearer secret");
  assert.equal(withKey.signal, signal);
  assert.ok(!("Authorization" in without.headers));
});

test("a refusal is told in the server's words, with its id and when to try again", async () => {
  const headers = { "x-request-id": "req-2", "Retry-After": "4" };
  const body = JSON.stringify({ error: { message: "The queue is full.", code: "queue_full" } });
  answer(() => new Response(body, { status: 503, headers }));
  const detail = "The queue is full. · try again in 4 s · request id req-2";
  await assert.rejects(collect(), (error) => {
    assert.ok(error instanceof ApiError);
    assert.equal(error.status, 503);
    assert.equal(error.retryAfter, 4);
    assert.equal(error.detail, detail);
    return true;
  });
});

test("a refusal that is not of our server is told by its status", async () => {
  answer(() => new Response("<html>", { status: 502, statusText: "Bad Gateway" }));
  await assert.rejects(listModels(""), { message: "The server answered 502 Bad Gateway" });
});

test("an error in the stream ends it, after the chunks before it", async () => {
  const text = 'data: {"a":1}\n\ndata: {"error":{"message":"A step failed."}}\n\ndata: [DONE]\n\n';
  answer(() => stream(text));
  const chunks = await openChat({}, "", new AbortController().signal);
  assert.deepEqual((await chunks.next()).value, { a: 1 });
  await assert.rejects(chunks.next(), { message: "A step failed.", requestId: "req-1" });
});

test("a stream that is cut, or is none, is an error", async () => {
  answer(() => stream('data: {"a":1}\n\n'));
  await assert.rejects(collect(), { message: "The stream ended early." });
  answer(() => stream("data: {oops\n\n"));
  await assert.rejects(collect(), { message: "The server sent a chunk that is not JSON." });
  answer(() => new Response("{}", { headers: { "Content-Type": "application/json" } }));
  await assert.rejects(collect(), { message: "The answer is not a stream of events." });
});

test("a connection that breaks is an error of ours, before and in the stream", async () => {
  answer(() => {
    throw new TypeError("fetch failed");
  });
  await assert.rejects(collect(), { message: "The server cannot be reached.", status: 0 });
  const broken = new ReadableStream({ pull: (controller) => controller.error(new TypeError("x")) });
  answer(() => new Response(broken, { headers: EVENTS }));
  await assert.rejects(collect(), { message: "The connection broke." });
});

test("what the reader aborts raises as an abort", async () => {
  const controller = new AbortController();
  answer((init) => {
    init.signal.throwIfAborted();
  });
  controller.abort();
  await assert.rejects(collect({}, controller.signal), { name: "AbortError" });
});

test("whoever stops reading closes the connection", async () => {
  let cancelled = false;
  const source = {
    start: (controller) => controller.enqueue(new TextEncoder().encode('data: {"a":1}\n\n')),
    cancel: () => {
      cancelled = true;
    },
  };
  answer(() => new Response(new ReadableStream(source), { headers: EVENTS }));
  const chunks = await openChat({}, "", new AbortController().signal);
  await chunks.next();
  await chunks.return();
  assert.ok(cancelled);
});

test("models and metrics", async () => {
  const requests = answer(() => new Response('{"data":[{"id":"m"}]}'));
  assert.deepEqual(await listModels("k"), [{ id: "m" }]);
  assert.equal(await readMetrics("k"), '{"data":[{"id":"m"}]}');
  assert.deepEqual(requests.map(({ path }) => path), ["v1/models", "metrics"]);
  assert.ok(requests.every(({ headers }) => headers.Authorization === "Bearer k"));
});
