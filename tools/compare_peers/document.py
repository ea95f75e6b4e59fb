"""The recorded comparison: a JSON document with every sample, and what is computed from it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from trtllm_lite.runtime.manifest import MANIFEST_NAME
from trtllm_lite.runtime.native_table import TABLE_NAME
from trtllm_lite.tools.bandwidth import PASSES
from trtllm_lite.tools.bench_breakdown import spread
from trtllm_lite.tools.bench_report import commit, machine
from trtllm_lite.tools.compare_peers.contenders import WAYS, Contender
from trtllm_lite.tools.compare_peers.prompts import Texts
from trtllm_lite.tools.compare_peers.runner import MACHINE, Findings, RunOptions
from trtllm_lite.tools.compare_peers.turns import LONG_BASE, LONG_LENGTHS
from trtllm_lite.tools.weights import packed_bytes

SCHEMA = "trtllm-lite-peers/1"

# How the names of metrics begin of which less is better; of all others more is.
LESS = ("ttft_", "long_ttft_", "growth_", "load", "first_token", "rss", "perplexity", "kl")


def document(
    model: str,
    contenders: Sequence[Contender],
    skipped: Sequence[str],
    texts: Texts,
    options: RunOptions,
    findings: Findings,
) -> dict[str, Any]:
    """Everything that is needed to judge and repeat the run; times in seconds, sizes in bytes."""
    return {
        "schema": SCHEMA,
        "model": model,
        "machine": machine(),
        "commit": commit(Path(__file__).resolve().parent),
        "options": {
            "threads": options.threads,
            "gate": options.gate,
            "retries": options.retries,
            "memory_rate": {"buffer": options.buffer, "reads": PASSES},
            "parts": [asdict(part) for part in options.parts],
            "quality_windows": len(texts.windows),
        },
        "contenders": [_contender(contender, findings) for contender in contenders],
        "skipped": list(skipped),
        "errors": [{"contender": name, "error": text} for name, text in findings.errors],
        "samples": [asdict(sample) for sample in findings.samples],
        "quality": findings.quality,
        "memory": findings.memory,
    }


def _contender(contender: Contender, findings: Findings) -> dict[str, Any]:
    return {
        "name": contender.name,
        "peer": contender.peer,
        "bits": contender.bits,
        "version": findings.versions.get(contender.name),
        "bytes": size_of(Path(contender.path)),
        "step_bytes": step_bytes(Path(contender.path)),
    }


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; of a bundle, what its manifest names."""
    if (path / MANIFEST_NAME).exists():
        manifest = json.loads((path / MANIFEST_NAME).read_text(encoding="utf-8"))
        return sum(entry["size"] for entry in manifest["files"])
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return sum(file.stat().st_size for file in files)


def step_bytes(path: Path) -> int | None:
    """Bytes of weights that a token reads; None for what is not a bundle for our kernels."""
    return packed_bytes(path) if (path / TABLE_NAME).exists() else None


def memory_rate(found: Mapping[str, Any]) -> tuple[float, int] | None:
    """Bytes per second that the machine reads, the median over its quiet turns, and how many there
    were. None in a document without."""
    figures = cells(found).get("memory_rate", {}).get(MACHINE)
    return None if figures is None else (figures["median"], int(figures["count"]))


def cells(found: Mapping[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """Metric, then contender, then median, min, max and count over the turns that were kept."""
    values: dict[str, dict[str, list[float]]] = {}
    for sample in found["samples"]:
        for metric, value in sample["values"].items():
            row = values.setdefault(metric, {}).setdefault(sample["contender"], [])
            if sample["kept"]:
                row.append(value)
    return {
        metric: {name: figures for name, row in rows.items() if (figures := spread(row))}
        for metric, rows in values.items()
    }


def advantage(metric: str, value: float, other: float) -> float:
    """How many times better `value` is than `other`: over 1 is better, whatever the metric."""
    return other / value if metric.startswith(LESS) else value / other


def medians(found: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Metric, then contender, then one figure: medians of `cells`, and what follows from the
    document: `growth_N` (time to the first token of N tokens over that of LONG_BASE), `rss` (bytes,
    one request), `perplexity` over float32's and `kl` (the worse where there are two paths), and
    `memory_share` (of the rate of memory, bytes of weights that are read while decoding)."""
    known = {
        metric: {name: figures["median"] for name, figures in rows.items()}
        for metric, rows in cells(found).items()
    }
    return {**known, **_growths(known), **_losses(found), "rss": _rss(found)} | _share(found, known)


def _growths(known: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    base = known.get(f"long_ttft_{LONG_BASE}", {})
    return {
        f"growth_{n}": {name: value / base[name] for name, value in rows.items() if name in base}
        for n in LONG_LENGTHS
        if (rows := known.get(f"long_ttft_{n}"))
    }


def _losses(found: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    quality = {name: list(paths.values()) for name, paths in found["quality"].items() if paths}
    return {
        "kl": {name: max(q["kl"] for q in rows) for name, rows in quality.items()},
        "perplexity": {
            name: max(q["perplexity"] / q["reference_perplexity"] for q in rows)
            for name, rows in quality.items()
        },
    }


def _rss(found: Mapping[str, Any]) -> dict[str, float]:
    return {name: parts["one"]["rss"] for name, parts in found["memory"].items() if "one" in parts}


def _share(
    found: Mapping[str, Any], known: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """Of contenders whose bytes are known, after the shortest prompt."""
    rate, decode = memory_rate(found), known.get("decode_128", {})
    if rate is None:
        return {}
    read = {c["name"]: c.get("step_bytes") for c in found["contenders"]}
    shares = {
        name: size * decode[name] / rate[0]
        for name, size in read.items()
        if size and name in decode
    }
    return {"memory_share": shares}


def best_peer(
    found: Mapping[str, Any], metric: str, bits: int | None = None
) -> tuple[str, float] | None:
    """The best figure among the peers (of one class), ours left out; None when there is none."""
    names = [
        c["name"]
        for c in found["contenders"]
        if c["peer"] not in WAYS.values() and (bits is None or c["bits"] == bits)
    ]
    rows = medians(found).get(metric, {})
    known = [(name, rows[name]) for name in names if name in rows]
    if not known:
        return None
    return max(known, key=lambda pair: advantage(metric, pair[1], known[0][1]))


def rounds(found: Mapping[str, Any]) -> int:
    """The most rounds that any turn was taken in."""
    return max((sample["round"] + 1 for sample in found["samples"]), default=0)


def dropped(found: Mapping[str, Any]) -> tuple[int, int]:
    """How many turns were not quiet, and how many were taken in all."""
    kept = [sample["kept"] for sample in found["samples"]]
    return kept.count(False), len(kept)


def median_noise(samples: Iterable[Mapping[str, Any]]) -> tuple[float, float]:
    """Median shares of the CPUs that others used and that were stolen, over all turns."""
    pairs = [(sample["others"], sample["steal"]) for sample in samples]
    if not pairs:
        return 0.0, 0.0
    others, steal = zip(*pairs, strict=True)
    return median(others), median(steal)
