"""bundle.json: Manifest to strict JSON and back.

The dataclasses of `manifest.py` are the format: every object has the fields of its dataclass, by
name (`manifest_decode.py`). What the values mean is checked by `manifest_check.py`.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trtllm_lite.runtime import strict_json
from trtllm_lite.runtime.bundle_files import open_folder, read_small
from trtllm_lite.runtime.errors import BundleError
from trtllm_lite.runtime.manifest import FORMAT, FORMAT_VERSION, MANIFEST_NAME, Manifest
from trtllm_lite.runtime.manifest_check import check_manifest
from trtllm_lite.runtime.manifest_decode import decode
from trtllm_lite.runtime.strict_json import shown

MAX_MANIFEST_BYTES = 8 * 2**20
_LINE_CHARS = 160
_VERSION = re.compile(r"(0|[1-9][0-9]{0,3})\.(0|[1-9][0-9]{0,3})")


def read_manifest(folder: Path) -> Manifest:
    """The checked manifest of the bundle in `folder`; its files are not looked at.

    Raises BundleError naming the field. A folder without bundle.json is told apart from a
    checkpoint, which has to be exported first.
    """
    with open_folder(folder) as root:
        try:
            os.stat(MANIFEST_NAME, dir_fd=root, follow_symlinks=False)
        except FileNotFoundError:
            raise BundleError("bundle", _not_a_bundle(folder, root)) from None
        return parse_manifest(read_small(root, MANIFEST_NAME, MANIFEST_NAME, MAX_MANIFEST_BYTES))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write bundle.json into `folder`, replacing an older one at once.

    Raises BundleError for a manifest that `read_manifest` would refuse or read differently,
    OSError when the disk does.
    """
    data = render_manifest(manifest)
    if manifest.format_version != FORMAT_VERSION:
        said = shown(manifest.format_version)
        raise BundleError("format_version", f"{said} cannot be written, only {FORMAT_VERSION}")
    if parse_manifest(data) != manifest:
        raise BundleError(MANIFEST_NAME, "the manifest would be read back differently")
    _replace(folder / MANIFEST_NAME, data)


def parse_manifest(data: bytes) -> Manifest:
    """The checked manifest in the bytes of a bundle.json. Raises BundleError naming the field."""
    if len(data) > MAX_MANIFEST_BYTES:
        text = f"{len(data)} bytes; at most {MAX_MANIFEST_BYTES} are read"
        raise BundleError(MANIFEST_NAME, text)
    try:
        document = strict_json.parse(data)
    except ValueError as error:
        raise BundleError(MANIFEST_NAME, str(error)) from None
    if not isinstance(document, dict):
        raise BundleError(MANIFEST_NAME, "must be a JSON object")
    manifest = decode(Manifest, document, strict=_same_minor(document))
    check_manifest(manifest)
    return manifest


def render_manifest(manifest: Manifest) -> bytes:
    """The bytes of bundle.json: pure ASCII, every field written, short values on one line."""
    document = asdict(manifest)
    first = {name: document.pop(name) for name in ("format", "format_version")}
    return (_render(first | document, 0) + "\n").encode("ascii")


def _not_a_bundle(folder: Path, root: int) -> str:
    name = shown(str(folder), 200)
    if "config.json" in os.listdir(root):
        return (
            f"{name} is a checkpoint, not a bundle: "
            f"run `trtllm-lite export {name} --output DIR` first and use DIR"
        )
    return (
        f"{name} is not a bundle, it has no {MANIFEST_NAME}; "
        "make one with `trtllm-lite export MODEL --output DIR`"
    )


def _same_minor(document: Mapping[str, object]) -> bool:
    """Whether unknown fields are errors: False for a newer minor version of our major."""
    kind, said = document.get("format"), document.get("format_version")
    if kind != FORMAT:
        raise BundleError("format", f"{shown(kind)} is not {FORMAT!r}: not a trtllm-lite bundle")
    match = _VERSION.fullmatch(said) if isinstance(said, str) else None
    if match is None:
        raise BundleError("format_version", f"{shown(said)} must be a string like '1.0'")
    major, minor = (int(x) for x in FORMAT_VERSION.split("."))
    if int(match[1]) != major:
        raise BundleError(
            "format_version",
            f"the bundle has version {said}, this trtllm-lite reads {major}.x "
            f"({FORMAT_VERSION}); use a matching trtllm-lite or export again",
        )
    return int(match[2]) <= minor


def _render(value: Any, indent: int) -> str:
    flat = json.dumps(value)
    if len(flat) + indent <= _LINE_CHARS or not value or not isinstance(value, dict | list | tuple):
        return flat
    pad = " " * (indent + 1)
    if isinstance(value, dict):
        lines = [f"{json.dumps(k)}: {_render(v, indent + 1)}" for k, v in value.items()]
        brackets = "{}"
    else:
        lines, brackets = [_render(v, indent + 1) for v in value], "[]"
    inner = ",\n".join(pad + line for line in lines)
    return f"{brackets[0]}\n{inner}\n{pad[1:]}{brackets[1]}"


def _replace(path: Path, data: bytes) -> None:
    new = path.with_name(path.name + ".tmp")
    new.unlink(missing_ok=True)
    try:
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
