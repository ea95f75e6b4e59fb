"""The recorded comparison as Markdown. Every figure comes from the document."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from trtllm_lite.tools.compare_peers.document import (
    advantage,
    best_peer,
    cells,
    dropped,
    median_noise,
    medians,
    memory_rate,
    rounds,
)
from trtllm_lite.tools.compare_peers.turns import LONG_BASE, LONG_LENGTHS, PARTS

# Title, and its columns: metric, heading, scale, digits.
Column = tuple[str, str, float, int]
LENGTHS = (LONG_BASE, *LONG_LENGTHS)
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
        "Long prompts: time to the first token, s",
        tuple((f"long_ttft_{n}", f"{n} tokens", 1.0, 2) for n in LENGTHS),
    ),
    (
        "Long prompts: decode, tokens/s",
        tuple((f"long_decode_{n}", f"after {n} tokens", 1.0, 1) for n in LENGTHS),
    ),
    (
        "Start, seconds, files in the page cache",
        (("load", "load", 1.0, 2), ("first_token", "process start to first token", 1.0, 2)),
    ),
)
PART_HEADS = {"one": "RSS MiB, one request", "many": "16 at once", "long": "after long prompts"}
MIB = 2**20
NONE = "-"
Found = Mapping[str, Any]


def markdown(found: Found) -> str:
    """One document: a section for each width, then how it was measured and the tables."""
    return "\n\n".join(
        f"### {found['model']}, {bits} bits\n\n{tables(found, bits)}" for bits in widths(found)
    )


def widths(found: Found) -> list[int]:
    """Classes of contenders that were measured, the widest first."""
    return sorted({c["bits"] for c in found["contenders"]}, reverse=True)


def tables(found: Found, bits: int) -> str:
    """How it was measured, then the tables of one width. Ends with a line break."""
    chosen = [c for c in found["contenders"] if c["bits"] == bits]
    parts = ["\n".join(_notes(found, chosen))]
    known, taken = cells(found), _metrics(found, chosen)
    for title, columns in TABLES:
        shown = [column for column in columns if column[0] in taken]
        if shown:
            parts += [f"**{title}**", _speed_table(found, chosen, known, shown)]
    parts += _growth_table(found, chosen)
    parts += _rate_table(found, chosen)
    parts += ["**Memory, size, quality**", _other_table(found, chosen)]
    return "\n\n".join(parts) + "\n"


def _metrics(found: Found, chosen: Sequence[Found]) -> set[str]:
    """Those that were taken, even if no turn was quiet."""
    names = {c["name"] for c in chosen}
    return {key for s in found["samples"] if s["contender"] in names for key in s["values"]}


def _notes(found: Found, chosen: Sequence[Found]) -> Iterator[str]:
    box, options = found["machine"], found["options"]
    lost, taken = dropped(found)
    others, steal = median_noise(found["samples"])
    count = rounds(found)
    alternate = "1 round" if count == 1 else f"{count} rounds"
    yield (
        f"{box['cpu']}, {box['physical_cores']} cores, {options['threads']} threads, commit "
        f"`{str(found['commit'])[:12]}`, {alternate} in which the contenders alternate. Cells: "
        "median (min to max); then how many times better it is than the best peer of the width."
    )
    yield (
        f"{lost} of {taken} turns were dropped: others used over {options['gate']:.0%} of the CPUs "
        f"(median over all turns {others:.1%}, stolen {steal:.1%})."
    )
    names = [c["name"] for c in chosen]
    yield from (f"{line}." for line in found["skipped"])
    yield from (
        f"{e['contender']} failed: {e['error']}."
        for e in found["errors"]
        if e["contender"] in names
    )


def _speed_table(
    found: Found, chosen: Sequence[Found], known: Mapping[str, Any], columns: Sequence[Column]
) -> str:
    rows = [[c["name"], *(_cell(found, known, c, column) for column in columns)] for c in chosen]
    return table(["", *(column[1] for column in columns)], rows)


def _cell(found: Found, known: Mapping[str, Any], contender: Found, column: Column) -> str:
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


def _growth_table(found: Found, chosen: Sequence[Found]) -> list[str]:
    """Against a prompt eight times shorter, linear growth would be 8."""
    figures = medians(found)
    lengths = [
        n for n in LONG_LENGTHS if any(c["name"] in figures.get(f"growth_{n}", {}) for c in chosen)
    ]
    if not lengths:
        return []
    head = ["", *(f"{n} tokens ({n / LONG_BASE:.2g} times as many)" for n in lengths)]
    rows = [
        [c["name"], *(_plain(figures[f"growth_{n}"].get(c["name"]), 1, 2) for n in lengths)]
        for c in chosen
    ]
    title = f"**Growth: time to the first token over its own at {LONG_BASE} tokens**"
    return [title, table(head, rows)]


def _rate_table(found: Found, chosen: Sequence[Found]) -> list[str]:
    """Bytes of weights a token times tokens a second, over the rate of memory."""
    rate, figures = memory_rate(found), medians(found)
    shares = figures.get("memory_share", {})
    ours = [c for c in chosen if c["name"] in shares]
    if rate is None or not ours:
        return []
    options = found["options"]
    how = options["memory_rate"]
    said = (
        f"**Reading weights while one request decodes.** Memory gives {rate[0] / 1e9:.1f} GB/s to "
        f"{options['threads']} threads that read a buffer of {how['buffer'] / MIB:.0f} MiB "
        f"(median of {rate[1]} turns between those of the contenders, each the best of "
        f"{how['reads']} reads)."
    )
    head = ["", "MiB of weights a token", "tokens/s after 128", "GB/s", "share of memory's rate"]
    decode = figures["decode_128"]
    rows = [_rate_row(c, decode[c["name"]], shares[c["name"]]) for c in ours]
    return [said, table(head, rows)]


def _rate_row(contender: Found, tokens: float, share: float) -> list[str]:
    size = contender["step_bytes"]
    figures = (f"{size / MIB:.1f}", f"{tokens:.1f}", f"{size * tokens / 1e9:.1f}")
    return [contender["name"], *figures, f"{share:.0%}"]


def _other_table(found: Found, chosen: Sequence[Found]) -> str:
    parts = [name for name in PARTS if any(name in m for m in found["memory"].values())]
    scored = any(found["quality"].get(c["name"]) for c in chosen)
    head = ["", *(PART_HEADS[name] for name in parts), "peak", "on disk MiB"]
    if scored:
        head += ["perplexity", "against float32", "same top-1", "KL"]
    rows = []
    for contender in chosen:
        name = contender["name"]
        sizes = _memory(found["memory"].get(name, {}), parts)
        row = [name, *sizes, f"{contender['bytes'] / MIB:.0f}"]
        quality = found["quality"].get(name, {})
        if not quality:
            rows.append([*row, *([NONE] * 4 if scored else [])])
        for path, figures in quality.items():
            label = f"{name}, {path}" if len(quality) > 1 else name
            rows.append([label, *row[1:], *_quality(figures)])
    return table(head, rows)


def _memory(found: Found, parts: Sequence[str]) -> list[str]:
    """Bytes at the end of each part, and the most of all parts."""
    values = [found.get(name, {}).get("rss") for name in parts]
    peak = max((part["peak_rss"] for part in found.values()), default=None)
    return [_plain(value, 1 / MIB, 0) for value in (*values, peak)]


def _plain(value: float | None, scale: float, digits: int) -> str:
    return NONE if value is None else f"{value * scale:.{digits}f}"


def _quality(found: Found) -> list[str]:
    loss = found["perplexity"] / found["reference_perplexity"] - 1
    figures = (f"{found['perplexity']:.3f}", f"{loss:+.2%}")
    return [*figures, f"{found['top1']:.3f}", f"{found['kl']:.4f}"]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose first column is text."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))
