// Server-sent events (WHATWG HTML, section 9.2.6), from text that may be cut anywhere.

/** Feed it decoded text; it returns the events that are complete. One instance a stream. An event
 * that the stream leaves unfinished is never returned. */
export class SSEParser {
  #line = ""; // the line that has no end yet
  #afterCR = false; // a "\n" that comes next belongs to the "\r" before it
  #data = [];
  #event = "";

  /** @returns {{event: string, data: string}[]} */
  push(text) {
    const events = [];
    for (const line of this.#lines(text)) {
      if (line === "") this.#dispatch(events);
      else this.#field(line);
    }
    return events;
  }

  #lines(text) {
    const body = this.#afterCR && text.startsWith("\n") ? text.slice(1) : text;
    if (text) this.#afterCR = text.endsWith("\r");
    const lines = (this.#line + body).split(/\r\n|\n|\r/);
    this.#line = lines.pop();
    return lines;
  }

  /** A line that starts with a colon has an empty name: a comment, which is how servers keep a
   * silent stream open. */
  #field(line) {
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (name === "data") this.#data.push(value);
    else if (name === "event") this.#event = value;
  }

  #dispatch(events) {
    if (this.#data.length) {
      events.push({ event: this.#event || "message", data: this.#data.join("\n") });
    }
    this.#data = [];
    this.#event = "";
  }
}
