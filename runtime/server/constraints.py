"""What a request asks of the form of its text, as a grammar."""

from typing import Any

import orjson

from trtllm_lite.runtime.grammar_spec import GrammarSpec
from trtllm_lite.runtime.server.errors import invalid
from trtllm_lite.runtime.server.protocol.common import Sampling


def grammar_of(body: Sampling) -> GrammarSpec | None:
    """The grammar that the text must keep to, if the request has one. Compiling it is the engine's
    business. Raises ApiError for more than one, and for what is incomplete; RequestError for what
    is no description."""
    asked = {name: spec for name, spec in _each(body).items() if spec is not None}
    if len(asked) > 1:
        first, second, *_ = asked
        raise invalid(f"{second}: not together with {first}", second)
    return next(iter(asked.values()), None)


def _each(body: Sampling) -> dict[str, GrammarSpec | None]:
    outputs = body.structured_outputs
    asked = {
        "response_format": _response_format(body),
        "guided_json": _json("guided_json", body.guided_json),
        "guided_regex": _regex("guided_regex", body.guided_regex),
        "guided_choice": _choice("guided_choice", body.guided_choice),
    }
    if outputs is None:
        return asked
    param = "structured_outputs"
    inside = {
        f"{param}.json": _json(param, outputs.json_),
        f"{param}.regex": _regex(param, outputs.regex),
        f"{param}.choice": _choice(param, outputs.choice),
        f"{param}.json_object": GrammarSpec.json_object(param=param)
        if outputs.json_object
        else None,
    }
    if not any(inside.values()):
        raise invalid(f"{param}: give one of json, regex, choice and json_object", param)
    return {**asked, **inside}


def _response_format(body: Sampling) -> GrammarSpec | None:
    given, param = body.response_format, "response_format"
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        if given.schema_ is None:
            return GrammarSpec.json_object(param=param)
        return GrammarSpec.json_schema(given.schema_, param=param)
    if given.json_schema is None:
        raise invalid(f"{param}.json_schema: missing; type 'json_schema' needs it", param)
    return GrammarSpec.json_schema(given.json_schema.schema_, param=param)


def _json(param: str, schema: dict[str, Any] | str | None) -> GrammarSpec | None:
    if isinstance(schema, str):
        try:
            value = orjson.loads(schema)
        except orjson.JSONDecodeError as error:
            raise invalid(f"{param}: not JSON: {error}", param) from None
        return GrammarSpec.json_schema(value, param=param)
    return None if schema is None else GrammarSpec.json_schema(schema, param=param)


def _regex(param: str, pattern: str | None) -> GrammarSpec | None:
    return None if pattern is None else GrammarSpec.regex(pattern, param=param)


def _choice(param: str, options: list[str] | None) -> GrammarSpec | None:
    return None if options is None else GrammarSpec.choice(options, param=param)
