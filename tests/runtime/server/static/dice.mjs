// Random numbers that are the same on every run, so that a failure can be repeated.

/** Whole numbers from 0 to n - 1 (Lehmer's generator, "minimal standard" of Park and Miller). */
export function dice(seed) {
  let state = seed;
  return (n) => {
    state = (state * 48271) % 2147483647;
    return state % n;
  };
}

/** The text in pieces of 0 to `longest` characters. */
export function cut(text, roll, longest) {
  const pieces = [];
  for (let at = 0; at < text.length; ) {
    const size = roll(longest + 1);
    pieces.push(text.slice(at, at + size));
    at += size;
  }
  return pieces;
}
