// The form that a reply is asked to keep to, as fields of a request.

const MAKERS = {
  text: () => ({}),
  json_object: () => ({ response_format: { type: "json_object" } }),
  json_schema: (text) => ({
    response_format: { type: "json_schema", json_schema: { name: "reply", schema: JSON.parse(text) } },
  }),
  regex: (text) => ({ structured_outputs: { regex: text } }),
  choice: (text) => ({ structured_outputs: { choice: linesOf(text) } }),
};

/** What belongs into the field beside the form, as a hint; null where nothing does. */
export const HINTS = {
  text: null,
  json_object: null,
  json_schema: '{"type": "object", "properties": {"name": {"type": "string"}}}',
  regex: "(yes|no), because [a-z ]{1,60}\\.",
  choice: "one answer a line",
};

/** Request fields. Raises SyntaxError where a schema is not JSON.
 * @param {string} kind a key of HINTS @param {string} text what was typed beside it */
export function formFields(kind, text) {
  return MAKERS[kind](text);
}

/** What is wrong with the text, in words; empty where nothing is. */
export function formProblem(kind, text) {
  if (HINTS[kind] === null) return "";
  if (text.trim() === "") return "Fill this in, or choose plain text.";
  if (kind !== "json_schema") return "";
  try {
    const schema = JSON.parse(text);
    return schema?.constructor === Object ? "" : "A JSON schema is an object here.";
  } catch (error) {
    return `This is not JSON: ${error.message}`;
  }
}

function linesOf(text) {
  return text.split(/\r?\n/).filter((line) => line !== "");
}
