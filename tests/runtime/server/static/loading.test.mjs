import assert from "node:assert/strict";
import { afterEach, mock, test } from "node:test";

import { untilReady } from "../../../../runtime/server/static/loading.js";

const real = { fetch: globalThis.fetch, document: globalThis.document };
afterEach(() => {
  Object.assign(globalThis, real);
  mock.timers.reset();
});

/** Shows nothing, and keeps what it was asked to show. */
class FakeNotice {
  lines = [];

  show(topic, ...content) {
    this.lines.push(content.map((part) => part.value ?? part).join("|"));
  }

  clear(topic) {
    this.lines.push(`cleared ${topic}`);
  }
}

function fakeElement() {
  return { dataset: {}, setAttribute() {}, append() {} };
}

/** Runs `untilReady` against answers of /health; an Error is a server that cannot be reached. */
async function wait(...answers) {
  mock.timers.reset();
  mock.timers.enable({ apis: ["setTimeout"] });
  globalThis.document = { createElement: fakeElement };
  globalThis.fetch = async (path) => {
    assert.equal(path, "health");
    const answer = answers.shift();
    if (answer instanceof Error) throw answer;
    return new Response(JSON.stringify(answer));
  };
  const notice = new FakeNotice();
  let ready = false;
  untilReady(notice, "server").then(() => (ready = true));
  while (!ready) {
    await new Promise((done) => setImmediate(done));
    mock.timers.tick(500);
  }
  assert.equal(answers.length, 0);
  return notice.lines;
}

test("loading is shown until the server is ready", async () => {
  const loading = (step, percent) => ({ status: "loading", step, percent });
  const lines = await wait(loading("pack", 0), loading("pack", 40), { status: "ok" });
  assert.deepEqual(lines, ["Loading: pack |0| 0%", "Loading: pack |40| 40%", "cleared server"]);
});

test("a server that is away, ends or is dead is waited for", async () => {
  const gone = [new TypeError("fetch failed"), { status: "draining" }, { status: "dead" }];
  const lines = await wait(...gone, { status: "ok" });
  assert.match(lines[0], /cannot be reached/);
  assert.match(lines[1], /shutting down/);
  assert.match(lines[2], /engine has stopped/);
  assert.equal(lines.length, 4);
});

test("what is no health of ours is left to the other routes", async () => {
  assert.deepEqual(await wait({}), ["cleared server"]);
  assert.deepEqual(await wait(null), ["cleared server"]);
});
