"""`docs/comparison.md`: all recorded documents on one page, and what is behind its bar."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.tools.compare_peers.bars import Verdict, verdicts
from trtllm_lite.tools.compare_peers.document import medians
from trtllm_lite.tools.compare_peers.report import tables, widths

INTRODUCTION = """# Side by side

Made by `python -m trtllm_lite.tools.compare_peers report` from the JSON files in
`docs/measurements/` that each section names; a test holds the two together.
`tools/compare_peers/README.md` says what is compared, and how."""
BEHIND = """The bars: in 8 bits 1.25 times the best peer for decoding one request, 1.1 for the time
to the first token, 1.2 for many requests, and 1.15 times llama.cpp's memory (1.6 with a format for
each phase); in 4 bits 1.2 times the fastest peer for decoding. In both a loss no greater than the
best peer's, growth with the prompt no steeper than that of the peer that is fastest there, a first
token 0.6 s after the process starts, and, where no cache holds the weights, 80% of the rate of
memory. Judged are bundles that run with default settings."""
UNKNOWN = "Why: not found yet."

# File name, then the document in it.
Documents = Mapping[str, Mapping[str, Any]]
Section = tuple[str, int]


@dataclass(frozen=True)
class Notes:
    """What people write. `titles`: models by folder name, in the page's order. `reasons`: of one
    model and width, (pattern of cell keys, why those cells are behind)."""

    titles: Mapping[str, str]
    reasons: Mapping[Section, Sequence[tuple[str, str]]]

    def reason(self, verdict: Verdict) -> str | None:
        """The first whose pattern is that of the cell."""
        known = self.reasons.get((verdict.model, verdict.bits), ())
        return next((why for pattern, why in known if fnmatch(verdict.bar.key, pattern)), None)


def read_notes(path: Path) -> Notes:
    """A TOML file: [titles] with MODEL = "...", and [behind.MODEL.BITS] with KEY = "...", where a
    key may be a pattern of fnmatch(3). Raises UsageError for anything else."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
        titles, behind = found.pop("titles", {}), found.pop("behind", {})
        if found:
            raise ValueError(f"got {', '.join(found)}; allowed: titles, behind")
        reasons = {
            (model, int(bits)): [(key, _line(why)) for key, why in cells.items()]
            for model, rows in behind.items()
            for bits, cells in rows.items()
        }
        return Notes({model: _line(title) for model, title in titles.items()}, reasons)
    except (ValueError, AttributeError) as error:
        raise UsageError(f"{path} is not a file of notes: {error}") from error


def _line(text: object) -> str:
    if not isinstance(text, str):
        raise ValueError(f"got {text!r}; allowed: a text")
    return " ".join(text.split())


def page(documents: Documents, notes: Notes) -> str:
    """The whole page. Raises UsageError for a metric of one model and width in two documents."""
    sections = _sections(documents, notes)
    parts = [INTRODUCTION]
    for (model, bits), names in sections.items():
        _refuse_twice(documents, names, bits)
        parts.append(f"## {title(notes, model, bits)}")
        parts += [f"From `{name}`: {tables(documents[name], bits).strip()}" for name in names]
    judged = all_verdicts(documents, notes)
    behind = [verdict for verdict in judged if verdict.behind]
    met = f"{len(judged) - len(behind)} of {len(judged)} cells reach their bar."
    parts += ["## What is behind", BEHIND, met, *_behind(behind, notes)]
    return "\n\n".join(parts) + "\n"


def title(notes: Notes, model: str, bits: int) -> str:
    return f"{notes.titles.get(model, model)}, {bits} bits"


def all_verdicts(documents: Documents, notes: Notes) -> list[Verdict]:
    """Of every cell that has a bar, in the order of the page."""
    return [
        verdict
        for (_, bits), names in _sections(documents, notes).items()
        for name in names
        for verdict in verdicts(documents[name], bits)
    ]


def without_reason(documents: Documents, notes: Notes) -> list[str]:
    """Keys of cells that are behind and of which the notes do not say why."""
    return [
        f"behind.{verdict.model}.{verdict.bits}: {verdict.bar.key}"
        for verdict in all_verdicts(documents, notes)
        if verdict.behind and notes.reason(verdict) is None
    ]


def _sections(documents: Documents, notes: Notes) -> dict[Section, list[str]]:
    """Names of the documents of each model and width: models as the notes have them, then others;
    the widest first."""
    order = [*notes.titles, *sorted(found["model"] for found in documents.values())]
    sections: dict[Section, list[str]] = {}
    for name in sorted(documents):
        for bits in widths(documents[name]):
            sections.setdefault((documents[name]["model"], bits), []).append(name)
    keys = sorted(sections, key=lambda key: (order.index(key[0]), -key[1]))
    return {key: sections[key] for key in keys}


def _refuse_twice(documents: Documents, names: Sequence[str], bits: int) -> None:
    """Figures of one cell from two runs cannot both be right."""
    seen: dict[str, str] = {}
    for name in names:
        ours = {c["name"] for c in documents[name]["contenders"] if c["bits"] == bits}
        for metric, rows in medians(documents[name]).items():
            if ours.isdisjoint(rows):
                continue
            if metric in seen and metric not in ("memory_share", "rss"):
                raise UsageError(f"{metric} is in {seen[metric]} and in {name}; give one of them")
            seen[metric] = name


def _behind(verdicts: Sequence[Verdict], notes: Notes) -> Iterator[str]:
    """A list for each model and width; cells with one reason are one entry."""
    groups: dict[Section, dict[str, list[str]]] = {}
    for verdict in verdicts:
        reasons = groups.setdefault((verdict.model, verdict.bits), {})
        why = notes.reason(verdict) or UNKNOWN
        reasons.setdefault(why, []).append(verdict.text())
    for section, reasons in groups.items():
        yield f"**{title(notes, *section)}**"
        yield "\n".join(
            f"- {'. '.join(map(_sentence, texts))}. {why}" for why, texts in reasons.items()
        )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
