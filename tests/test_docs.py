"""The documents name only what exists."""

import fnmatch
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from trtllm_lite.exporter.certificate import Certificate, Gate, PromptParity, QualityRecord
from trtllm_lite.exporter.checks import Findings
from trtllm_lite.exporter.gates import exact_gates, quantized_gates
from trtllm_lite.exporter.quality.measure import Quality
from trtllm_lite.exporter.quality.phases import PhaseQuality
from trtllm_lite.exporter.quantize.formats import FORMATS
from trtllm_lite.runtime.manifest import Quantization
from trtllm_lite.tools.compare_peers.document import cells
from trtllm_lite.tools.compare_peers.page import (
    all_verdicts,
    page,
    read_notes,
    without_reason,
)

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PATH_CHECKED = ("docs/architecture.md", "README.md", "CONTRIBUTING.md")
SOURCE_SUFFIXES = (".py", ".md", ".toml", ".txt", ".sh")


def code_spans(text: str) -> list[str]:
    """What stands in single backticks, outside fenced blocks."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", prose)


def is_repo_path(span: str) -> bool:
    """True for a span that can only mean a file or folder of this repo.

    Dot folders are made by tools, except .ci; `<` and `*` mark patterns; a folder is written with
    its slash at the end.
    """
    if not re.fullmatch(r"[\w.-]+(/[\w.-]*)*", span) or re.match(r"\.(?!ci/)", span):
        return False
    first, slash, _ = span.partition("/")
    return span.endswith((*SOURCE_SUFFIXES, "/")) or bool(slash and (ROOT / first).is_dir())


def paths_named_in(text: str) -> list[str]:
    return [span for span in code_spans(text) if is_repo_path(span)]


@pytest.mark.parametrize("document", PATH_CHECKED)
def test_every_path_named_exists(document: str) -> None:
    named = paths_named_in((ROOT / document).read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_architecture_page_names_files_of_every_part() -> None:
    named = paths_named_in((ROOT / "docs" / "architecture.md").read_text())
    parts = {path.partition("/")[0] for path in named}
    assert {"exporter", "models", "runtime", "tools", "tests"} <= parts


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        ("runtime/engine.py", True),
        ("runtime/no_such_thing", True),
        ("no_such_folder/x.py", True),
        ("no_such_folder/", True),
        (".ci/run", True),
        ("constraints.txt", True),
        ("prefill.onnx", False),
        ("bundle.json", False),
        (".venv/bin/python", False),
        (".demo/", False),
        ("owner/model", False),
        ("make test", False),
        ("runtime/<name>.py", False),
    ],
)
def test_what_counts_as_a_path(span: str, expected: bool) -> None:
    assert is_repo_path(span) is expected


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_link_between_documents_resolves(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text())
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (document.parent / target).exists()] == []


@pytest.mark.parametrize("command", ["make demo", "make test"])
def test_the_readme_starts_people_off(command: str) -> None:
    assert command in (ROOT / "README.md").read_text()


MEASUREMENTS = ROOT / "docs/measurements"
PEERS = MEASUREMENTS / "peers-smollm2.json"
NOTES = MEASUREMENTS / "notes.toml"
COLUMNS = (
    *(("ttft_" + n, 1e3) for n in ("128", "512", "1024")),
    *((name, 1.0) for name in ("decode_128", "decode_1024", "total_4", "total_8", "total_16")),
)


def measured() -> dict[str, Any]:
    paths = sorted(MEASUREMENTS.glob("peers-*.json"))
    return {path.name: json.loads(path.read_text()) for path in paths}


def test_the_measured_table_is_the_committed_measurement() -> None:
    found = measured()[PEERS.name]
    readme, figures = (ROOT / "README.md").read_text(), cells(found)
    names = [contender["name"] for contender in found["contenders"] if contender["bits"] == 8]
    assert len(names) >= 4
    for name in names:
        medians = (f"{figures[metric][name]['median'] * scale:.0f}" for metric, scale in COLUMNS)
        quality = found["quality"][name]
        kl = quality.get("decode", quality["prefill"])["kl"]
        assert f"| {name} | {' | '.join(medians)} | {kl:.4f} |" in readme


def test_the_comparison_is_the_committed_measurement() -> None:
    assert (ROOT / "docs/comparison.md").read_text() == page(measured(), read_notes(NOTES))


def test_every_cell_under_its_bar_has_a_reason() -> None:
    assert without_reason(measured(), read_notes(NOTES)) == []


def test_every_reason_is_that_of_a_measured_cell() -> None:
    notes = read_notes(NOTES)
    cells = [(v.model, v.bits, v.bar.key) for v in all_verdicts(measured(), notes)]
    for (model, bits), reasons in notes.reasons.items():
        keys = [key for *section, key in cells if section == [model, bits]]
        assert [pattern for pattern, _ in reasons if not fnmatch.filter(keys, pattern)] == []


def test_the_bundle_page_names_every_field_of_the_certificate() -> None:
    page = (ROOT / "docs" / "bundle.md").read_text()
    _, _, section = page.partition("## The certificate")
    section, _, _ = section.partition("\n## ")
    for kind in (Certificate, Gate, PromptParity, QualityRecord):
        missing = [f.name for f in fields(kind) if f"`{f.name}`" not in section]
        assert [name for name in missing if f"`{name}[i]`" not in section] == []


def test_the_bundle_page_names_every_gate() -> None:
    parity = PromptParity("a", 1, 1, None, 0.0, 0.0)
    distances = {"logits": 0.0}
    findings = Findings([parity], logit_scale=1.0, agreed=1, compared=1, distances=distances)
    page = (ROOT / "docs" / "bundle.md").read_text()
    same = Quality(ppl=1.0, ref_ppl=1.0, kl=0.0, top1=1.0, num_tokens=1)
    quality = PhaseQuality(same, same)
    gates = list(exact_gates(findings))
    for name in FORMATS:
        gates += quantized_gates(findings, quality, Quantization(name, name))
    assert [gate.name for gate in gates if f"`{gate.name}`" not in page] == []


def test_the_bundle_page_names_every_weight_format_and_its_tensors() -> None:
    page = (ROOT / "docs" / "bundle.md").read_text()
    for name, kind in FORMATS.items():
        assert f"`{name}`" in page
        assert [part.suffix for part in kind.parts if f"`.{part.suffix}`" not in page] == []
