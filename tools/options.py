"""Values and groups of options that several commands share."""

import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from trtllm_lite.tools.command import argument, option
from trtllm_lite.tools.console import Console

# As in vLLM's `human_readable_int`: small letters are powers of 1000, capitals powers of 1024.
SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
NUMBER_HELP = "4k is 4000 and 4K is 4096"
_NUMBER = re.compile(r"([+-]?\d+(?:\.\d+)?)([kmgKMG]?)")

F = TypeVar("F", bound=Callable[..., Any])

if TYPE_CHECKING:
    from trtllm_lite.runtime.llm import LLM

    IntType = click.ParamType[int]
    IntsType = click.ParamType[tuple[int, ...]]
    BiasType = click.ParamType[dict[int, float]]
    TextType = click.ParamType[str]
else:
    # Older click has the class without the type argument.
    IntType = IntsType = BiasType = TextType = click.ParamType


def parse_count(text: str) -> int:
    """ "4k" -> 4000, "1.5K" -> 1536. Raises ValueError for anything that is not a whole number."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a number such as 512, 4k (4000) or 4K (4096)")
    value = Decimal(match[1]) * SUFFIXES[match[2]]
    if value != value.to_integral_value():
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)


class Count(IntType):
    """A whole number not below `minimum`, with an optional suffix."""

    name = "number"

    def __init__(self, minimum: int = 1) -> None:
        self.minimum = minimum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return _count(value, self.minimum)
        except ValueError as error:
            self.fail(f"{error}.", param, ctx)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "N"


class CountList(IntsType):
    """Numbers separated by commas, or a list in a configuration file."""

    name = "numbers"
    takes_lists = True

    def __init__(self, minimum: int = 1) -> None:
        self.minimum = minimum

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        parts = value if isinstance(value, list | tuple) else str(value).split(",")
        try:
            return tuple(_count(part, self.minimum) for part in parts)
        except ValueError as error:
            self.fail(f"{error}.", param, ctx)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "N[,N...]"


def _count(value: Any, minimum: int) -> int:
    number = value if isinstance(value, int) else parse_count(str(value))
    if isinstance(value, bool) or number < minimum:
        raise ValueError(f"got {value}; allowed: whole numbers from {minimum} on")
    return number


class LogitBias(BiasType):
    """`ID=BIAS[,ID=BIAS...]`, or a table of a configuration file; -> {token id: bias}."""

    name = "bias"
    takes_tables = True

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[int, float]:
        pairs = value.items() if isinstance(value, dict) else self._pairs(value)
        try:
            return {int(token): float(bias) for token, bias in pairs}
        except ValueError:
            self.fail(f"got {value!r}; allowed: ID=BIAS[,ID=BIAS...].", param, ctx)

    def _pairs(self, value: Any) -> list[tuple[str, str]]:
        parts = [part.partition("=") for part in str(value).split(",")]
        return [(token, bias) for token, _, bias in parts]

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "ID=BIAS[,...]"


class Text(TextType):
    """Any text, blanks included: an environment variable gives one value, never several."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(value)

    def split_envvar_value(self, rv: str) -> list[str]:
        return [rv]


def stacked(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """The decorators as one; the first is the outermost, so it comes first in the help."""

    def apply(function: F) -> F:
        for decorate in reversed(decorators):
            function = decorate(function)
        return function

    return apply


bundle_argument = argument("bundle", "Folder made by `trtllm-lite export`.", type=click.Path())

json_option = option(
    "Output", "--json", is_flag=True, help="One JSON document on stdout instead of tables or text."
)

hash_option = option(
    "Bundle",
    "--hash-check/--no-hash-check",
    default=True,
    help="Compare the sha256 of every file with the manifest (sizes always are). To run a model, "
    "files that the host cache knows to be unchanged are not read again.",
)

speed_options = stacked(
    option(
        "Engine",
        "--max-num-batched-tokens",
        type=Count(),
        help="Most tokens computed in one step.",
    ),
    option(
        "Engine",
        "--backend",
        type=click.Choice(["auto", "onnxruntime", "tensorrt"]),
        default="auto",
        help="Auto: TensorRT where the bundle is for it and has plans for this GPU.",
    ),
    option(
        "Engine",
        "--provider",
        type=click.Choice(["auto", "tensorrt", "nv-tensorrt-rtx"]),
        default="auto",
        help="ONNX Runtime's own TensorRT in place of plans, for a bundle of `export --target "
        "tensorrt --attention mask`. It builds engines at the first start, and has never run on a "
        "GPU.",
    ),
    option("Engine", "--threads", type=Count(), help="Threads in an operator. Default: measured."),
    option(
        "Engine",
        "--kernels",
        type=click.Choice(["auto", "native", "onnxruntime"]),
        default="auto",
        help="Operators of a quantized bundle. Auto: ours where the processor has AVX-512 VNNI.",
    ),
    option(
        "Engine",
        "--rounding",
        type=click.Choice(["exact", "fast"]),
        default="fast",
        help="Of activations by our kernels. Exact: as 16 bits where tokens are few, but slower.",
    ),
    option(
        "Engine",
        "--kv-dtype",
        type=click.Choice(["auto", "float32", "float16", "int8"]),
        default="auto",
        help="Of the KV cache. Auto: what the bundle was made for, where our kernels run.",
    ),
    option(
        "Engine",
        "--spin/--no-spin",
        default=None,
        help="Threads wait between two steps at full speed. Default: measured.",
    ),
    option(
        "Engine",
        "--huge-pages/--no-huge-pages",
        default=None,
        help="A private copy of the weights in huge pages. Default: measured.",
    ),
    option(
        "Engine",
        "--host-cache/--no-host-cache",
        default=True,
        help="Keep what is made once per machine: packed weights, measured settings, hashed files.",
    ),
    hash_option,
)

length_option = option(
    "Engine", "--max-model-len", type=Count(), help="Most tokens of prompt and answer together."
)

seqs_option = option(
    "Engine", "--max-num-seqs", type=Count(), help="Requests that run at the same time."
)

prefix_option = option(
    "Engine",
    "--prefix-caching/--no-prefix-caching",
    default=True,
    help="Reuse the KV cache of prompts that begin alike.",
)


speculation_options = stacked(
    option(
        "Engine",
        "--speculation",
        type=click.Choice(["ngram", "off"]),
        help="Guess tokens from the text so far and check them at once. Default: where exact.",
    ),
    option("Engine", "--max-draft-tokens", type=Count(), help="Most tokens guessed at once."),
)


def open_llm(bundle: str, values: dict[str, Any], **fixed: Any) -> "LLM":
    """An `LLM` with the engine options among `values`, which are taken out, and `fixed`."""
    from trtllm_lite.runtime.llm import LLM

    return LLM(Path(bundle), **{**load_arguments(values), **fixed})


def load_arguments(values: dict[str, Any]) -> dict[str, Any]:
    """The engine options among `values`, which are taken out, under the names that `LLM` and
    `LoadOptions` have for them. What was not given is left out."""
    given = {argument: values.pop(name) for name, argument in _LLM_ARGUMENTS if name in values}
    return {name: value for name, value in given.items() if value is not None}


def show_tuning(console: Console, llm: "LLM") -> None:
    """Say which settings this machine gets: once, when they were measured, or with --debug."""
    from trtllm_lite.runtime.host_tuning import in_words

    tuning = llm.tuning
    if tuning is not None and (tuning.origin == "measured" or console.settings.debug):
        console.info(f"settings for this machine: {in_words(tuning)}", dim=True)


_LLM_ARGUMENTS = (
    ("max_num_seqs", "max_num_seqs"),
    ("max_model_len", "max_model_len"),
    ("max_num_batched_tokens", "max_num_batched_tokens"),
    ("threads", "intra_op_num_threads"),
    ("spin", "spin"),
    ("huge_pages", "huge_pages"),
    ("host_cache", "host_cache"),
    ("kernels", "kernels"),
    ("rounding", "rounding"),
    ("kv_dtype", "kv_dtype"),
    ("backend", "backend"),
    ("provider", "provider"),
    ("hash_check", "check_hashes"),
    ("prefix_caching", "enable_prefix_caching"),
    ("speculation", "speculation"),
    ("max_draft_tokens", "max_draft_tokens"),
)
