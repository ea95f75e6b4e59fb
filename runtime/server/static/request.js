// What the page asks of POST /v1/chat/completions.

import { formFields } from "./form.js";

/** Request fields from what was typed into the controls of the same names: numbers, `stop`, and the
 * form of the reply. A blank is left out: the server's default holds.
 * @param {Record<string, string>} typed */
export function parameters({ stop = "", form = "text", form_text = "", ...numbers }) {
  const filled = Object.entries(numbers).filter(([, text]) => text.trim() !== "");
  const fields = Object.fromEntries(filled.map(([name, text]) => [name, Number(text)]));
  const stops = stopStrings(stop);
  const shaped = { ...fields, ...formFields(form, form_text) };
  return stops.length ? { ...shaped, stop: stops } : shaped;
}

const ESCAPES = { n: "\n", r: "\r", t: "\t", "\\": "\\" };

/** One stop string a line, with \n, \r, \t and \\ as in source code. */
export function stopStrings(text) {
  const lines = text.split(/\r?\n/).filter((line) => line !== "");
  return lines.map((line) => line.replace(/\\([nrt\\])/g, (_, letter) => ESCAPES[letter]));
}

/** The conversation as messages. Turns that brought no text, as after an error, are left out, so
 * that user and assistant alternate, which many chat templates insist on.
 * @param {{user: string, text: string}[]} turns the last one is the question to answer */
export function messagesOf(turns, system) {
  const asked = turns.at(-1);
  const messages = system.trim() === "" ? [] : [{ role: "system", content: system }];
  for (const turn of turns) {
    if (turn !== asked && turn.text === "") continue;
    messages.push({ role: "user", content: turn.user });
    if (turn !== asked) messages.push({ role: "assistant", content: turn.text });
  }
  return messages;
}

/** wantTokens: with the probabilities of the tokens and of five rivals each. */
export function requestBody({ model, turns, system, typed, wantTokens }) {
  return {
    model,
    messages: messagesOf(turns, system),
    ...parameters(typed),
    ...(wantTokens ? { logprobs: true, top_logprobs: 5 } : {}),
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
}
