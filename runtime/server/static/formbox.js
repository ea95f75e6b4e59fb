// The two fields that ask for a form of the reply.

import { at } from "./dom.js";
import { HINTS, formProblem } from "./form.js";

export class FormBox {
  constructor() {
    at("form").addEventListener("change", () => this.#show());
    at("form-text").addEventListener("input", () => this.#check());
    this.#show();
  }

  #show() {
    const hint = HINTS[at("form").value];
    at("form-box").hidden = hint === null;
    at("form-text").placeholder = hint ?? "";
    this.#check();
  }

  /** The browser refuses to send what is not valid, and says why at the field. */
  #check() {
    at("form-text").setCustomValidity(formProblem(at("form").value, at("form-text").value));
  }
}
