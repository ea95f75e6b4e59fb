"""The recorded comparison as Markdown. Every figure comes from the document."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trtllm_lite.tools.compare_peers.document import (
    advantage,
    best_peer,
    cells,
    dropped,
    median_noise,
)

# Title, and its columns: metric, heading, scale, digits.
Column = tuple[str, str, float, int]
TABLES: tuple[tuple[str, tuple[Column, ...]], ...] = (
    (
        "Time to the first token, ms, one request",
        tuple((f"ttft_{n}", f"{n} tokens", 1e3, 0) for n in (128, 512, 1024)),
    ),
    (
        "Decode, tokens/s, one request",
        tuple((f"decode_{n}", f"after {n} tokens", 1.0, 1) for n in (128, 1024)),
    ),
    (
        "New tokens/s over all requests (128 prompt tokens, 64 new, prefill included)",
        tuple((f"total_{n}", f"{n} requests", 1.0, 0) for n in (4, 8, 16)),
    ),
    (
        "Start, seconds, files in the page cache",
        (("load", "load", 1.0, 2), ("first_token", "process start to first token", 1.0, 2)),
    ),
)
MIB = 2**20
NONE = "-"


def markdown(found: Mapping[str, Any]) -> str:
    """A whole section: how it was measured, then the tables."""
    parts = [f"### {found['model']}", "\n".join(_notes(found))]
    known = cells(found)
    for title, columns in TABLES:
        shown = [column for column in columns if column[0] in known]
        if shown:
            parts += [f"**{title}**", _speed_table(found, known, shown)]
    parts += ["**Memory, size, quality**", _other_table(found)]
    return "\n\n".join(parts) + "\n"


def _notes(found: Mapping[str, Any]) -> Iterable[str]:
    box, options = found["machine"], found["options"]
    lost, taken = dropped(found)
    others, steal = median_noise(found["samples"])
    yield (
        f"{box['cpu']}, {box['physical_cores']} cores, {options['threads']} threads, commit "
        f"`{str(found['commit'])[:12]}`, {options['rounds']} rounds in which the contenders "
        "alternate. Cells: median (min to max); then how many times better than the best peer of "
        "the same width it is."
    )
    yield (
        f"{lost} of {taken} turns were dropped: others used over {options['gate']:.0%} of the CPUs "
        f"(median over all turns {others:.1%}, stolen {steal:.1%})."
    )
    yield from (f"{line}." for line in found["skipped"])
    yield from (f"{e['contender']} failed: {e['error']}." for e in found["errors"])


def _speed_table(
    found: Mapping[str, Any], known: Mapping[str, Any], columns: Sequence[Column]
) -> str:
    rows = [
        [c["name"], *(_cell(found, known, c, column) for column in columns)]
        for c in found["contenders"]
    ]
    return table(["", *(column[1] for column in columns)], rows)


def _cell(
    found: Mapping[str, Any],
    known: Mapping[str, Any],
    contender: Mapping[str, Any],
    column: Column,
) -> str:
    metric, _, scale, digits = column
    figures = known[metric].get(contender["name"])
    if figures is None:
        return NONE
    middle, low, high = (f"{figures[k] * scale:.{digits}f}" for k in ("median", "min", "max"))
    text = f"{middle} ({low} to {high})"
    best = best_peer(found, metric, contender["bits"])
    if best is None:
        return text
    text += f" x{advantage(metric, figures['median'], best[1]):.2f}"
    return f"**{text}**" if figures["median"] == best[1] else text


def _other_table(found: Mapping[str, Any]) -> str:
    head = ["", "RSS MiB, one request", "16 at once", "peak", "on disk MiB"]
    head += ["perplexity", "against float32", "same top-1", "KL"]
    rows = []
    for contender in found["contenders"]:
        name = contender["name"]
        row = [name, *_memory(found["memory"].get(name, {})), f"{contender['bytes'] / MIB:.0f}"]
        quality = found["quality"].get(name, {})
        if not quality:
            rows.append([*row, NONE, NONE, NONE, NONE])
        for path, figures in quality.items():
            label = f"{name}, {path}" if len(quality) > 1 else name
            rows.append([label, *row[1:], *_quality(figures)])
    return table(head, rows)


def _memory(found: Mapping[str, Any]) -> list[str]:
    one, many = found.get("one", {}), found.get("many", {})
    peak = max(one.get("peak_rss", 0), many.get("peak_rss", 0))
    values = (one.get("rss", 0), many.get("rss", 0), peak)
    return [f"{value / MIB:.0f}" if value else NONE for value in values]


def _quality(found: Mapping[str, Any]) -> list[str]:
    loss = found["perplexity"] / found["reference_perplexity"] - 1
    figures = (f"{found['perplexity']:.3f}", f"{loss:+.2%}")
    return [*figures, f"{found['top1']:.3f}", f"{found['kl']:.4f}"]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose first column is text."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))
