// Entries of `logprobs.content` ({token, logprob, bytes, top_logprobs}) as text and probabilities.

/** Token after token, the text that each one completes: a character whose bytes are spread over
 * several tokens belongs to the last of them. */
export class TokenTexts {
  #decoder = new TextDecoder("utf-8", { ignoreBOM: true });

  next({ token, bytes }) {
    if (!bytes) return token;
    return this.#decoder.decode(Uint8Array.from(bytes), { stream: true });
  }
}

export function probability(logprob) {
  return logprob === null || logprob === undefined ? 0 : Math.min(1, Math.exp(logprob));
}

const BANDS = [0.15, 0.4, 0.7, 0.9];

/** 0 (a surprise) to 4 (all but certain): what the token is coloured by. */
export function band(p) {
  return BANDS.filter((least) => p >= least).length;
}

export function percent(p) {
  if (p > 0 && p < 0.0005) return "<0.1%";
  return `${(100 * p).toFixed(1)}%`;
}

/** The chosen token and its rivals, likeliest first. Parts of characters look alike: the logprob
 * tells which one was chosen. */
export function alternatives(entry) {
  const same = ({ token, logprob }) => token === entry.token && logprob === entry.logprob;
  const top = entry.top_logprobs ?? [];
  const all = top.some(same) ? top : [...top, entry];
  const rows = all.map((one) => ({
    text: visible(one.token, one.bytes),
    p: probability(one.logprob),
    chosen: same(one),
  }));
  return rows.sort((a, b) => b.p - a.p);
}

const NAMES = { " ": "␣", "\n": "\\n", "\r": "\\r", "\t": "\\t" };

/** A token with its blanks to be seen; bytes that are no whole character as hexadecimal. */
export function visible(token, bytes) {
  if (token.includes("\uFFFD") && bytes) return bytes.map(hex).join(" ");
  return token.replace(/[ \n\r\t]/g, (c) => NAMES[c]).replace(/[\x00-\x1f\x7f]/g, hexEscape);
}

function hex(byte) {
  return byte.toString(16).padStart(2, "0");
}

function hexEscape(character) {
  return `\\x${hex(character.charCodeAt(0))}`;
}
