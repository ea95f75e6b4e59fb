"""`docs/conformance.md`: all recorded suites on one page."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trtllm_lite.tools.clients.document import section
from trtllm_lite.tools.compare_peers.report import table
from trtllm_lite.tools.conformance.document import CLIENTS, REQUESTS, SCHEMAS

INTRODUCTION = """# Conformance

Made by `python -m trtllm_lite.tools.conformance` from the JSON files `conformance-*.json` in
`docs/measurements/`; a test holds the two together. Suites of other projects run against
`trtllm-lite serve` with a real model, whose chat template is completed to take tools if it takes
none. They are fetched from their package archives, at a version and hash that
`tools/conformance/suites.py` names; nothing of them is in this repo.

What fails is named in `tools/conformance/expected/`, each test with its reason. A run fails when
another test fails, and also when one of these passes: the lists can only shrink. A test is left out
where its outcome says nothing, or is not the same twice."""
COLUMNS = ("passed", "failed", "left out", "skipped")
Found = Mapping[str, Any]


def page(documents: Sequence[Found], beside: Mapping[str, Any]) -> str:
    """The whole page. `beside`: what other programs have recorded, by the file's name."""
    parts = [INTRODUCTION, _summary(documents)]
    for found in documents:
        parts += _section(found)
    if SCHEMAS in beside:
        parts += _schemas(beside[SCHEMAS])
    if REQUESTS in beside:
        parts += _requests(beside[REQUESTS])
    if CLIENTS in beside:
        parts += section(beside[CLIENTS])
    return "\n\n".join(parts) + "\n"


def _summary(documents: Sequence[Found]) -> str:
    rows = [
        [found["title"], found["archive"] or "ours", *_counts(found["counts"])]
        for found in documents
    ]
    return table(["suite", "archive", *COLUMNS], rows)


def _counts(counts: Mapping[str, int]) -> list[str]:
    return [str(counts[name]) for name in COLUMNS]


def _section(found: Found) -> Iterator[str]:
    yield f"## {found['title']}"
    yield f"{found['about']} Model: {found['model']}."
    rows = [[f"`{name}`", *_counts(counts)] for name, counts in found["files"].items()]
    yield table(["file", *COLUMNS], rows)
    yield from _reasons("Why tests fail", found["failed"])
    yield from _reasons("Why tests are left out", found["left_out"])


def _reasons(title: str, reasons: Mapping[str, int]) -> Iterator[str]:
    if reasons:
        yield f"**{title}**"
        yield "\n".join(f"- {count}: {reason}" for reason, count in reasons.items())


def _schemas(found: Found) -> Iterator[str]:
    yield "## JSON-Schema-Test-Suite"
    yield (
        f"From {found['suite']}, with llguidance {found['llguidance']}, by `python -m "
        "trtllm_lite.tools.conformance.json_schema_suite`: every schema goes through the server as "
        "a `response_format`. One that is taken lets no invalid instance through; one that cannot "
        "be kept to is refused by name. An instance that is valid may not be writable, since "
        "llguidance fixes the order of an object's members and the blanks."
    )
    counts = ("valid_taken", "valid_not_written", "invalid_refused", "invalid_taken")
    rows = [
        [draft, *(str(each[name]) for name in ("schemas", "taken", "refused"))]
        + [str(each["instances_of_taken"][name]) for name in counts]
        for draft, each in found["drafts"].items()
    ]
    heads = [name.replace("_", " ") for name in ("schemas", "taken", "refused", *counts)]
    yield table(["draft", *heads], rows)


def _requests(found: Found) -> Iterator[str]:
    yield "## Requests made from the description"
    yield (
        f"By {found['suite']} (`python -m trtllm_lite.tools.conformance.schemathesis_run`), valid "
        f"and invalid ones, out of `/openapi.json`: {found['requests']} requests to "
        f"{found['operations']} operations, {found['failures']} failures, {found['errors']} errors."
    )
