"""The base of all request models."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import pydantic
from pydantic import BaseModel, ConfigDict

from trtllm_lite.runtime.server.errors import invalid


class Strict(BaseModel):
    """No conversions: "1" is no number and 1.0 no integer. Null stands for a field left out.
    Unknown fields change nothing: clients send what newer servers know."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Self:
        """The checked request. Raises ApiError that names the first field that is wrong."""
        try:
            return cls.model_validate(raw)
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            path = _path(raw, first["loc"])
            where = ".".join(path) or "body"
            raise invalid(f"{where}: {first['msg']}", path[0] if path else None) from None


def _path(raw: object, loc: Sequence[int | str]) -> list[str]:
    """Where in the body the error is: without the names of forms, which are between."""
    made, value = list[str](), raw
    for part in loc:
        if isinstance(value, Mapping) and (part in value or part == loc[-1]):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int):
            value = value[part]
        else:
            continue
        made.append(str(part))
    return made
