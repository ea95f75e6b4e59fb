"""Fields that take more than one form. Which one a value has is told first, so that errors speak of
that one alone, or else of all that are allowed."""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Discriminator, Tag


def one_of(form: Callable[[object], str | None], allowed: str) -> Discriminator:
    """For a union whose members have tags. `form`: the tag of a value; None: it has no form that
    is `allowed`, in words."""
    message = f"Input should be {allowed}"
    return Discriminator(form, custom_error_type="form", custom_error_message=message)


def text_or_list(value: object) -> str | None:
    if isinstance(value, str):
        return "text"
    return "list" if isinstance(value, list) else None


def text_or_object(value: object) -> str | None:
    """An object is one of JSON, or the model that it has become already."""
    if isinstance(value, str):
        return "text"
    return None if value is None or isinstance(value, list | bool | int | float) else "object"


Texts = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[str], Tag("list")],
    one_of(text_or_list, "a string or a list of strings"),
]
SchemaOrText = Annotated[
    Annotated[str, Tag("text")] | Annotated[dict[str, Any], Tag("object")],
    one_of(text_or_object, "an object, or a string that holds one as JSON"),
]
