// A reply as its tokens, coloured by probability, and the card that tells a token's rivals.

import { element } from "./dom.js";
import { TokenTexts, alternatives, band, percent, probability, visible } from "./tokens.js";

const GAP = 6; // pixels between token and card, and between card and window

/** The tokens of one reply. One tab stop; arrow keys go from token to token. */
export class TokenView {
  #card;
  #texts = new TokenTexts();
  #entries = [];
  #active = null;

  constructor(card) {
    this.#card = card;
    const aria = { label: "Tokens of the reply. Arrow keys show their probabilities." };
    this.root = element("div", { className: "tokens", tabIndex: 0, role: "group", aria });
    this.root.addEventListener("pointerover", (event) => this.#point(event.target));
    this.root.addEventListener("click", (event) => this.#point(event.target));
    this.root.addEventListener("pointerleave", () => this.#activate(null));
    this.root.addEventListener("blur", () => this.#activate(null));
    this.root.addEventListener("keydown", (event) => this.#press(event));
  }

  /** @param {object[]} entries all so far; those already shown stay */
  show(entries) {
    const fresh = entries.slice(this.root.childElementCount);
    this.#entries = entries;
    this.root.append(...fresh.map((entry) => this.#span(entry)));
  }

  #span(entry) {
    const text = this.#texts.next(entry);
    const level = band(probability(entry.logprob));
    if (text !== "") return element("span", { data: { band: level } }, text);
    const bytes = visible("\uFFFD", entry.bytes ?? []);
    return element("span", { className: "part", data: { band: level } }, bytes);
  }

  #point(target) {
    if (target.parentNode === this.root) this.#activate([...this.root.children].indexOf(target));
  }

  #press(event) {
    const last = this.#entries.length - 1;
    const at = this.#active;
    const goals = {
      ArrowRight: at === null ? 0 : Math.min(at + 1, last),
      ArrowLeft: at === null ? 0 : Math.max(at - 1, 0),
      Home: 0,
      End: last,
    };
    if (last < 0 || !(event.key in goals)) return;
    event.preventDefault();
    this.#activate(goals[event.key]);
    this.root.children[this.#active].scrollIntoView({ block: "nearest" });
    this.#card.announce(this.#entries[this.#active]);
  }

  #activate(index) {
    if (index === this.#active) return;
    this.root.children[this.#active]?.classList.remove("active");
    this.#active = index;
    if (index === null) {
      this.#card.hide();
      return;
    }
    const span = this.root.children[index];
    span.classList.add("active");
    this.#card.show(span, this.#entries[index]);
  }
}

/** The one card of the page, which every TokenView uses. */
export class TokenCard {
  #root;
  #say;
  #span = null;

  /** @param {HTMLElement} root @param {(text: string) => void} say tells a screen reader */
  constructor(root, say) {
    this.#root = root;
    this.#say = say;
  }

  show(span, entry) {
    this.#span = span;
    this.#root.replaceChildren(table(alternatives(entry)));
    this.#root.hidden = false;
    this.follow();
  }

  hide() {
    this.#span = null;
    this.#root.hidden = true;
  }

  announce({ token, bytes, logprob }) {
    this.#say(`${visible(token, bytes)}, ${percent(probability(logprob))}`);
  }

  /** Goes where its token has gone: below it, or above it where there is no room; inside the window
   * always. */
  follow() {
    if (this.#span === null) return;
    const rect = this.#span.getClientRects()[0];
    if (!rect || rect.bottom < 0 || rect.top > innerHeight) {
      this.hide();
      return;
    }
    const { offsetWidth: width, offsetHeight: height, style } = this.#root;
    const below = rect.bottom + GAP;
    const top = below + height + GAP > innerHeight ? rect.top - height - GAP : below;
    const left = Math.min(rect.left, innerWidth - width - GAP);
    style.top = `${Math.max(GAP, top)}px`;
    style.left = `${Math.max(GAP, left)}px`;
  }
}

function table(rows) {
  const body = rows.map(({ text, p, chosen }) => {
    const bar = element("meter", { min: 0, max: 1, value: p, aria: { hidden: "true" } });
    return element(
      "tr",
      { className: chosen ? "chosen" : "" },
      element("th", { scope: "row" }, text),
      element("td", {}, percent(p)),
      element("td", {}, bar),
    );
  });
  const caption = element("caption", { className: "unseen" }, "Token probabilities");
  return element("table", {}, caption, ...body);
}
