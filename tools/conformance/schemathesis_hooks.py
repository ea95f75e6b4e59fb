"""A check for Schemathesis, which runs it in its own environment: a body that fits the document is
accepted, or refused for a reason that no document can tell, since it needs the model (its
vocabulary, context and template) or joins several fields. Descriptions of the fields tell it."""

import re
from typing import Any

import schemathesis

REASONS = (
    # what the model has
    r"maximum context length",
    r"ids below|outside the vocabulary|ids that the tokenizer does not have",
    r"the chat template|is not a variable of the template",
    r"the model does not reason|the model always reasons",
    r"got no tokens; a prompt needs at least one",
    # what fields are together
    r"allowed (only )?(when|with) ",
    r"not together with",
    r"give one of",
    r"choices over all prompts; at most",
    r"is more than max_tokens",
    r"got True with a grammar",
    r"two functions (have the same name|named)|there is no tool|got the function",
    r"allowed: the call_id of|allowed: the id of a tool_use",
    r"the last message (is of the role|ends with tool_calls)",
    r"a block of type \w+ belongs to|a system message holds|got reasoning alone",
    # what a schema or an expression holds
    r"cannot be (used|compiled)|is no JSON|not JSON|nested over|is not supported; remove it",
    r"the parameters of .* are of type",
    r"got a schema of type",
)
_KNOWN = re.compile("|".join(REASONS))
ACCEPTED = (200, 401, 404)


def accepted_or_explained(ctx: Any, response: Any, case: Any) -> None:
    """Raises AssertionError for another answer to a body that fits its schema."""
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return
    if response.status_code in ACCEPTED:
        return
    message = response.json()["error"]["message"]
    explained = _KNOWN.search(message) is not None or _has_whole_float(case.body)
    if response.status_code != 400 or not explained:
        raise AssertionError(f"{response.status_code} for a body that fits: {message}")


def _has_whole_float(value: Any) -> bool:
    """1.0 is an integer for JSON schemas, and none for a server without conversions."""
    if isinstance(value, dict):
        return any(map(_has_whole_float, value.values()))
    if isinstance(value, list):
        return any(map(_has_whole_float, value))
    return isinstance(value, float) and value.is_integer()


schemathesis.check(accepted_or_explained)
