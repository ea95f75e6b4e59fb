"""One option for every field of `SamplingParams`."""

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import click

from trtllm_lite.runtime.errors import RequestError
from trtllm_lite.tools.command import option
from trtllm_lite.tools.options import Count, CountList, LogitBias, Text, stacked

if TYPE_CHECKING:
    from trtllm_lite.runtime.sampling_params import SamplingParams

GROUP = "Sampling"

# How one choice is drawn and ends. Not given means: as the bundle's generation defaults say.
choice_options = stacked(
    option(GROUP, "--temperature", type=float, help="0 is greedy. Default: the bundle's."),
    option(GROUP, "--top-k", type=int, help="Keep the K likeliest tokens; 0 is off."),
    option(GROUP, "--top-p", type=float, help="Keep the smallest set with this probability."),
    option(GROUP, "--min-p", type=float, help="Drop tokens below this part of the likeliest."),
    option(GROUP, "--repetition-penalty", type=float, help="Over prompt and answer; 1 is off."),
    option(GROUP, "--presence-penalty", type=float, help="Over the answer, -2 to 2; 0 is off."),
    option(GROUP, "--frequency-penalty", type=float, help="Over the answer, -2 to 2; 0 is off."),
    option(GROUP, "--logit-bias", type=LogitBias(), help="Added to the logits of token ids."),
    option(GROUP, "--seed", type=int, help="The same seed gives the same answer."),
    option(GROUP, "--min-tokens", type=Count(0), help="No end before this many tokens."),
    option(GROUP, "--stop", type=Text(), multiple=True, help="End before this text (repeatable)."),
    option(GROUP, "--stop-token-ids", type=CountList(0), help="Further ids that end the answer."),
    option(GROUP, "--ignore-eos", is_flag=True, help="The model's own end tokens do not end it."),
    option(GROUP, "--include-stop-str-in-output", is_flag=True, help="Keep the stop text."),
    option(
        GROUP,
        "--skip-special-tokens/--no-skip-special-tokens",
        default=True,
        help="Leave special tokens out of the text.",
    ),
)

# What only a caller who reads all of the result can use.
result_options = stacked(
    option(GROUP, "--n", type=Count(), help="Choices per prompt."),
    option(GROUP, "--logprobs", type=Count(0), help="Alternatives per token; needs --json."),
    option(GROUP, "--prompt-logprobs", type=Count(0), help="The same for the prompt."),
)


def sampling_params(values: dict[str, Any], defaults: "SamplingParams") -> "SamplingParams":
    """`defaults` with the sampling options among `values`, which are taken out.

    Raises click.UsageError naming the option whose value is not allowed.
    """
    names = [field.name for field in fields(defaults) if field.name in values]
    given = {name: values.pop(name) for name in names}
    changes = {name: value for name, value in given.items() if value not in (None, ())}
    try:
        return replace(defaults, **changes)
    except RequestError as error:
        message = str(error).removeprefix(f"{error.param}: ")
        raise click.UsageError(f"--{error.param.replace('_', '-')}: {message}") from error
