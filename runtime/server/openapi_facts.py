"""What the routes beside generation answer, as types. See `openapi_replies`."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from trtllm_lite.runtime.server.openapi_replies import ErrorDetail, sometimes


class ModelObject(BaseModel):
    """A served model. `trtllm_lite` holds the facts of its bundle."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int = Field(ge=1, description="tokens of prompt and answer together")
    trtllm_lite: dict[str, Any]


class ModelList(BaseModel):
    """All names that are served, aliases included."""

    object: Literal["list"]
    data: list[ModelObject]


class TokenizeReply(BaseModel):
    """The ids of a text."""

    count: int = Field(ge=0)
    max_model_len: int = Field(ge=1)
    tokens: list[int]
    token_strs: list[str] | None = Field(description="null without return_token_strs")


class DetokenizeReply(BaseModel):
    """The text of ids."""

    prompt: str


class LiveReply(BaseModel):
    """Whether the process answers and its engine has not died."""

    status: Literal["live", "dead"]


class HealthReply(BaseModel):
    """Requests are taken."""

    status: Literal["ok"]


class UnhealthyReply(BaseModel):
    """No request is taken. `step` and `percent` tell how far loading is."""

    status: Literal["loading", "draining", "dead"]
    step: str = sometimes()
    percent: int = sometimes()
    error: ErrorDetail


class VersionReply(BaseModel):
    """Of this package and of Python."""

    version: str
    python: str


class FieldRow(BaseModel):
    """What one field of a request does here."""

    status: Literal["honoured", "no_effect", "refused"]
    reason: str = sometimes("why it is refused")
    default: Any = sometimes()
    types: list[str] = sometimes()
    description: str = sometimes()
    minimum: float = sometimes()
    maximum: float = sometimes()
    above: float = sometimes()
    below: float = sometimes()
    min_items: int = sometimes()
    max_length: int = sometimes()


class Capabilities(BaseModel):
    """Every field of every request that generates, and the limits."""

    object: Literal["capabilities"]
    endpoints: dict[str, dict[str, FieldRow]]
    unknown_fields: str
    limits: dict[str, float]
