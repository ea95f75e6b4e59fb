"""All documents on one page, with the notes that people write."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.tools.compare_peers.__main__ import cli
from trtllm_lite.tools.compare_peers.page import (
    UNKNOWN,
    Notes,
    all_verdicts,
    page,
    read_notes,
    without_reason,
)

TITLES = {"small": "The small one", "large": "The large one"}


def document(model: str, bits: int = 8, **values: tuple[float, float]) -> dict[str, Any]:
    """A recorded document; each value is ours and the peer's."""
    names = (f"trtllm-lite int{bits}", f"peer int{bits}")
    samples = [
        {
            **{"contender": name, "values": {metric: value}, "kept": True, "round": 0},
            **{"others": 0.0, "steal": 0.0},
        }
        for metric, pair in values.items()
        for name, value in zip(names, pair, strict=True)
    ]
    return {
        "model": model,
        "machine": {"cpu": "Some CPU", "physical_cores": 2},
        "commit": "0123",
        "options": {"threads": 2, "gate": 0.1},
        "contenders": [
            {"name": name, "peer": name.split()[0], "bits": bits, "bytes": 1} for name in names
        ],
        "skipped": [],
        "errors": [],
        "samples": samples,
        "quality": {},
        "memory": {},
    }


def notes(reasons: dict[str, str] | None = None) -> Notes:
    return Notes(TITLES, {("small", 8): list((reasons or {}).items())})


def test_sections_are_in_the_notes_order_and_the_widest_first() -> None:
    documents = {
        "a.json": document("large", decode_128=(2, 1)),
        "b.json": document("small", 4, decode_128=(2, 1)),
        "c.json": document("small", decode_128=(2, 1)),
        "d.json": document("another", decode_128=(2, 1)),
    }
    heads = [line for line in page(documents, notes()).splitlines() if line.startswith("## ")]
    assert heads == [
        "## The small one, 8 bits",
        "## The small one, 4 bits",
        "## The large one, 8 bits",
        "## another, 8 bits",
        "## What is behind",
    ]


def test_two_documents_of_one_model_are_one_section() -> None:
    documents = {
        "b.json": document("small", ttft_128=(1, 2)),
        "a.json": document("small", decode_128=(2, 1)),
    }
    text = page(documents, notes())
    assert text.count("## The small one, 8 bits") == 1
    assert 0 < text.index("From `a.json`: Some CPU") < text.index("From `b.json`: Some CPU")


def test_one_cell_of_two_runs_is_refused() -> None:
    documents = {name: document("small", ttft_128=(1, 2)) for name in ("a.json", "b.json")}
    with pytest.raises(UsageError, match=r"ttft_128 is in a\.json and in b\.json"):
        page(documents, notes())


def test_one_metric_of_two_widths_is_no_cell_twice() -> None:
    documents = {
        "a.json": document("small", ttft_128=(1, 2)),
        "b.json": document("small", 4, ttft_128=(1, 2)),
    }
    assert "4 bits" in page(documents, notes())


def test_what_is_behind_is_told_with_its_reason() -> None:
    found = document(
        "small", decode_128=(1, 1), decode_1024=(2, 1), ttft_128=(1, 1), total_4=(1, 1)
    )
    why = {"decode_*": "Memory is slow.", "total_4": "Who knows.", "ttft_1*": "Memory is slow."}
    text = page({"a.json": found}, notes(why))
    behind = text.partition("## What is behind")[2]
    assert "1 of 4 cells reach their bar." in behind
    lines = [line for line in behind.splitlines() if line.startswith("- ")]
    assert len(lines) == 2
    assert lines[0].startswith("- Time to the first token, 128 tokens: 1000 ms, 1.00 times")
    assert "the bar is 1.10. Decoding one request after 128 tokens: 1.0 tokens/s" in lines[0]
    assert lines[0].endswith("the bar is 1.25. Memory is slow.")
    assert lines[1].endswith("the bar is 1.20. Who knows.")
    assert "1,024" not in "".join(lines)


def test_a_missing_reason_is_named() -> None:
    documents = {"a.json": document("small", decode_128=(1, 1), ttft_128=(1, 1))}
    known = notes({"decode_128": "Yes."})
    assert without_reason(documents, known) == ["behind.small.8: ttft_128"]
    assert page(documents, known).count(UNKNOWN) == 1
    assert len(all_verdicts(documents, known)) == 2


def test_notes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "notes.toml"
    path.write_text('[titles]\nm = "M"\n[behind.m.8]\n"decode_*" = """Two\nlines."""\n')
    assert read_notes(path) == Notes({"m": "M"}, {("m", 8): [("decode_*", "Two lines.")]})


@pytest.mark.parametrize(
    "text",
    ["x = 1", "titles = 3", "[titles]\nm = 3", "[behind.m.many]\na = 'b'", "[behind]\nm = 1", "["],
)
def test_what_is_no_file_of_notes_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match="is not a file of notes"):
        read_notes(path)


def test_the_command_writes_the_page_and_names_what_lacks_a_reason(tmp_path: Path) -> None:
    recorded, written = tmp_path / "a.json", tmp_path / "page.md"
    recorded.write_text(json.dumps(document("small", decode_128=(1, 1))))
    file = tmp_path / "notes.toml"
    file.write_text('[titles]\nsmall = "The small one"\n')
    arguments = ["report", str(recorded), "--notes", str(file), "--output", str(written)]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    assert result.stderr == "no reason: behind.small.8: decode_128\n"
    assert written.read_text().startswith("# Side by side\n")
    assert "## The small one, 8 bits" in written.read_text()
