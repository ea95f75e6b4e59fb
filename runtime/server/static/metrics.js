// The Prometheus text format, as far as the page needs it: gauges by name.

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\})?[ \t]+(\S+)/;

/** The wanted metrics of an exposition, each summed over its label sets (one a model).
 * @param {string} text
 * @param {Iterable<string>} names
 * @returns {Map<string, number>} without the names that the text does not hold as finite numbers */
export function sumByName(text, names) {
  const wanted = new Set(names);
  const sums = new Map();
  for (const line of text.split("\n")) {
    const match = SAMPLE.exec(line.trim());
    if (!match || !wanted.has(match[1])) continue;
    const value = Number(match[2]);
    if (Number.isFinite(value)) sums.set(match[1], (sums.get(match[1]) ?? 0) + value);
  }
  return sums;
}

const NAMES = {
  running: "trtllm_lite_requests_running",
  waiting: "trtllm_lite_requests_waiting",
  slotsUsed: "trtllm_lite_kv_slots_used",
  slotsTotal: "trtllm_lite_kv_slots_total",
  tokensUsed: "trtllm_lite_kv_tokens_used",
  tokensTotal: "trtllm_lite_kv_tokens_total",
};

/** What the server is busy with, by the keys above. A figure that it does not give is null. */
export function serverLoad(text) {
  const sums = sumByName(text, Object.values(NAMES));
  const pairs = Object.entries(NAMES).map(([key, name]) => [key, sums.get(name) ?? null]);
  return Object.fromEntries(pairs);
}
