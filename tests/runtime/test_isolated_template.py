"""Chat templates in processes of their own: same texts, same refusals, limits of the system."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from trtllm_lite.runtime.chat_template import ChatTemplate
from trtllm_lite.runtime.errors import BundleError, BusyError, RequestError
from trtllm_lite.runtime.isolated_template import IsolatedTemplate, TemplateLimits

HI = [{"role": "user", "content": "Hi"}]
GOES_ON = [*HI, {"role": "assistant", "content": "Sure, "}]
TOKENS = {"bos_token": "<s>"}
SOURCE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls or '' }}"
    "{% endfor %}{{ tools|tojson if tools else '' }}{{ mood }}"
    "{% if messages|length > 3 %}{{ raise_exception('at most three') }}{% endif %}"
    "{% set words = ('ab,' * 1300000).split(',') if mood == 'huge' else [] %}"
    "{{ words|map('upper')|list|length if words else '' }}"
    "{% set path = ('0.' * 50000) ~ '0' if mood == 'slow' else '' %}"
    "{{ ('ab,' * 1000).split(',')[:1000]|max(attribute=path) if path else '' }}"
    "{% if mood == 'bomb' %}{{ 'a' * 10**10 }}{% endif %}"
    "{% if mood == 'loops' %}{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}"
    "{% endfor %}{% endif %}"
    "{% if mood == 'reach' %}{{ ''.__class__.__mro__ }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
STRICT = TemplateLimits(seconds=1.0, grace=0.5, memory=128 * 2**20)
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(scope="module")
def plain() -> ChatTemplate:
    return ChatTemplate(SOURCE, TOKENS)


@pytest.fixture(scope="module")
def isolated() -> IsolatedTemplate:
    return IsolatedTemplate(SOURCE, TOKENS)


@pytest.fixture
def strict() -> IsolatedTemplate:
    return IsolatedTemplate(SOURCE, TOKENS, STRICT)


def workers_of(template: IsolatedTemplate) -> list[int]:
    """The processes that wait for work."""
    return [process.pid for process in template._idle]


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        (HI, {}),
        (HI, {"add_generation_prompt": False, "mood": "é水\U0001f642\n\"'\0"}),
        (HI, {"tools": [{"a": [1, 2.5, None, True]}]}),
        (GOES_ON, {"add_generation_prompt": False, "continue_final_message": True}),
        ([{"role": "system", "content": [{"type": "text", "text": "a"}]}, *HI], {}),
        (
            [
                *HI,
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}],
                },
            ],
            {},
        ),
        ([{"role": "user", "content": "x" * 500_000}], {}),
    ],
)
def test_texts_are_those_of_the_template(
    plain: ChatTemplate, isolated: IsolatedTemplate, messages: Any, options: dict[str, Any]
) -> None:
    assert isolated.render(messages, **options) == plain.render(messages, **options)


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        (5, {}),
        ([], {}),
        ([{"role": "robot", "content": "x"}], {}),
        ([{"role": "user", "content": "\ud800"}], {}),
        (HI * 4, {}),
        (HI, {"nothing": 1}),
        (HI, {"chat_template": "x"}),
        (HI, {"bos_token": "x"}),
        (HI, {"mood": object()}),
        (HI, {"tools": "x"}),
        (HI, {"add_generation_prompt": "no"}),
        (GOES_ON, {"continue_final_message": True}),
        (HI, {"mood": "bomb"}),
        (HI, {"mood": "reach"}),
    ],
)
def test_refusals_are_those_of_the_template(
    plain: ChatTemplate, isolated: IsolatedTemplate, messages: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(RequestError) as expected:
        plain.render(messages, **options)
    with pytest.raises(RequestError) as caught:
        isolated.render(messages, **options)
    assert str(caught.value) == str(expected.value)
    assert caught.value.param == expected.value.param


def test_a_number_that_json_has_no_room_for(isolated: IsolatedTemplate) -> None:
    with pytest.raises(RequestError, match="too many digits"):
        isolated.render(HI, mood=10**5000)
    assert isolated.render(HI) == "<s><user>Hi<assistant>"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", r"^chat_template: it cannot be compiled: line 1"),
        ("{{ 'a' * 10**10 }}", r"^chat_template: it makes a text"),
        ("{{ ''.__class__ }}{{ ''.__class__.x }}", r"^chat_template: it reaches"),
    ],
)
def test_a_bad_template_is_refused_as_without_a_process(source: str, message: str) -> None:
    for kind in (ChatTemplate, IsolatedTemplate):
        with pytest.raises(BundleError, match=message):
            kind(source, {})


def test_a_template_that_breaks_its_process_is_refused() -> None:
    limits = TemplateLimits(start=0.001)
    with pytest.raises(BundleError, match=r"^chat_template: it took over 0.001 seconds$"):
        IsolatedTemplate(SOURCE, TOKENS, limits)


def test_memory_is_bounded() -> None:
    """Within the budget that the template counts, which is all that bounds it elsewhere."""
    strict = IsolatedTemplate(SOURCE, TOKENS, TemplateLimits(memory=96 * 2**20))
    with pytest.raises(RequestError, match=r"^messages: .*memory") as caught:
        strict.render(HI, mood="huge")
    assert "\n" not in str(caught.value)
    assert strict.render(HI) == "<s><user>Hi<assistant>"


@pytest.mark.parametrize("mood", ["slow", "loops"])
def test_time_is_bounded(strict: IsolatedTemplate, mood: str) -> None:
    with pytest.raises(RequestError, match=r"^messages: the chat template took over"):
        strict.render(HI, mood=mood)
    assert strict.render(HI) == "<s><user>Hi<assistant>"


def test_a_process_that_hangs_is_replaced(strict: IsolatedTemplate) -> None:
    (hung,) = workers_of(strict)
    os.kill(hung, signal.SIGSTOP)
    with pytest.raises(RequestError, match=r"^messages: the chat template took over 1.5 seconds$"):
        strict.render(HI)
    assert not exists(hung)
    assert strict.render(HI) == "<s><user>Hi<assistant>"
    assert workers_of(strict) != [hung]


def test_a_process_that_was_killed_is_replaced_unnoticed(isolated: IsolatedTemplate) -> None:
    killed = workers_of(isolated)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    until(lambda: all(map(is_dead, killed)))
    assert isolated.render(HI) == "<s><user>Hi<assistant>"


def test_threads_get_their_own_texts_from_a_bounded_number_of_processes(
    isolated: IsolatedTemplate,
) -> None:
    def render(i: int) -> str:
        return isolated.render([{"role": "user", "content": f"<{i}>"}])

    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(render, range(100)))
    assert made == [f"<s><user><{i}><assistant>" for i in range(100)]
    assert 1 <= len(workers_of(isolated)) <= TemplateLimits().processes


def test_who_waits_too_long_is_told_to_come_again() -> None:
    template = IsolatedTemplate(SOURCE, TOKENS, TemplateLimits(seconds=0.2, grace=60, processes=1))
    (pid,) = workers_of(template)
    os.kill(pid, signal.SIGSTOP)

    def hangs() -> None:
        with pytest.raises(RequestError, match="broke"):
            template.render(HI)

    first = threading.Thread(target=hangs)
    first.start()
    until(lambda: not workers_of(template))
    with pytest.raises(BusyError, match="is taken"):
        template.render(HI)
    os.kill(pid, signal.SIGKILL)
    first.join()


def test_processes_end_with_the_template() -> None:
    template = IsolatedTemplate("{{ 1 }}", {})
    (pid,) = workers_of(template)
    assert exists(pid)
    del template
    gc.collect()
    assert not exists(pid)


@linux
def test_processes_end_with_the_program_however_it_ends() -> None:
    code = (
        "import os\n"
        "from trtllm_lite.runtime.isolated_template import IsolatedTemplate\n"
        "template = IsolatedTemplate('{{ 1 }}', {})\n"
        "print(template._idle[0].pid, flush=True)\n"
        "os._exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    until(lambda: is_dead(int(done.stdout)))


@linux
def test_a_process_has_limits_and_none_of_our_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_LITE_SERVE_API_KEY", "key-of-a-client")
    template = IsolatedTemplate("{{ 1 }}", {}, STRICT)
    (pid,) = workers_of(template)
    process = Path("/proc") / str(pid)
    assert b"key-of-a-client" not in (process / "environ").read_bytes()
    limits = (process / "limits").read_text().splitlines()
    found = {line[:25].strip(): line[25:].split()[0] for line in limits}
    assert found["Max address space"] == str(STRICT.memory)
    assert found["Max file size"] == "0"
    assert os.getpgid(pid) != os.getpgid(0)


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def is_dead(pid: int) -> bool:
    """Gone, or only waited for."""
    try:
        stat = (Path("/proc") / str(pid) / "stat").read_text()
    except FileNotFoundError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)
