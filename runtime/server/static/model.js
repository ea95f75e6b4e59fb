// What GET /v1/models tells about the bundle behind a model.

const MOST = 99; // facts shown

/** @returns {?boolean} whether the bundle's parity certificate passed; null if it is not told */
export function parity(model) {
  const passed = model?.trtllm_lite?.parity?.passed;
  return typeof passed === "boolean" ? passed : null;
}

/** What the server tells about the bundle: pairs of a dotted name and a plain value. */
export function facts(model) {
  const found = [];
  collect("", model?.trtllm_lite, found);
  return found;
}

function collect(name, value, found) {
  if (value === null || value === undefined || found.length >= MOST) return;
  if (typeof value !== "object") {
    found.push([name, shown(value)]);
    return;
  }
  for (const [key, inner] of Object.entries(value)) {
    // A list's items go by their own name, if they have one, and take one line each.
    const isNamed = Array.isArray(value) && typeof inner?.name === "string";
    const { name: own, ...rest } = isNamed ? inner : { name: key };
    collect(name === "" ? own : `${name}.${own}`, isNamed ? line(rest) : inner, found);
  }
}

function line(item) {
  const plain = ([, value]) => typeof value !== "object" && value !== "";
  const told = Object.entries(item).filter(plain);
  return told.map(([key, value]) => `${key} ${shown(value)}`).join(", ");
}

function shown(value) {
  return typeof value === "number" && !Number.isInteger(value) ? value.toPrecision(4) : `${value}`;
}
