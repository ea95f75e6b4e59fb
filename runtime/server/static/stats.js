// TTFT, TPOT and tokens per second of one stream. Total time = TTFT + (tokens - 1) x TPOT.

/** Times are milliseconds of one clock, as seen by this page: the network is part of them. */
export class StreamStats {
  #startedAt;
  #firstAt = null;
  #lastAt = null;
  #counted = 0;
  #usage = null;

  constructor(startedAt) {
    this.#startedAt = startedAt;
  }

  /** Tokens have arrived, or the word that there are no more (count 0). */
  progress(now, count) {
    this.#firstAt ??= now;
    this.#lastAt = now;
    this.#counted += count;
  }

  /** The server's own count, which replaces ours. */
  setUsage(usage) {
    this.#usage = usage;
  }

  /** False while tokens are counted from chunks, of which one may hold several. */
  get isExact() {
    return this.#usage !== null;
  }

  get tokens() {
    return this.#usage?.completion_tokens ?? this.#counted;
  }

  get promptTokens() {
    return this.#usage?.prompt_tokens ?? 0;
  }

  get cachedTokens() {
    return this.#usage?.prompt_tokens_details?.cached_tokens ?? 0;
  }

  get ttft() {
    return this.#firstAt === null ? null : this.#firstAt - this.#startedAt;
  }

  /** Null until two moments are known. */
  get tpot() {
    if (this.tokens < 2 || this.#lastAt === this.#firstAt) return null;
    return (this.#lastAt - this.#firstAt) / (this.tokens - 1);
  }

  get tokensPerSecond() {
    return this.tpot === null ? null : 1000 / this.tpot;
  }
}

/** Milliseconds for people: 8.3 ms, 212 ms, 1.42 s. */
export function duration(ms) {
  if (ms >= 999.5) return `${(ms / 1000).toFixed(2)} s`;
  return `${ms.toFixed(ms < 99.95 ? 1 : 0)} ms`;
}

/** The figures known so far, each a short text. @param {StreamStats} stats */
export function figures(stats) {
  const about = stats.isExact ? "" : "≈";
  const parts = [];
  if (stats.ttft !== null) parts.push(`TTFT ${duration(stats.ttft)}`);
  if (stats.tpot !== null) {
    parts.push(`TPOT ${about}${duration(stats.tpot)}`);
    parts.push(`${about}${stats.tokensPerSecond.toFixed(1)} tokens/s`);
  }
  const noun = stats.tokens === 1 ? "token" : "tokens";
  if (stats.tokens) parts.push(`${about}${stats.tokens} ${noun}`);
  if (stats.promptTokens) {
    const cached = stats.cachedTokens ? ` (${stats.cachedTokens} cached)` : "";
    parts.push(`prompt ${stats.promptTokens}${cached}`);
  }
  return parts;
}
