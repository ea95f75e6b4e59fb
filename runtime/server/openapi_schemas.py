"""The schemas of the document: those of the models that check requests, with what is checked
later, and those of the replies."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from trtllm_lite.runtime.server.openapi_rules import (
    COMPONENTS,
    PREFIX,
    Schema,
    field_rules,
    model_rules,
)
from trtllm_lite.runtime.server.protocol.common import Refused
from trtllm_lite.runtime.server.protocol.strict import Strict
from trtllm_lite.runtime.server.settings import Limits


@dataclass(frozen=True)
class Body:
    """What a route takes. refused: fields that are known and not served, with the reason.
    no_effect: fields that are taken for the client's own books. examples: by name."""

    model: type[Strict]
    refused: Mapping[str, Refused] = field(default_factory=lambda: MappingProxyType({}))
    no_effect: tuple[str, ...] = ()
    examples: Mapping[str, Schema] = field(default_factory=lambda: MappingProxyType({}))


class Schemas:
    """All schemas under their names in the document (`components`)."""

    def __init__(
        self, bodies: Iterable[Body], replies: Iterable[type[BaseModel]], limits: Limits
    ) -> None:
        taken = list(bodies)
        rules, wholes = field_rules(limits), model_rules()
        models = dict.fromkeys([*(b.model for b in taken), *rules, *wholes, *replies])
        refs, made = models_json_schema(
            [(model, "validation") for model in models],
            ref_template=f"{PREFIX}{{model}}",
            schema_generator=_Untitled,
        )
        self._names = {model: _name(refs[model, "validation"]) for model in models}
        self.components: dict[str, Schema] = {**made["$defs"], **COMPONENTS}
        for model, fields in rules.items():
            self._say_more(model, fields)
        for model, schema in wholes.items():
            self.components[self._names[model]].update(schema)
        for body in taken:
            self._add_unserved(body)

    def ref(self, model: type[BaseModel]) -> Schema:
        """A reference to the schema of one of the models."""
        return {"$ref": PREFIX + self._names[model]}

    def _say_more(self, model: type[BaseModel], fields: Mapping[str, Schema]) -> None:
        properties = self.components[self._names[model]]["properties"]
        for name, schema in fields.items():
            kept = {k: v for k, v in properties[name].items() if k in ("description", "default")}
            properties[name] = {**schema, **kept}

    def _add_unserved(self, body: Body) -> None:
        component = self.components[self._names[body.model]]
        properties = component["properties"]
        for name in set(body.no_effect) - set(properties):
            properties[name] = {"description": "taken, without effect on the answer"}
        for name, entry in body.refused.items():
            properties[name] = {
                "enum": [None, *entry.neutral],
                "description": f"refused beyond these values: {entry.reason}",
                "deprecated": True,
            }
            if entry.beside is not None and entry.beside not in body.refused:
                component.setdefault("allOf", []).append(_beside(name, entry, entry.beside))


def _beside(name: str, entry: Refused, other: str) -> Schema:
    """The field is null, or the other one as neutral as it is."""
    neutral: Schema = {"enum": [None, *entry.neutral]}
    return {"anyOf": [{"properties": {name: {"type": "null"}}}, {"properties": {other: neutral}}]}


class _Untitled(GenerateJsonSchema):
    """Fields have their names; a title would say the same again."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _name(ref: Mapping[str, Any]) -> str:
    return str(ref["$ref"]).removeprefix(PREFIX)
