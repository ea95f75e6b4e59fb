"""Formats by name, and as chat templates show them."""

import pytest

from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.runtime.server.parsers.formats import (
    TOOL_FORMATS,
    detect_reasoning,
    detect_tool_format,
    tool_format,
)

CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% endfor %}"
HERMES = (
    CHATML + '{{ "<tool_call>\\n{\\"name\\": <name>, \\"arguments\\": <args>}\\n</tool_call>" }}'
)
CODER = CHATML + "{{ '<tool_call>\n<function=' + tool_call.name + '>\n' }}"
GLM = CHATML + "{{ '<tool_call>' + tool_call.name }}<arg_key>{{ key }}</arg_key>"
LLAMA = (
    "{{- '<|start_header_id|>system<|end_header_id|>' }}"
    """{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}"""
)
LLAMA_ESCAPED = '<|start_header_id|>{{ "{\\"name\\": \\"f\\", \\"parameters\\": {}}" }}'
LLAMA_PLAIN = "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>' }}"
MISTRAL = """{{- "[TOOL_CALLS] [" }}{{- '"id": "' }}"""
MISTRAL_ARGS = """{{- "[TOOL_CALLS]" + name + "[ARGS]" + arguments }}"""


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (CHATML, None),
        ("", None),
        (HERMES, "hermes"),
        (CODER, None),
        (GLM, None),
        (LLAMA, "llama3_json"),
        (LLAMA_ESCAPED, "llama3_json"),
        (LLAMA_PLAIN, None),
        (LLAMA + HERMES, "hermes"),
        (MISTRAL, "mistral"),
        (MISTRAL_ARGS, "mistral_args"),
    ],
)
def test_a_template_shows_its_format(template: str, name: str | None) -> None:
    found = detect_tool_format(template)
    assert (found and found.name) == name


def test_a_name_gives_its_format() -> None:
    assert {tool_format(name).name for name in TOOL_FORMATS} == set(TOOL_FORMATS)
    with pytest.raises(UsageError, match=r"'pythonic'; allowed: hermes, llama3_json, mistral"):
        tool_format("pythonic")


def test_markers_that_are_special_tokens() -> None:
    needing = {name for name, each in TOOL_FORMATS.items() if each.needs_special_tokens}
    assert needing == {"mistral", "mistral_args"}


def test_a_template_shows_reasoning() -> None:
    assert detect_reasoning(CHATML + "{{ '<think>\n\n</think>\n\n' }}")
    assert not detect_reasoning(HERMES)
