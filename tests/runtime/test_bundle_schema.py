"""bundle.schema.json, docs/bundle.md and the reader say the same about bundle.json."""

import json
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from jsonschema import Draft202012Validator
from jsonschema.protocols import Validator

from trtllm_lite.runtime import bundle
from trtllm_lite.runtime.errors import BundleError
from trtllm_lite.runtime.manifest import Manifest, Phase, Role
from trtllm_lite.runtime.manifest_io import parse_manifest, render_manifest

ROOT = Path(__file__).resolve().parents[2]
Path_ = tuple[str | int, ...]


def schema() -> dict[str, Any]:
    text = Path(bundle.__file__).with_name("bundle.schema.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


@pytest.fixture(scope="module")
def validator() -> Validator:
    Draft202012Validator.check_schema(schema())
    return Draft202012Validator(schema())


def dataclasses_of(hint: Any) -> Iterator[Any]:
    """The dataclass and every one inside it."""
    if is_dataclass(hint):
        yield hint
        for inner in get_type_hints(hint).values():
            yield from dataclasses_of(inner)
    for inner in get_args(hint):
        yield from dataclasses_of(inner)


KINDS = {kind.__name__: kind for kind in dataclasses_of(Manifest)}


def test_every_dataclass_is_known() -> None:
    assert set(KINDS) == {
        "Manifest",
        "ModelFacts",
        "Source",
        "Quantization",
        "Limits",
        "KVSpec",
        "KVLayer",
        "GraphSpec",
        "TensorSpec",
        "FileEntry",
    }


@pytest.mark.parametrize("name", KINDS)
def test_the_schema_has_the_fields_of_the_dataclass(name: str) -> None:
    definition = schema()["$defs"][name]
    members = fields(KINDS[name])
    assert set(definition["properties"]) == {f.name for f in members}
    assert definition["additionalProperties"] is False
    needed = {f.name for f in members if f.default is MISSING and f.default_factory is MISSING}
    if name == "Manifest":
        needed |= {"format", "format_version"}
    assert set(definition.get("required", ())) == needed


def test_the_schema_has_the_roles_and_phases() -> None:
    definitions = schema()["$defs"]
    assert definitions["TensorSpec"]["properties"]["role"]["enum"] == list(get_args(Role))
    assert definitions["GraphSpec"]["properties"]["phase"]["enum"] == list(get_args(Phase))


def leaves(value: Any, at: Path_ = ()) -> Iterator[Path_]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*at, key)
        if isinstance(inner, dict | list):
            yield from leaves(inner, (*at, key))


def mutants(manifest: Manifest) -> Iterator[tuple[Path_, str, dict[str, Any]]]:
    """The document with one value replaced, taken out or added."""
    text = render_manifest(manifest)
    for path in leaves(json.loads(text)):
        # The second of two like parts teaches nothing that the first does not.
        if 1 in path[:3] or (path[0] == "files" and path[1:2] > (1,)):
            continue
        for kind, value in VALUES.items():
            document = json.loads(text)
            holder: Any = document
            for key in path[:-1]:
                holder = holder[key]
            if kind == "missing":
                del holder[path[-1]]
            elif kind == "added":
                if not isinstance(holder, dict) or path[0] == "producer":
                    continue
                holder["an_unknown_field"] = 1
            else:
                holder[path[-1]] = value
            yield path, kind, document


VALUES: dict[str, object] = {
    "missing": None,
    "added": None,
    "null": None,
    "true": True,
    "fraction": 1.5,
    "negative": -1,
    "zero": 0,
    "one": 1,
    "huge": 2**53 + 1,
    "empty text": "",
    "text": "unlikely",
    "path": "../unlikely.onnx",
    "list": [],
    "object": {},
    "batch": ["batch"],
}


def accepted(document: dict[str, Any]) -> bool:
    try:
        parse_manifest(json.dumps(document).encode())
    except BundleError:
        return False
    return True


def is_one_value_wrong(path: Path_, kind: str) -> bool:
    """Whether a refusal of the mutant is about one value, so that the schema must see it too;
    it cannot see what depends on several values, nor that a source id is a path."""
    structural = ("added", "true", "fraction", "negative", "huge", "object", "path")
    return kind in structural and path[0] != "producer" and path != ("source", "id")


def test_the_schema_and_the_reader_agree(plain_manifest: Manifest, validator: Validator) -> None:
    good = bad = 0
    for path, kind, document in mutants(plain_manifest):
        if accepted(document):
            good += 1
            assert validator.is_valid(document), (path, kind)
        elif is_one_value_wrong(path, kind):
            bad += 1
            assert not validator.is_valid(document), (path, kind)
    assert good > 20
    assert bad > 300


# docs/bundle.md


def documented() -> dict[str, set[str]]:
    """Heading of a section -> the names in the first column of its tables."""
    found: dict[str, set[str]] = {}
    section = ""
    for line in (ROOT / "docs" / "bundle.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            section = line.lstrip("# ")
        elif match := re.match(r"\| `([a-z0-9_]+)` \|", line):
            found.setdefault(section, set()).add(match[1])
    return found


HEADINGS = {
    "Manifest": "The manifest",
    "ModelFacts": "`model`",
    "Source": "`source`",
    "Quantization": "`quantization`",
    "Limits": "`limits`",
    "KVSpec": "`kv`",
    "KVLayer": "`kv.layers[i]`",
    "GraphSpec": "`graphs[i]`",
    "TensorSpec": "`graphs[i].inputs[j]`, `graphs[i].outputs[j]`",
    "FileEntry": "`files[i]`",
}


@pytest.mark.parametrize("name", KINDS)
def test_every_field_is_documented(name: str) -> None:
    assert documented()[HEADINGS[name]] == {f.name for f in fields(KINDS[name])}


def test_every_role_is_documented() -> None:
    assert documented()["Roles"] == set(get_args(Role))


def test_the_example_in_the_docs_is_valid(validator: Validator) -> None:
    text = (ROOT / "docs" / "bundle.md").read_text(encoding="utf-8")
    examples = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    assert examples
    for example in examples:
        assert validator.is_valid(json.loads(example))
        parse_manifest(example.encode())
