// The server's routes that the page uses. Addresses are relative: a prefix put in front by a proxy
// is kept.

import { SSEParser } from "./sse.js";

/** What went wrong, in the server's words. status 0: there was no answer. code: the server's name
 * for it. retryAfter: seconds. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = null, requestId = null, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.requestId = requestId;
    this.retryAfter = retryAfter;
  }

  /** The message with what else helps: when to try again, and the id to look for in the log. */
  get detail() {
    const wait = this.retryAfter === null ? "" : `try again in ${this.retryAfter} s`;
    const id = this.requestId === null ? "" : `request id ${this.requestId}`;
    return [this.message, wait, id].filter(Boolean).join(" · ");
  }
}

/** Sends a chat request. Resolves once the server has accepted it, to its chunks as they arrive.
 * Raises ApiError, there or while they arrive; what `signal` aborts raises as fetch does.
 * @returns {Promise<AsyncGenerator<object>>} */
export async function openChat(body, key, signal) {
  const headers = { ...authorization(key), "Content-Type": "application/json" };
  const init = { method: "POST", headers, body: JSON.stringify(body), signal };
  const response = await request("v1/chat/completions", init);
  if (!(response.headers.get("Content-Type") ?? "").startsWith("text/event-stream")) {
    throw new ApiError("The answer is not a stream of events.", describe(response));
  }
  return readChunks(response);
}

/** @returns {Promise<object[]>} model objects */
export async function listModels(key) {
  const response = await request("v1/models", { headers: authorization(key) });
  return (await response.json()).data;
}

/** @returns {Promise<string>} Prometheus text */
export async function readMetrics(key) {
  return (await request("metrics", { headers: authorization(key) })).text();
}

/** How the server is: its `status`, and while that is "loading" the `step` and `percent` of it. Needs
 * no key. @returns {Promise<object>} */
export async function readHealth() {
  return (await fetch("health", { cache: "no-store" })).json();
}

function authorization(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function request(path, init) {
  const response = await fetch(path, { cache: "no-store", ...init }).catch((error) => {
    if (init.signal?.aborted) throw error;
    throw new ApiError("The server cannot be reached.");
  });
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  const payload = await response.json().catch(() => null);
  const fallback = `The server answered ${response.status} ${response.statusText}`.trim();
  const code = payload?.error?.code ?? null;
  return new ApiError(payload?.error?.message ?? fallback, { ...describe(response), code });
}

function describe(response) {
  const seconds = Number.parseFloat(response.headers.get("Retry-After") ?? "");
  return {
    status: response.status,
    requestId: response.headers.get("x-request-id"),
    retryAfter: Number.isFinite(seconds) ? seconds : null,
  };
}

async function* readChunks(response) {
  const reader = response.body.getReader();
  const utf8 = new TextDecoder();
  const parser = new SSEParser();
  try {
    for (let part = await read(reader, response); !part.done; part = await read(reader, response)) {
      for (const { data } of parser.push(utf8.decode(part.value, { stream: true }))) {
        if (data === "[DONE]") return;
        yield chunkOf(data, response);
      }
    }
  } finally {
    reader.cancel().catch(() => undefined);
  }
  throw new ApiError("The stream ended early.", describe(response));
}

async function read(reader, response) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection broke.", describe(response));
  }
}

function chunkOf(data, response) {
  let chunk;
  try {
    chunk = JSON.parse(data);
  } catch {
    throw new ApiError("The server sent a chunk that is not JSON.", describe(response));
  }
  if (chunk.error) throw new ApiError(chunk.error.message, describe(response));
  return chunk;
}
