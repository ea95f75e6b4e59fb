import assert from "node:assert/strict";
import { test } from "node:test";

import { HINTS, formFields, formProblem } from "../../../../runtime/server/static/form.js";

test("every form becomes the fields that the server has for it", () => {
  assert.deepEqual(formFields("text", "what is left here"), {});
  assert.deepEqual(formFields("json_object", ""), { response_format: { type: "json_object" } });
  assert.deepEqual(formFields("json_schema", '{"type": "array"}'), {
    response_format: { type: "json_schema", json_schema: { name: "reply", schema: { type: "array" } } },
  });
  assert.deepEqual(formFields("regex", "a+"), { structured_outputs: { regex: "a+" } });
  assert.deepEqual(formFields("choice", "yes\r\n\nno, never\n"), {
    structured_outputs: { choice: ["yes", "no, never"] },
  });
});

test("what cannot be sent is told before it is sent", () => {
  for (const kind of ["text", "json_object"]) assert.equal(formProblem(kind, "{"), "");
  for (const kind of ["json_schema", "regex", "choice"]) {
    assert.match(formProblem(kind, " \n"), /Fill this in/);
  }
  assert.equal(formProblem("json_schema", '{"type": "object"}'), "");
  assert.match(formProblem("json_schema", "{type"), /not JSON/);
  for (const text of ["[]", "null", "3", "true"]) {
    assert.match(formProblem("json_schema", text), /object/);
  }
  assert.equal(formProblem("regex", "("), "");
});

test("the hints are good examples", () => {
  for (const [kind, hint] of Object.entries(HINTS)) {
    if (hint === null) continue;
    assert.equal(formProblem(kind, hint), "");
    assert.ok(formFields(kind, hint));
  }
});
