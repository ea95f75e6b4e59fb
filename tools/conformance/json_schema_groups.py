"""The JSON-Schema-Test-Suite (https://github.com/json-schema-org/JSON-Schema-Test-Suite, MIT), as
the source archive of the jsonschema package holds it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_lite.tools.conformance.judge import ConformanceError
from trtllm_lite.tools.conformance.suites import Archive

ARCHIVE = Archive(
    package="jsonschema",
    version="4.26.0",
    sha256="0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326",
    folder="json",
)
DRAFTS = ("draft2020-12", "draft7")
_DIALECTS = {"draft7": "http://json-schema.org/draft-07/schema#"}


@dataclass(frozen=True)
class Instance:
    """A value and whether it fits the group's schema."""

    description: str
    value: Any
    valid: bool


@dataclass(frozen=True)
class Group:
    """A schema with instances. `name` is unique: file, description and dialect."""

    name: str
    draft: str
    schema: Any
    instances: tuple[Instance, ...]


def read_groups(folder: Path, draft: str) -> list[Group]:
    """All groups of a draft, the optional ones too. A schema of an older draft comes twice where it
    names no dialect: as it is, which is how people write them, and with its dialect named. Raises
    ConformanceError for a folder that holds none."""
    home = folder / "tests" / draft
    made = [group for path in sorted(home.rglob("*.json")) for group in _groups(path, home, draft)]
    if not made:
        raise ConformanceError(f"{folder} holds no tests/{draft}")
    return made


def _groups(path: Path, home: Path, draft: str) -> Iterator[Group]:
    place = path.relative_to(home).with_suffix("").as_posix()
    for entry in json.loads(path.read_text(encoding="utf-8")):
        instances = tuple(
            Instance(test["description"], test["data"], test["valid"]) for test in entry["tests"]
        )
        name, schema = f"{draft}/{place}: {entry['description']}", entry["schema"]
        yield Group(name, draft, schema, instances)
        if draft in _DIALECTS and isinstance(schema, dict) and "$schema" not in schema:
            dialect = {"$schema": _DIALECTS[draft], **schema}
            yield Group(f"{name} ($schema)", draft, dialect, instances)
