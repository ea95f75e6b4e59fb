// What the page tells the reader besides the conversation.

import { element } from "./dom.js";

const KEPT = 20; // paragraphs of the live region

/** The live region: read by screen readers, not seen. */
export class Announcer {
  #root;

  constructor(root) {
    this.#root = root;
  }

  say(text) {
    this.#root.append(element("p", {}, text));
    while (this.#root.childElementCount > KEPT) this.#root.firstElementChild.remove();
  }
}

/** The line under the header. One topic at a time; the newest one stands. */
export class Notice {
  #root;
  #topic = null;

  constructor(root) {
    this.#root = root;
  }

  /** @param {string} topic @param {...(string|Node)} content */
  show(topic, ...content) {
    this.#topic = topic;
    this.#root.replaceChildren(...content);
    this.#root.hidden = false;
  }

  /** Takes the line away if it is about this topic. */
  clear(topic) {
    if (this.#topic === topic) this.#root.hidden = true;
  }
}
