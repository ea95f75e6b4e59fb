"""`--print-config`: the options of a run as the TOML file that `--config` takes back."""

import json
from collections.abc import Collection, Iterator

import click
from click.core import ParameterSource

from trtllm_lite.tools.command import Run

_ORIGINS = {
    ParameterSource.COMMANDLINE: "command line",
    ParameterSource.ENVIRONMENT: "environment",
    ParameterSource.DEFAULT: "default",
}


def config_text(ctx: click.Context, secret: Collection[str]) -> str:
    """A table named after the command with a line for every value and where it comes from. Options
    that are not set are comments; so are the `secret` ones, without their values. Switches that
    end a run are left out."""
    return "\n".join([f"[{ctx.command.name}]", *_lines(ctx, secret)]) + "\n"


def _lines(ctx: click.Context, secret: Collection[str]) -> Iterator[str]:
    for param in ctx.command.params:
        name = str(param.name)
        if name not in ctx.params or name == "print_config":
            continue
        key, value = name.replace("_", "-"), ctx.params[name]
        if name in secret:
            yield f"# {key}: {len(value)} given, not shown"
        elif value is None:
            yield f"# {key} is not set"
        else:
            yield f"{key} = {_toml(value)}  # {_origin(ctx, name)}"


def _origin(ctx: click.Context, name: str) -> str:
    source = ctx.get_parameter_source(name)
    config = ctx.ensure_object(Run).config
    if source is ParameterSource.DEFAULT_MAP and config is not None:
        return config.path
    return _ORIGINS.get(source, "default") if source is not None else "default"


def _toml(value: object) -> str:
    """Numbers, booleans, lists and texts: what click makes of options is one of those, or has a
    text that says it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    # A basic string of TOML: JSON's escapes, where every character is within \uXXXX.
    text = json.dumps(str(value), ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")
