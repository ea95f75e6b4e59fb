"""What `trtllm-lite build` shows: plans and their memory, as tables and as JSON."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from trtllm_lite.tools.console import Table, format_bytes

if TYPE_CHECKING:
    from trtllm_lite.runtime.engines.engine_builder import BuildReport
    from trtllm_lite.runtime.engines.memory import Ledger
    from trtllm_lite.runtime.engines.record import EngineRecord


def memory(ledger: "Ledger", when: str) -> Table:
    """Device memory. `when` is "before" a build, from the graphs, or "built", from the builder."""
    kv = ledger.kv
    rows = [("weights, shared", _size(ledger.shared_weights or None))]
    rows += [(f"weights of {p.phase}", _size(_weights(p))) for p in ledger.phases]
    largest = max(p.logits for p in ledger.phases)
    rows += [
        (f"KV cache, {kv.num_slots} slots of {kv.capacity} tokens", _size(kv.total)),
        ("largest logits of a run", _size(largest)),
        *((f"activation of {p.phase}", _size(p.activation)) for p in ledger.phases),
        *((f"  of it scratch of {p.phase}", _size(p.scratch)) for p in ledger.phases),
        (
            "together, activation shared" if ledger.activation else "together, so far",
            _size(ledger.total),
        ),
    ]
    title = "Device memory, exact part" if when == "before" else "Device memory, as built"
    return Table(title, ("what", "size"), tuple(r for r in rows if r[1]), frozenset({1}))


def _weights(phase: Any) -> int | None:
    value: int | None = phase.file_weights if phase.weights is None else phase.weights
    return value


def _size(count: int | None) -> str:
    """Nothing for what is not known."""
    return "" if count is None else format_bytes(count)


def plans(record: "EngineRecord") -> Table:
    """One row a plan: its file, its ranges, and what was put right in it."""
    rows = tuple(
        (
            plan.phase,
            format_bytes(plan.file.size),
            _ranges(record, plan.phase),
            f"{plan.attention_layers}",
            f"{plan.lengths_set}",
            f"{plan.lower_right}",
        )
        for plan in record.plans
    )
    columns = ("plan", "file", "sizes", "attentions", "lengths set", "causal to the end")
    return Table("Plans", columns, rows, frozenset({1, 3, 4, 5}))


def _ranges(record: "EngineRecord", phase: Any) -> str:
    key = record.key.graph(phase)
    boxes = key.profiles if key is not None else ()
    return "; ".join(", ".join(f"{d.name} {d.min}-{d.max}" for d in box.dims) for box in boxes)


def outcome(report: "BuildReport") -> str:
    """The last line: where the plans are."""
    folder = report.engine.root / report.engine.folder
    if report.made:
        return f"built: {folder}"
    return (
        f"nothing to do: {folder} was built from these graphs and weights, by this TensorRT, for "
        "these GPUs and limits; --force builds again"
    )


def document(report: "BuildReport") -> dict[str, Any]:
    """The same for machines: engine.json, where it lies, and the memory in bytes."""
    ledger = report.ledger
    return {
        "folder": str(report.engine.root / report.engine.folder),
        "made": report.made,
        "fingerprint": report.engine.record.key.fingerprint,
        "record": asdict(report.engine.record),
        "memory": {
            "phases": [asdict(phase) for phase in ledger.phases],
            "kv": asdict(ledger.kv) | {"total": ledger.kv.total},
            "weights": ledger.weights,
            "shared_weights": ledger.shared_weights,
            "activation": ledger.activation,
            "total": ledger.total,
        },
    }
