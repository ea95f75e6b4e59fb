// The conversation: asking, stopping, asking again, clearing. One reply at a time.

import { openChat } from "./api.js";
import { at, button } from "./dom.js";
import { requestBody } from "./request.js";
import { TokenCard } from "./tokenview.js";
import { addChunk, newTurn, sentenceEnd } from "./turn.js";
import { TurnView } from "./turnview.js";

const NEAR_END = 80; // pixels from its end within which the log follows the text

export class Chat {
  #server;
  #notice;
  #announcer;
  #page; // what a TurnView needs of it
  #views = [];
  #controller = null;
  #frame = 0;
  #spoken = 0; // how much of the running reply screen readers have been given

  constructor(server, notice, announcer) {
    this.#server = server;
    this.#notice = notice;
    this.#announcer = announcer;
    const say = (text) => announcer.say(text);
    const card = new TokenCard(at("card"), say);
    this.#page = { card, say, regenerate: () => this.#regenerate() };
    this.#listen();
  }

  #listen() {
    at("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    at("parameters").addEventListener("submit", (event) => event.preventDefault());
    at("prompt").addEventListener("keydown", (event) => this.#press(event));
    document.addEventListener("keydown", ({ key }) => key === "Escape" && this.#stop());
    at("log").addEventListener("scroll", () => this.#page.card.follow());
    at("stop").addEventListener("click", () => this.#stop());
    at("clear").addEventListener("click", () => this.#clear());
    at("want-tokens").addEventListener("change", () => this.#switchTokens());
  }

  /** Enter that ends the composing of a character (Chinese, Japanese, Korean) sends nothing. */
  #press(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.#send();
  }

  #stop() {
    this.#page.card.hide();
    this.#controller?.abort();
  }

  get #wantTokens() {
    return at("want-tokens").checked;
  }

  #send() {
    const text = at("prompt").value;
    if (this.#controller || this.#server.isAway || text.trim() === "") return;
    if (!parametersAreValid()) return;
    at("prompt").value = "";
    this.#ask(text);
  }

  #regenerate() {
    if (this.#controller || !parametersAreValid()) return;
    const view = this.#views.pop();
    view.root.remove();
    at("prompt").focus();
    this.#ask(view.turn.user);
  }

  #ask(text) {
    const view = new TurnView(newTurn(text, performance.now()), this.#page);
    this.#views.push(view);
    at("log").append(view.root);
    at("empty").hidden = true;
    for (const topic of ["cleared", "tokens"]) this.#notice.clear(topic);
    this.#run(view);
  }

  async #run(view) {
    const { turn } = view;
    const controller = new AbortController();
    this.#setRunning(controller);
    this.#show(view);
    at("log").scrollTop = at("log").scrollHeight;
    try {
      const chunks = await openChat(this.#body(), this.#server.key, controller.signal);
      for await (const chunk of chunks) {
        addChunk(turn, chunk, performance.now());
        this.#frame ||= requestAnimationFrame(() => this.#show(view));
      }
      turn.state = "done";
    } catch (error) {
      turn.state = controller.signal.aborted ? "stopped" : "failed";
      if (turn.state === "failed") turn.error = error;
    }
    this.#setRunning(null);
    this.#show(view);
    this.#tellEnd(turn);
  }

  #body() {
    return requestBody({
      model: this.#server.model,
      turns: this.#views.map(({ turn }) => turn),
      system: at("system").value,
      typed: Object.fromEntries(new FormData(at("parameters"))),
      wantTokens: this.#wantTokens,
    });
  }

  #setRunning(controller) {
    const stopHadFocus = document.activeElement === at("stop");
    if (controller) this.#spoken = 0;
    this.#controller = controller;
    at("send").hidden = controller !== null;
    at("stop").hidden = controller === null;
    at("log").setAttribute("aria-busy", String(controller !== null));
    this.#server.look();
    if (stopHadFocus) at("prompt").focus();
  }

  /** Once a frame while a reply streams. A reader who has scrolled up is left there. */
  #show(view) {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    const log = at("log");
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END;
    view.update(this.#wantTokens);
    if (follows) log.scrollTop = log.scrollHeight;
    this.#speak(view.turn, sentenceEnd(view.turn.text, this.#spoken));
  }

  #speak({ text }, end) {
    const words = text.slice(this.#spoken, end).replace(/[`*#]+/g, "").trim();
    if (words) this.#announcer.say(words);
    this.#spoken = end;
  }

  #tellEnd(turn) {
    this.#speak(turn, turn.text.length);
    if (turn.error) this.#announcer.say(`Error: ${turn.error.message}`);
    else this.#announcer.say(turn.state === "stopped" ? "Stopped." : "End of the reply.");
  }

  #switchTokens() {
    const on = this.#wantTokens;
    for (const view of this.#views) view.update(on);
    at("legend").hidden = !on;
    const missing = this.#views.some(({ turn }) => turn.text !== "" && turn.tokens.length === 0);
    if (on && missing) this.#notice.show("tokens", "Replies from now on show their tokens.");
    else this.#notice.clear("tokens");
  }

  #clear() {
    this.#stop();
    const views = this.#views;
    if (views.length === 0) return;
    this.#views = [];
    for (const view of views) view.root.remove();
    at("empty").hidden = false;
    at("prompt").focus();
    const undo = button("Undo", () => this.#restore(views));
    this.#notice.show("cleared", "Conversation cleared. ", undo);
  }

  #restore(views) {
    this.#views = views;
    at("log").append(...views.map((view) => view.root));
    at("empty").hidden = true;
    this.#notice.clear("cleared");
    at("prompt").focus();
  }
}

/** The browser says what is wrong at the field itself, which must not be folded away for that. */
function parametersAreValid() {
  if (at("parameters").checkValidity()) return true;
  at("settings").open = true;
  return at("parameters").reportValidity();
}
