"""`--config FILE`: TOML values for options.

Top-level keys are for the command that runs (which must have them) and the common options; a
table named after a command, `[export]`, is for that command. Keys are option names without the
dashes in front, arguments included. Anything unknown is refused by name.
"""

import tomllib
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

# Not values that a file can give: the file itself, and what ends the program at once.
_NEVER = frozenset({"config", "help", "version"})


@dataclass(frozen=True)
class ConfigFile:
    """A read file: top-level values, and one table a command."""

    path: str
    top: dict[str, Any]
    tables: dict[str, dict[str, Any]]

    def values_for(self, command: click.Command) -> dict[str, Any]:
        """Values by parameter name for one command; its own table wins over top-level keys.
        Raises click.UsageError for a key that it does not have or a value of the wrong kind."""
        top = self._checked(command, self.top, "")
        own = self._checked(command, self.tables.get(str(command.name), {}), f"{command.name}.")
        return {**top, **own}

    def common_values(self, group: click.Group) -> dict[str, Any]:
        """The top-level values that the group of commands takes itself."""
        names = set(_parameters(group))
        common = {key: value for key, value in self.top.items() if _name(key) in names}
        return self._checked(group, common, "")

    def check_tables(self, group: click.Group, ctx: click.Context) -> None:
        """Refuse a table that names no command, and any unknown key in a command's table."""
        for title, table in self.tables.items():
            command = group.get_command(ctx, title)
            if command is None:
                known = group.list_commands(ctx)
                raise click.UsageError(f"{self.path}: no command [{title}]{_hint(title, known)}")
            self._checked(command, table, f"{title}.")

    def _checked(self, command: click.Command, values: dict[str, Any], at: str) -> dict[str, Any]:
        parameters = _parameters(command)
        checked: dict[str, Any] = {}
        for key, value in values.items():
            where = f"{self.path}: {at}{key}"
            if _name(key) not in parameters:
                known = [name.replace("_", "-") for name in parameters]
                what = f"{command.name} has no such option"
                raise click.UsageError(f"{where}: {what}{_hint(key, known)}")
            checked[_name(key)] = _fitted(parameters[_name(key)], value, where)
        return checked


def read_config(path: str, root: click.Context) -> ConfigFile:
    """Read and check a file. `root` is the context of the whole program. Raises click.UsageError
    for what is not TOML, an unknown table or key; OSError where it cannot be read."""
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise click.UsageError(f"{path}: not a TOML file: {error}") from error
    tables = {key: value for key, value in values.items() if isinstance(value, dict)}
    top = {key: value for key, value in values.items() if not isinstance(value, dict)}
    config = ConfigFile(path, top, tables)
    if isinstance(root.command, click.Group):
        config.check_tables(root.command, root)
    return config


def _parameters(command: click.Command) -> dict[str, click.Parameter]:
    return {str(p.name): p for p in command.params if p.name not in _NEVER}


def _name(key: str) -> str:
    return key.replace("-", "_")


def _fitted(param: click.Parameter, value: Any, where: str) -> Any:
    """The value in the form that click wants, or a refusal of the wrong kind."""
    many = param.multiple or param.nargs != 1
    if getattr(param, "is_flag", False):
        if isinstance(value, bool):
            return value
        raise click.UsageError(f"{where}: got {value!r}; allowed: true or false")
    if isinstance(value, list) and not (many or getattr(param.type, "takes_lists", False)):
        raise click.UsageError(f"{where}: got a list; allowed: one value")
    if isinstance(value, dict) and not getattr(param.type, "takes_tables", False):
        raise click.UsageError(f"{where}: got a table; allowed: one value")
    if isinstance(value, bool) or not isinstance(value, str | int | float | list | dict):
        raise click.UsageError(f"{where}: got {value!r}; allowed: a number or text")
    return value if not many or isinstance(value, list) else [value]


def _hint(wrong: str, known: list[str]) -> str:
    close = get_close_matches(wrong.replace("_", "-"), known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(sorted(known))}"
