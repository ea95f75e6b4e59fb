"""What runs inside a client's environment: every check leaves a line, and no failure is lost."""

import io
import json
from types import ModuleType

import pytest

from trtllm_lite.tools.clients.scripts.checks import MAX_ERROR, Target, checks_of, run_checks

TARGET = Target("http://127.0.0.1:1234", "key", "m", 64, "f", "b", "r")
SCRIPT = """
from trtllm_lite.tools.clients.scripts.checks import Target, run_checks

def second_is_first_in_the_file(target):
    assert target.model == "m"

def _helper(value):
    raise KeyError("x" * 2000)

def fails(target):
    _helper(target)

def says_what_it_expected(target):
    assert target.context == 65, "the context"

kept = fails
"""


@pytest.fixture
def script() -> ModuleType:
    module = ModuleType("a_script")
    exec(compile(SCRIPT, "a_script.py", "exec"), vars(module))
    return module


def test_every_public_function_of_the_script_is_a_check_once(script: ModuleType) -> None:
    names = [check.__name__ for check in checks_of(script)]
    assert names == ["second_is_first_in_the_file", "fails", "says_what_it_expected"]


def test_each_check_leaves_a_line(script: ModuleType) -> None:
    out = io.StringIO()
    run_checks(checks_of(script), TARGET, out)
    good, bad, told = map(json.loads, out.getvalue().splitlines())
    assert (good["check"], good["error"]) == ("second is first in the file", None)
    assert bad["error"].startswith("line 8: KeyError: ")
    assert len(bad["error"]) == MAX_ERROR
    assert told["error"] == "line 14: AssertionError: the context"


def test_a_target_knows_its_addresses() -> None:
    assert (TARGET.base, TARGET.port) == ("http://127.0.0.1:1234/v1", 1234)
