"""A copy of a bundle whose chat template takes tools as Hermes models have them, and the two
variables that suites set for models that reason, which change nothing.

The small models that packages carry have templates without tools, and what a template does not use
is refused. With tools, messages are rewritten into what the bundle's own template takes; without
them it renders what it always did.
"""

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from trtllm_lite.runtime.bundle_files import describe_file
from trtllm_lite.runtime.manifest import FORMAT_VERSION, MANIFEST_NAME
from trtllm_lite.runtime.manifest_io import read_manifest, write_manifest
from trtllm_lite.tools.conformance.judge import ConformanceError

PREFIX = """{%- set new = namespace(messages=[], text='') -%}
{%- set new.unused = [enable_thinking, reasoning_effort] -%}
{%- if tools -%}
{%- set new.messages = [{'role': 'system', 'content': 'You may call functions:\\n<tools>\\n'
    + tools | tojson + '\\n</tools>\\nA call is <tool_call>\\n{"name": ..., "arguments": {...}}\\n'
    + '</tool_call>'}] -%}
{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] == 'tool' -%}
{%- set new.text = '<tool_response>\\n' + message['content'] + '\\n</tool_response>' -%}
{%- set new.messages = new.messages + [{'role': 'user', 'content': new.text}] -%}
{%- elif message['tool_calls'] -%}
{%- set new.text = message['content'] or '' -%}
{%- for call in message['tool_calls'] -%}
{%- set new.text = new.text + '<tool_call>\\n' + call['function'] | tojson + '\\n</tool_call>' -%}
{%- endfor -%}
{%- set new.messages = new.messages + [{'role': 'assistant', 'content': new.text}] -%}
{%- else -%}
{%- set new.messages = new.messages + [message] -%}
{%- endif -%}
{%- endfor -%}
{%- set messages = new.messages -%}
"""


def with_tools(bundle: Path, folder: Path, tell: Callable[[str], None]) -> Path:
    """The bundle itself if its template knows tools, else a copy in `folder`, made once. Raises
    ConformanceError for a bundle without a template, BundleError."""
    manifest = read_manifest(bundle)
    if manifest.chat_template is None:
        raise ConformanceError(f"{bundle} has no chat template; take a bundle of a chat model")
    template = (bundle / manifest.chat_template).read_text(encoding="utf-8")
    if "tools" in template:
        return bundle
    digest = hashlib.sha256((bundle / MANIFEST_NAME).read_bytes() + PREFIX.encode()).hexdigest()
    target = folder / f"{bundle.resolve().name}-tools-{digest[:8]}"
    if not target.is_dir():
        tell(f"copying {bundle} to {target}, with a chat template that takes tools")
        work = folder / f"{target.name}.work"
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(bundle, work, ignore=shutil.ignore_patterns(".*"))
        _replace(work, manifest.chat_template, (PREFIX + template).encode())
        work.rename(target)
    return target


def _replace(bundle: Path, name: str, data: bytes) -> None:
    """Give one file of a bundle other content, in the manifest too."""
    manifest = read_manifest(bundle)
    (bundle / name).write_bytes(data)
    entry = describe_file(bundle, name)
    files = tuple(entry if each.path == name else each for each in manifest.files)
    write_manifest(bundle, replace(manifest, files=files, format_version=FORMAT_VERSION))
