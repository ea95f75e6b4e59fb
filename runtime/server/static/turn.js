// A turn is one question and the reply to it, as far as the reply has come.

import { StreamStats } from "./stats.js";

/** state: running, done, stopped (by the reader) or failed (see error). tokens: the entries of
 * `logprobs.content`, if they were asked for. */
export function newTurn(user, now) {
  return {
    user,
    text: "",
    reasoning: "",
    tokens: [],
    stats: new StreamStats(now),
    state: "running",
    finishReason: null,
    error: null,
  };
}

/** Adds one chat.completion.chunk. */
export function addChunk(turn, chunk, now) {
  if (chunk.usage) turn.stats.setUsage(chunk.usage);
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const content = choice.delta?.content ?? "";
  const reasoning = choice.delta?.reasoning_content ?? "";
  const entries = choice.logprobs?.content ?? [];
  turn.text += content;
  turn.reasoning += reasoning;
  for (const entry of entries) turn.tokens.push(entry);
  if (choice.finish_reason) turn.finishReason = choice.finish_reason;
  const count = entries.length || (content || reasoning ? 1 : 0);
  if (count || choice.finish_reason) turn.stats.progress(now, count);
}

/** Where the last whole sentence after `from` ends, or `from`: screen readers are given sentences,
 * not tokens. */
export function sentenceEnd(text, from) {
  let end = from;
  for (const match of text.slice(from).matchAll(/[.!?:;]\s+|\n+/g)) {
    end = from + match.index + match[0].length;
  }
  return end;
}
