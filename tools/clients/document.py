"""The recorded run: a JSON document, and the table that is made of it."""

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trtllm_lite
from trtllm_lite.runtime.manifest_io import read_manifest
from trtllm_lite.tools.clients.runner import Check, Row


def document(rows: Sequence[Row], bundle: Path) -> dict[str, Any]:
    """All that a run found. Raises BundleError."""
    manifest = read_manifest(bundle)
    return {
        "server": trtllm_lite.__version__,
        "python": platform.python_version(),
        "model": manifest.source.id,
        "weights": manifest.quantization.decode,
        "clients": [row.document() for row in rows],
    }


def server_row(code: int | None, log: str, seconds: float) -> Row:
    """The server's own end of the run: it stopped when it was told to, and no request of all the
    clients made it fail."""
    faults = [
        line for line in log.splitlines() if "a request failed" in line or "Traceback" in line
    ]
    ended = None if code == 0 else f"exit code {code}"
    fault = faults[0][:300] if faults else None
    checks = (Check("ends with code 0", 0.0, ended), Check("logs no fault", 0.0, fault))
    return Row("server", "the server itself", trtllm_lite.__version__, round(seconds, 1), checks)


def section(found: dict[str, Any]) -> list[str]:
    """The recorded run as paragraphs of `docs/conformance.md`."""
    return [
        "## Clients",
        "Real client libraries, each in an environment of its own with every version pinned and "
        "proxies that lead nowhere, against one live server (`make clients`; what a check compares "
        f"with: `tools/clients/README.md`). Model: {found['model']}, {found['weights']}, with a "
        "chat template that knows tools. The accuracies of lm-eval are those computed "
        "in process, its log-likelihoods too; k6 holds 64 streams, and accepted = finished + "
        "aborted afterwards.",
        markdown(found).rstrip(),
    ]


def markdown(found: dict[str, Any]) -> str:
    """One line a client."""
    lines = [
        "| client | version | checks | passed | not passed |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in found["clients"]:
        checks = row["checks"]
        failed = [check["check"] for check in checks if check["error"] is not None]
        told = row["skipped"] or ", ".join(failed)
        passed = len(checks) - len(failed)
        lines.append(f"| {row['title']} | {row['version']} | {len(checks)} | {passed} | {told} |")
    return "\n".join(lines) + "\n"
