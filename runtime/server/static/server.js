// The header: which models the server has, how busy it is, and the key that opens it.

import { listModels, readMetrics } from "./api.js";
import { at, element } from "./dom.js";
import { untilReady } from "./loading.js";
import { serverLoad } from "./metrics.js";
import { facts, parity } from "./model.js";

const KEY = "trtllm-lite.api-key"; // in sessionStorage: gone with the tab
const LOAD_EVERY = 2000; // milliseconds
const RETRY_AFTER = 2; // seconds, where the server names none
const BADGES = new Map([[true, "Parity passed"], [false, "Parity failed"], [null, "Bundle"]]);
const AWAY = new Set(["loading", "draining", "engine_dead"]); // codes of what passes by itself

export class Server {
  #notice;
  #models = [];
  #modelsTimer;
  #loadTimer;
  #isAway = false;

  constructor(notice) {
    this.#notice = notice;
    at("key").value = storage()?.getItem(KEY) ?? "";
    at("key").addEventListener("change", () => this.#useKey());
    at("model").addEventListener("change", () => this.#showBundle());
    document.addEventListener("visibilitychange", () => this.#pollLoad());
    this.#start();
  }

  get key() {
    return at("key").value.trim();
  }

  /** The chosen model; null, which means the one that is served, before the list has come. */
  get model() {
    return at("model").value || null;
  }

  /** Whether the server takes no requests now, and the page waits for it. */
  get isAway() {
    return this.#isAway;
  }

  /** Asks how busy the server is, now rather than at the next turn. */
  look() {
    this.#pollLoad();
  }

  #useKey() {
    storage()?.setItem(KEY, this.key);
    this.#start();
  }

  #start() {
    this.#loadModels();
    this.#pollLoad();
  }

  async #loadModels() {
    clearTimeout(this.#modelsTimer);
    try {
      this.#models = await listModels(this.key);
    } catch (error) {
      this.#explain(error);
      return;
    }
    this.#notice.clear("server");
    at("key").removeAttribute("aria-invalid");
    this.#showModels();
  }

  /** Asks again until there is an answer, except where only a key can help. */
  #explain(error) {
    if (error.status === 401 || error.status === 403) {
      at("settings").open = true;
      at("key").setAttribute("aria-invalid", "true");
      this.#notice.show("server", `${error.detail} · enter it under API key`);
      return;
    }
    if (error.status === 0 || AWAY.has(error.code)) {
      this.#waitForIt();
      return;
    }
    this.#notice.show("server", error.detail ?? error.message);
    const wait = 1000 * (error.retryAfter ?? RETRY_AFTER);
    this.#modelsTimer = setTimeout(() => this.#loadModels(), wait);
  }

  async #waitForIt() {
    if (this.#isAway) return;
    this.#setAway(true);
    await untilReady(this.#notice, "server");
    this.#setAway(false);
    this.#start();
  }

  #setAway(isAway) {
    this.#isAway = isAway;
    at("send").disabled = isAway;
  }

  #showModels() {
    const chosen = this.model;
    const options = this.#models.map(({ id }) => element("option", { value: id }, id));
    at("model").replaceChildren(...options);
    if (this.#models.some(({ id }) => id === chosen)) at("model").value = chosen;
    this.#showBundle();
  }

  #showBundle() {
    const model = this.#models.find(({ id }) => id === this.model);
    const passed = parity(model);
    const rows = facts(model);
    at("bundle").hidden = rows.length === 0;
    at("badge").textContent = BADGES.get(passed);
    at("badge").dataset.passed = String(passed);
    const nodes = rows.map(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]);
    at("facts").replaceChildren(...nodes.flat());
  }

  /** Goes on until the server refuses: with this key there is nothing to see then. A server that has
   * gone away is waited for. */
  async #pollLoad() {
    clearTimeout(this.#loadTimer);
    if (document.hidden || this.#isAway) return;
    let refused = false;
    try {
      showLoad(serverLoad(await readMetrics(this.key)));
    } catch (error) {
      at("load").hidden = true;
      refused = error.status >= 400 && error.status < 500;
      if (error.status === 0 || AWAY.has(error.code)) this.#waitForIt();
    }
    clearTimeout(this.#loadTimer);
    if (!refused) this.#loadTimer = setTimeout(() => this.#pollLoad(), LOAD_EVERY);
  }
}

/** A figure that the server does not give is hidden, not shown as zero. */
function showLoad({ running, waiting, slotsUsed, slotsTotal, tokensUsed, tokensTotal }) {
  showFigure(at("running"), running);
  showFigure(at("waiting"), waiting);
  const slots = portion(slotsUsed, slotsTotal);
  showFigure(at("slots"), slots);
  if (slots !== null) {
    at("slots-meter").max = slotsTotal;
    at("slots-meter").value = slotsUsed;
  }
  const tokens = portion(tokensUsed, tokensTotal);
  showFigure(at("kv-tokens"), tokens);
  at("load").hidden = [running, waiting, slots, tokens].every((figure) => figure === null);
}

function showFigure(cell, figure) {
  cell.parentElement.hidden = figure === null;
  cell.textContent = figure;
}

function portion(used, total) {
  return used === null || total === null ? null : `${used} / ${total}`;
}

/** Null in a browser that is told to keep nothing: there the key lasts as long as the page. */
function storage() {
  try {
    return sessionStorage;
  } catch {
    return null;
  }
}
