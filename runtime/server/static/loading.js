// Waits until the server takes requests, and shows meanwhile how far it is.

import { readHealth } from "./api.js";
import { element } from "./dom.js";

const ASK_EVERY = 500; // milliseconds
const AWAY = "away"; // no status of the server: it gives none
const WORDS = {
  [AWAY]: "The server cannot be reached.",
  draining: "The server is shutting down.",
  dead: "The engine has stopped; the server is about to end.",
};

/** Resolves when the server is ready, or says that it is no server of this kind: its routes then
 * tell what is wrong. @param {Notice} notice @param {string} topic of what is shown */
export async function untilReady(notice, topic) {
  for (let told = ""; ; ) {
    const health = (await readHealth().catch(() => ({ status: AWAY }))) ?? {};
    if (health.status !== "loading" && !(health.status in WORDS)) break;
    const state = JSON.stringify(health);
    if (state !== told) notice.show(topic, ...shown(health));
    told = state;
    await new Promise((done) => setTimeout(done, ASK_EVERY));
  }
  notice.clear(topic);
}

/** The line for a state of the server: text, and a bar while it loads. */
function shown({ status, step = "", percent = 0 }) {
  if (status !== "loading") return [WORDS[status]];
  const bar = element("progress", { max: 100, value: percent, aria: { label: "Loading" } });
  return [`Loading: ${step} `, bar, ` ${percent}%`];
}
