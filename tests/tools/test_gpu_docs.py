"""Every command and every option that the pages about GPUs print is one that is there."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from trtllm_lite.tools import carry
from trtllm_lite.tools.cli import COMMANDS, cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / name for name in ("gpu.md", "migrate.md")]
TABLES = ("export", "build", "serve")
"""The commands that a cell of a table means where it names none."""

FENCE = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")


def lines_of(page: Path) -> list[str]:
    """The lines of the page's blocks of commands, without comments."""
    blocks = FENCE.findall(page.read_text())
    joined = "".join(blocks).replace("\\\n", " ")
    return [line for line in joined.splitlines() if shlex.split(line, comments=True)]


LINES = [(page, line) for page in PAGES for line in lines_of(page)]


@cache
def command(name: str) -> click.Command:
    found = cli.get_command(click.Context(cli), name)
    assert found is not None, name
    return found


@cache
def options(name: str) -> frozenset[str]:
    params = (*command(name).params, *cli.params)
    return frozenset(o for param in params for o in (*param.opts, *param.secondary_opts))


def parse(words: list[str]) -> None:
    """As the program does, without running anything."""
    name, *rest = words
    command(name).make_context(name, rest, parent=click.Context(cli, info_name="trtllm-lite"))


def extras() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return set(project["optional-dependencies"])


@pytest.mark.parametrize(("page", "line"), LINES, ids=lambda x: x if isinstance(x, str) else x.name)
def test_a_line_is_one_that_runs(page: Path, line: str) -> None:
    words = shlex.split(line, comments=True)
    while re.match(r"[A-Z]+=", words[0]):
        words.pop(0)
    if words[0] == "trtllm-lite":
        parse(words[1:])
    elif words[:2] == ["python", "-m"] and words[2] == "trtllm_lite.tools.carry":
        carry.parser().parse_args(words[3:])
    elif words[:2] == ["python", "-m"]:
        assert words[2] == "trtllm_lite"
        parse(words[3:])
    elif words[:2] == ["pip", "install"]:
        for named in re.findall(r"\[([^]]*)]", line):
            assert set(named.split(",")) <= extras()
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}: .*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    else:
        pytest.fail(f"{page.name}: {line!r} is no command that this test knows")


def codes_of(page: Path) -> Iterator[str]:
    """What stands as code in the page's text, and in the last cell of the rows of its tables: the
    others are about another program."""
    for line in FENCE.sub("", page.read_text()).splitlines():
        yield from CODE.findall(line.rstrip(" |").rpartition(" | ")[2])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_option_is_there(page: Path) -> None:
    wrong, seen = [], 0
    for code in codes_of(page):
        words = code.removeprefix("trtllm-lite ").split()
        named = words[0] in COMMANDS
        if not named and not words[0].startswith("--"):
            continue
        known = options(words[0]) if named else frozenset().union(*map(options, TABLES))
        used = [word.split("=")[0] for word in words if word.startswith("--")]
        seen += len(used)
        wrong += [code for option in used if option not in known]
    assert wrong == []
    assert seen > 3


def test_the_pages_have_commands() -> None:
    assert {page for page, _ in LINES} == set(PAGES)
