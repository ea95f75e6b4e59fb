"""The recorded comparison: a JSON document with every sample, and what is computed from it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from trtllm_lite.runtime.manifest import MANIFEST_NAME
from trtllm_lite.tools.bench_breakdown import spread
from trtllm_lite.tools.bench_report import commit, machine
from trtllm_lite.tools.compare_peers.contenders import WAYS, Contender
from trtllm_lite.tools.compare_peers.prompts import Texts
from trtllm_lite.tools.compare_peers.runner import Findings, RunOptions
from trtllm_lite.tools.compare_peers.turns import MAX_LEN, SLOTS

SCHEMA = "trtllm-lite-peers/1"

# Metrics of which less is better; of all others more is.
TIMES = ("ttft_", "load", "first_token")


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
            "rounds": options.rounds,
            "gate": options.gate,
            "retries": options.retries,
            "max_len": MAX_LEN,
            "slots": SLOTS,
            "turns": [asdict(turn) for turn in (*options.one, *options.many)],
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
    }


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; of a bundle, what its manifest names."""
    if (path / MANIFEST_NAME).exists():
        manifest = json.loads((path / MANIFEST_NAME).read_text(encoding="utf-8"))
        return sum(entry["size"] for entry in manifest["files"])
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return sum(file.stat().st_size for file in files)


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
    return other / value if metric.startswith(TIMES) else value / other


def best_peer(
    found: Mapping[str, Any], metric: str, bits: int | None = None
) -> tuple[str, float] | None:
    """The best median among the peers (of one class), ours left out; None when there is none."""
    names = [
        c["name"]
        for c in found["contenders"]
        if c["peer"] not in WAYS.values() and (bits is None or c["bits"] == bits)
    ]
    rows = cells(found).get(metric, {})
    known = [(name, rows[name]["median"]) for name in names if name in rows]
    if not known:
        return None
    return max(known, key=lambda pair: advantage(metric, pair[1], known[0][1]))


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
