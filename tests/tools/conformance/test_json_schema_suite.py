"""The JSON schema suite's runner, on a suite of our own: it has to see what is wrong."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trtllm_lite.tools.conformance import json_schema_check
from trtllm_lite.tools.conformance.json_schema_check import Finding, spellings
from trtllm_lite.tools.conformance.json_schema_groups import Group, read_groups
from trtllm_lite.tools.conformance.json_schema_suite import check_all, reason, summary
from trtllm_lite.tools.conformance.judge import ConformanceError
from trtllm_lite.tools.conformance.toy import toy_server

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with toy_server() as found:
        yield found


def group(schema: Any, *instances: tuple[Any, bool]) -> dict[str, Any]:
    tests = [{"description": str(data), "data": data, "valid": valid} for data, valid in instances]
    return {"description": "of ours", "schema": schema, "tests": tests}


def suite(folder: Path, draft: str, *groups: dict[str, Any]) -> list[Group]:
    home = folder / "tests" / draft / "optional"
    home.mkdir(parents=True)
    (home / "a.json").write_text(json.dumps(groups), encoding="utf-8")
    return read_groups(folder, draft)


def check(url: str, groups: list[Group]) -> list[Finding]:
    return check_all(groups, url)


def test_a_sound_schema_is_taken_and_an_unsupported_one_refused(url: str, tmp_path: Path) -> None:
    groups = suite(
        tmp_path,
        "draft2020-12",
        group({"type": "integer", "maximum": 5}, (3, True), (6, False), ("3", False)),
        group({"type": "string"}, ("é\n", True)),
        group({"not": {}}, (1, False)),
        group(True, (1, True)),
    )
    findings = check(url, groups)
    assert [each.wrong for each in findings] == [[]] * 4
    assert [each.refusal is None for each in findings] == [True, True, False, False]
    assert "not" in str(findings[2].refusal)
    assert (findings[0].taken, findings[0].refused) == (["3"], 2)
    assert findings[1].taken == ["é\n"]
    made = summary(findings)
    assert (made["schemas"], made["taken"], made["refused"], made["wrong"]) == (4, 2, 2, 0)
    assert made["texts_validated"] >= 3
    assert sum(made["refused_because"].values()) == 2


def test_an_invalid_instance_that_is_taken_is_wrong(url: str, tmp_path: Path) -> None:
    (found,) = check(url, suite(tmp_path, "draft2020-12", group({"type": "null"}, (None, False))))
    assert found.wrong == ["takes what is invalid: None"]
    assert summary([found])["instances_of_taken"]["invalid_taken"] == 1


def test_a_valid_instance_that_is_not_written_is_told(url: str, tmp_path: Path) -> None:
    (found,) = check(url, suite(tmp_path, "draft2020-12", group({"type": "null"}, (1, True))))
    assert (found.narrow, found.wrong) == (["1"], [])


def test_an_answer_that_does_not_fit_is_wrong(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = suite(tmp_path, "draft2020-12", group({"const": 5}))

    monkeypatch.setattr(json_schema_check, "_VALIDATORS", {"draft2020-12": Never})
    (found,) = check(url, groups)
    assert found.judged == 4
    assert found.wrong == ["writes what is invalid: '5'"] * 4


class Never:
    """A validator that nothing pleases."""

    FORMAT_CHECKER = None

    def __init__(self, schema: Any, **_: Any) -> None:
        pass

    def is_valid(self, value: Any) -> bool:
        return False


def test_an_older_draft_comes_with_and_without_its_name(tmp_path: Path) -> None:
    named = {"$schema": "http://json-schema.org/draft-07/schema#"}
    groups = suite(tmp_path, "draft7", group({"type": "null"}), group(True), group(named))
    assert [each.schema for each in groups] == [
        {"type": "null"},
        {**named, "type": "null"},
        True,
        named,
    ]
    assert groups[0].name == "draft7/optional/a: of ours"


def test_a_folder_without_the_suite_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConformanceError, match="draft7"):
        read_groups(tmp_path, "draft7")


def test_the_guide_tells_what_was_recorded() -> None:
    found = json.loads((DOCS / "measurements" / "json-schema-suite.json").read_text())
    drafts = list(found["drafts"].values())
    assert [draft["wrong"] for draft in drafts] == [0, 0]
    invalid = sum(draft["instances_of_taken"]["invalid_refused"] for draft in drafts)
    taken, refused, texts = (
        sum(draft[name] for draft in drafts) for name in ("taken", "refused", "texts_validated")
    )
    guide = " ".join((DOCS / "serving.md").read_text().split())
    assert f"{taken} are taken and {refused} refused" in guide
    assert f"of {invalid:,} invalid instances" in guide
    assert f"all {texts:,} texts" in guide


def test_reasons_are_those_of_keywords() -> None:
    cannot = "response_format: the json_schema cannot be used: "
    assert reason(f'{cannot}Unimplemented keys: ["not", "if"]') == (
        "keywords not supported: not, if"
    )
    assert reason(f'{cannot}Invalid type: "hiccup" at 5') == "Invalid type: * at *"


def test_a_value_is_spelled_in_several_ways() -> None:
    assert set(spellings({"a": ["é", 1]})) == {
        '{"a":["é",1]}',
        '{"a": ["é", 1]}',
        '{"a":["\\u00e9",1]}',
        '{"a": ["\\u00e9", 1]}',
        '{"\\u0061":["\\u00e9",1]}',
    }
