"""click commands as this program wants them: options in named groups with the environment variable
beside each, examples under the help, and the common options on every command."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from trtllm_lite.tools.config_file import ConfigFile, read_config
from trtllm_lite.tools.console import PROGRESS_MODES, Console, Settings

COMMON = "Common"
ENV_PREFIX = "TRTLLM_LITE"
_RANK = {
    ParameterSource.COMMANDLINE: 3,
    ParameterSource.ENVIRONMENT: 2,
    ParameterSource.DEFAULT_MAP: 1,
}

F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class Run:
    """State of one run of the program, shared by the group and its command (click's ctx.obj)."""

    settings: Settings = field(default_factory=Settings)
    config: ConfigFile | None = None
    ranks: dict[str, int] = field(default_factory=dict)
    """How strong the source of each setting was."""

    def outranks(self, source: ParameterSource | None, name: str) -> bool:
        """Whether a value of `name` from `source` counts: a flag in front of the command is not
        undone by an environment variable or a file seen again behind it."""
        rank = 0 if source is None else _RANK.get(source, 0)
        if not rank or rank < self.ranks.get(name, 0):
            return False
        self.ranks[name] = rank
        return True


class Option(click.Option):
    """An option that belongs to a named group of the help."""

    def __init__(self, *args: Any, group: str, **kwargs: Any) -> None:
        kwargs.setdefault("show_envvar", True)
        kwargs.setdefault("show_default", True)
        super().__init__(*args, **kwargs)
        self.group = group


class Argument(click.Argument):
    """A positional argument with a line of help."""

    def __init__(self, *args: Any, description: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.description = description


def option(group: str, *flags: str, **kwargs: Any) -> Callable[[F], F]:
    """Decorator: an `Option` of that group."""
    return click.option(*flags, cls=Option, group=group, **kwargs)


def argument(name: str, description: str, **kwargs: Any) -> Callable[[F], F]:
    """Decorator: an `Argument`."""
    return click.argument(name, cls=Argument, description=description, **kwargs)


def subcommand(name: str, *, examples: Sequence[str]) -> Callable[[Callable[..., Any]], "Command"]:
    """Decorator: a `Command`; its function's docstring is the help."""
    return click.command(name, cls=Command, examples=tuple(examples))


def console_of(ctx: click.Context) -> Console:
    """The console for the settings of this run."""
    return Console(ctx.ensure_object(Run).settings)


class HelpMixin(click.Command):
    """Grouped options and examples for a command or a group of commands."""

    def __init__(self, *args: Any, examples: tuple[str, ...] = (), **kwargs: Any) -> None:
        context = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
        kwargs.setdefault("context_settings", context)
        super().__init__(*args, **kwargs)
        self.examples = examples
        self.params.extend(_common_options())

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        arguments = [p for p in self.get_params(ctx) if isinstance(p, Argument)]
        if arguments:
            rows = [(p.make_metavar(ctx), p.description) for p in arguments]
            with formatter.section("Arguments"):
                formatter.write_dl(rows, col_max=24)
        for title, rows in self._option_rows(ctx).items():
            with formatter.section(f"{title} options"):
                formatter.write_dl(rows, col_max=24)

    def _option_rows(self, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = None if isinstance(param, Argument) else param.get_help_record(ctx)
            if record is not None:
                groups.setdefault(getattr(param, "group", COMMON), []).append(record)
        return groups

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples:
                    formatter.write(f"{'':>{formatter.current_indent}}{example}\n")


class Command(HelpMixin):
    """A leaf command. Values come from flags, then the environment, then the configuration file,
    then the defaults; an error in a value says which of them it came from."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        config = ctx.ensure_object(Run).config
        if config is not None:
            ctx.default_map = config.values_for(self)
        try:
            return super().parse_args(ctx, args)
        except click.BadParameter as error:
            origin = _origin(ctx, error.param)
            if not origin:
                raise
            message = error.message + origin
            raise click.BadParameter(message, ctx, error.param, error.param_hint) from error


def _origin(ctx: click.Context, param: click.Parameter | None) -> str:
    source = None if param is None or param.name is None else ctx.get_parameter_source(param.name)
    if param is None or source is None:
        return ""
    if source is ParameterSource.ENVIRONMENT and isinstance(param, click.Option):
        return f" (from {param.envvar or f'{ctx.auto_envvar_prefix}_{str(param.name).upper()}'})"
    config = ctx.ensure_object(Run).config
    if source is ParameterSource.DEFAULT_MAP and config is not None:
        return f" (from {config.path})"
    return ""


def _common_options() -> list[click.Parameter]:
    """On the program and on every command, under one environment variable each."""
    return [
        _common(
            "--config",
            type=click.Path(),
            is_eager=True,
            callback=_take_config,
            metavar="FILE",
            help="TOML file with values for options (flags and environment win over it).",
        ),
        _common(
            "--progress",
            type=click.Choice(PROGRESS_MODES),
            default="auto",
            callback=_take_setting,
            help="Progress on stderr: auto is a live bar on a terminal and plain lines elsewhere.",
        ),
        _common(
            "--quiet",
            "-q",
            is_flag=True,
            callback=_take_setting,
            help="Results and errors only.",
        ),
        _common(
            "--debug",
            is_flag=True,
            callback=_take_setting,
            help="Show the traceback of an error, and what libraries print.",
        ),
    ]


def _common(*flags: str, **kwargs: Any) -> Option:
    envvar = f"{ENV_PREFIX}_{flags[0].removeprefix('--').upper()}"
    return Option(flags, group=COMMON, envvar=envvar, expose_value=False, **kwargs)


def _take_setting(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    run, name = ctx.ensure_object(Run), str(param.name)
    if run.outranks(ctx.get_parameter_source(name), name):
        run.settings = replace(run.settings, **{name: value})


def _take_config(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    run = ctx.ensure_object(Run)
    if value is None or not run.outranks(ctx.get_parameter_source("config"), "config"):
        return
    run.config = read_config(value, ctx.find_root())
    if isinstance(ctx.command, click.Group):
        ctx.default_map = run.config.common_values(ctx.command)
    else:
        ctx.default_map = run.config.values_for(ctx.command)
