"""What chat and text completions share: sampling fields, and fields that are refused by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from trtllm_lite.runtime.sampling_params import INT64, MAX_CHOICES, MAX_LOGPROBS
from trtllm_lite.runtime.server.errors import ApiError, invalid
from trtllm_lite.runtime.server.protocol.forms import SchemaOrText, Texts
from trtllm_lite.runtime.server.protocol.strict import Strict
from trtllm_lite.runtime.server.protocol.tools import ResponseFormat, StructuredOutputs

Count = Annotated[int, Field(ge=1, le=INT64 - 1)]
TokenId = Annotated[int, Field(ge=0, le=INT64 - 1)]
UNSUPPORTED = "unsupported_parameter"
"""The code of an error about a field that is known and not served."""


class StreamOptions(Strict):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SharedFields(Strict):
    """The fields that mean the same in every route that generates."""

    model: str | None = Field(None, description="one of the served names; null is the first")
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=INT64 - 1, description="0 and -1 are off")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(
        None, gt=0, le=1e6, description="over prompt and answer"
    )
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="over the answer")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description="over the answer")
    seed: int | None = Field(None, ge=-INT64, le=INT64 - 1)
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0, le=INT64 - 1)
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, description="token id, as a string, to what is added to its logit"
    )
    guided_json: SchemaOrText | None = Field(None, description="a JSON schema")
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(None, description="the answer is one of these")
    structured_outputs: StructuredOutputs | None = Field(
        None, description="one of json, regex and choice"
    )
    stream: bool | None = None


class Sampling(SharedFields):
    """The fields that chat and text completions share."""

    n: int | None = Field(None, ge=1, le=MAX_CHOICES, description="choices per prompt")
    stop: Texts | None = Field(
        None, description="at most 16 strings, none empty; not part of the answer"
    )
    response_format: ResponseFormat | None = Field(
        None, description="type text, json_object, or json_schema with a schema"
    )
    stream_options: StreamOptions | None = Field(None, description="only with stream")


TopLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


@dataclass(frozen=True)
class Refused:
    """A field that is known and not served. Null and the `neutral` values pass: they ask for
    nothing. `beside`: the neutral ones do so only where that other field is left out or among
    them."""

    reason: str
    neutral: tuple[object, ...] = ()
    beside: str | None = None

    def asks(self, name: str, raw: Mapping[str, Any]) -> bool:
        """Whether the body `raw` asks for anything by its field `name`."""
        if raw[name] is None:
            return False
        other = None if self.beside is None else raw.get(self.beside)
        return not (self._is_neutral(raw[name]) and (other is None or self._is_neutral(other)))

    def _is_neutral(self, value: object) -> bool:
        return any(_is_same(value, each) for each in self.neutral)


def _is_same(value: object, other: object) -> bool:
    """As JSON has it: true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


_NO_GRAMMAR = "not supported; use response_format, guided_json, guided_regex or guided_choice"
_NO_SCORES = "not supported; use echo with logprobs of /v1/completions"

REFUSED: Mapping[str, Refused] = {
    "best_of": Refused(
        "not supported: all choices that are made are returned; use n and choose yourself",
        (1,),
        beside="n",
    ),
    "use_beam_search": Refused("not supported", (False,)),
    "length_penalty": Refused("not supported: it belongs to beam search", (1, 1.0)),
    "prompt_embeds": Refused("not supported: tensors from clients are not loaded"),
    "bad_words": Refused("not supported; use logit_bias", ([],)),
    "allowed_token_ids": Refused("not supported; use logit_bias"),
    "guided_grammar": Refused(_NO_GRAMMAR),
    "grammar": Refused(_NO_GRAMMAR),
    "json_schema": Refused(_NO_GRAMMAR),
    "prompt_logprobs": Refused(_NO_SCORES),
    "return_token_ids": Refused("not supported; use /tokenize", (False,)),
    "return_tokens_as_token_ids": Refused("not supported; use /tokenize", (False,)),
    "logprob_token_ids": Refused("not supported; logprobs are those of the likeliest tokens"),
    "truncate_prompt_tokens": Refused("not supported; shorten the prompt"),
    "truncation_side": Refused("not supported; shorten the prompt"),
    "kv_transfer_params": Refused("not supported: a server keeps its own cache"),
    "cache_salt": Refused("not supported: the prefix cache is shared by all requests"),
    "priority": Refused("not supported: requests are served in order of arrival", (0,)),
    "request_id": Refused("not supported; send the header x-request-id"),
    "chat_template": Refused("not allowed: the bundle's own chat template gives the prompt"),
    "lora_request": Refused("not supported"),
}
"""Of chat and text completions alike."""

NO_EFFECT = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    "verbosity",
)
"""Fields that clients send for their own books: taken, and without effect on the answer."""


def check_refused(raw: Mapping[str, Any], *tables: Mapping[str, Refused]) -> None:
    """Raises ApiError for the first field of `raw` that one of the tables refuses."""
    for table in tables:
        for name in raw:
            if name in table and table[name].asks(name, raw):
                raise unsupported(name, table[name].reason)


def unsupported(field: str, reason: str) -> ApiError:
    """400 for a field that is known and not served."""
    return invalid(f"{field}: {reason}", field, UNSUPPORTED)
