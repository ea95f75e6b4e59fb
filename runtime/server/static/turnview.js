// One turn on the page: the question, the reply, its figures and what can be done with it.

import { button, copyText, element } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { figures } from "./stats.js";
import { TokenView } from "./tokenview.js";

const ENDINGS = { stop: "", length: "cut: length limit reached" };

export class TurnView {
  #plain = element("div", { className: "text" });
  #markdown = new MarkdownView(this.#plain);
  #tokens;
  #reasoning = element("details", { className: "reasoning" });
  #reasoningText = element("div", { className: "text plain" });
  #error = element("p", { className: "error" });
  #copy;
  #figures = element("p", { className: "figures" });

  /** @param {{card: TokenCard, say: (text: string) => void, regenerate: () => void}} page */
  constructor(turn, page) {
    this.turn = turn;
    this.#tokens = new TokenView(page.card);
    this.#reasoning.append(element("summary", {}, "Reasoning"), this.#reasoningText);
    this.root = element("article", { className: "turn" }, this.#question(), this.#reply(page));
  }

  /** Shows the turn as it is now; `wantTokens`: as tokens, where their probabilities are known. */
  update(wantTokens) {
    const { turn } = this;
    const asTokens = wantTokens && turn.tokens.length > 0;
    this.root.dataset.state = turn.state;
    this.#plain.hidden = asTokens || turn.text === "";
    this.#copy.hidden = turn.text === "";
    this.#tokens.root.hidden = !asTokens;
    if (asTokens) this.#tokens.show(turn.tokens);
    else this.#markdown.show(turn.text);
    this.#reasoning.hidden = turn.reasoning === "";
    this.#reasoningText.textContent = turn.reasoning;
    const words = [...figures(turn.stats), this.#ending()].filter(Boolean);
    this.#figures.textContent = words.join(" · ");
    this.#showError();
  }

  #question() {
    const text = element("div", { className: "text plain" }, this.turn.user);
    return element("section", { className: "user" }, element("h2", {}, "You"), text);
  }

  #reply(page) {
    this.#copy = button("Copy", async () => {
      const copied = await copyText(this.turn.text);
      this.#copy.textContent = copied ? "Copied" : "Not allowed";
      setTimeout(() => (this.#copy.textContent = "Copy"), 1500);
      page.say(copied ? "Copied." : "The browser does not let the page copy.");
    });
    const again = button("Regenerate", page.regenerate, "regenerate");
    const parts = [this.#reasoning, this.#plain, this.#tokens.root, this.#error];
    const foot = element("footer", {}, this.#figures, this.#copy, again);
    return element("section", { className: "model" }, element("h2", {}, "Model"), ...parts, foot);
  }

  #ending() {
    const { state, finishReason } = this.turn;
    if (state === "running" && this.turn.stats.ttft === null) return "waiting for the first token";
    if (state === "stopped") return "stopped by you";
    return finishReason === null ? "" : (ENDINGS[finishReason] ?? finishReason);
  }

  #showError() {
    const { error, text } = this.turn;
    this.#error.hidden = error === null;
    if (error === null) return;
    const out = text === "" ? " · this question is left out of what you ask next" : "";
    this.#error.textContent = `${error.detail ?? error.message}${out}`;
  }
}
