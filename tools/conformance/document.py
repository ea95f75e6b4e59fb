"""What is recorded of a run: counts, and which tests fail or are left out for which reason."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trtllm_lite.runtime.manifest_io import read_manifest
from trtllm_lite.tools.conformance.expected import Expected
from trtllm_lite.tools.conformance.judge import Result, by_file, by_reason, counts
from trtllm_lite.tools.conformance.suites import SUITES, Suite

PATTERN = "conformance-{}.json"
SCHEMAS, REQUESTS, CLIENTS = "json-schema-suite.json", "schemathesis.json", "clients.json"


def document(
    suite: Suite, results: Sequence[Result], expected: Expected, bundle: Path
) -> dict[str, Any]:
    """A run that came out as expected. Raises BundleError."""
    manifest = read_manifest(bundle)
    archive = suite.archive
    return {
        "suite": suite.name,
        "title": suite.title,
        "about": suite.about,
        "archive": None if archive is None else f"{archive.package} {archive.version}",
        "model": f"{manifest.source.id}, {manifest.quantization.decode}",
        "counts": counts(results),
        "files": by_file(results),
        "failed": by_reason(results, expected, "failed"),
        "left_out": by_reason(results, expected, "left out"),
    }


def write_document(found: Mapping[str, Any], folder: Path) -> Path:
    """Into the folder of measurements, under the suite's name."""
    path = folder / PATTERN.format(found["suite"])
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return path


def read_documents(folder: Path) -> list[dict[str, Any]]:
    """All that are recorded, in the order of the suites."""
    paths = (folder / PATTERN.format(name) for name in SUITES)
    return [json.loads(path.read_text("utf-8")) for path in paths if path.exists()]


def read_beside(folder: Path) -> dict[str, Any]:
    """What `json_schema_suite`, `schemathesis_run` and `tools/clients` have recorded, by the
    file's name."""
    paths = [folder / name for name in (SCHEMAS, REQUESTS, CLIENTS) if (folder / name).exists()]
    return {path.name: json.loads(path.read_text("utf-8")) for path in paths}
