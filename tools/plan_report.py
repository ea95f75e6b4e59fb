"""What `plan` tells: a JSON document, and its tables."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from trtllm_lite.runtime.engines.profiles import CHUNK, CHUNK_ROWS, EngineLimits
from trtllm_lite.runtime.manifest import DTYPE_BYTES
from trtllm_lite.runtime.planning.memory import (
    DECODE_SCRATCH_BYTES,
    Ledger,
    extend_scratch_bytes,
    run_scratch_bytes,
)
from trtllm_lite.runtime.planning.together import predict
from trtllm_lite.tools.console import Console, Table, format_bytes, format_count, printable
from trtllm_lite.tools.plan_machines import Host
from trtllm_lite.tools.plan_subject import Subject, Wanted

CPU_CHUNK = 256
SCHEMA = "trtllm-lite-plan/1"
REQUESTS = (1, 4, 8, 16, 32, 64, 128, 256)
LIMIT = (
    "Estimate, not run. Times are the least that the memory rate and the rate of multiplying "
    "allow; plan for up to twice as long."
)
EXPECTED = "Estimate, not run. Times are what is to be expected of this machine as it was just now."
MACHINE_COLUMNS = (
    "machine",
    "memory",
    "needed",
    "requests that fit",
    "TTFT ms",
    "TPOT ms",
    "tokens/s",
)
SPEED_COLUMNS = ("requests", "TTFT ms", "TPOT ms", "tokens/s", "waits for")


def document(
    subject: Subject, hosts: Iterable[Host], refused: Mapping[str, str], wanted: Wanted
) -> dict[str, Any]:
    """The whole plan as plain data: bytes, seconds, tokens a second."""
    return {
        "schema": SCHEMA,
        "is_estimate": True,
        "model": {
            "name": subject.name,
            "kind": subject.kind,
            "model_type": subject.model_type,
            "num_parameters": subject.num_parameters,
            "target": subject.target,
            "dtype": subject.dtype,
            "quantize": subject.quantize,
            "weight_bytes": subject.workload.weight_bytes,
            "notes": list(subject.notes),
        },
        "options": asdict(wanted)
        | {
            "max_model_len": subject.max_model_len,
            "max_num_batched_tokens": _chunk(subject, wanted),
        },
        "host_bytes": dict(subject.host_bytes),
        "machines": [_machine(subject, host, wanted) for host in hosts],
        "refused": dict(refused),
    }


def _machine(subject: Subject, host: Host, wanted: Wanted) -> dict[str, Any]:
    ledger = make_ledger(subject, host, wanted)
    counts = sorted({n for n in REQUESTS if n < wanted.max_num_seqs} | {wanted.max_num_seqs})
    return {
        "name": host.name,
        "title": host.title,
        "source": host.source,
        "rates": dict(host.rates),
        "times_are": "limit" if host.is_limit else "expected",
        "memory": asdict(ledger)
        | {
            "kv_token_bytes": host.workload.kv_token_bytes,
            "kv_dtype": host.workload.kv_dtype,
            "step_bytes": host.workload.step_bytes,
            "used_bytes": ledger.used_bytes,
            "fits": ledger.fits,
            "most_requests": ledger.most_slots,
        },
        "speed": [
            {"requests": n, "fits": n <= ledger.most_slots}
            | asdict(predict(host.workload, host.machine, n, wanted.input_len, wanted.output_len))
            for n in counts
        ],
    }


def make_ledger(subject: Subject, host: Host, wanted: Wanted) -> Ledger:
    """What lies in the machine's memory. A slot has room for the padding of its last chunk, as the
    engine's have."""
    limits = _limits(subject, wanted)
    is_tensorrt = subject.target == "tensorrt"
    capacity = limits.capacity if is_tensorrt else limits.max_model_len + _chunk(subject, wanted)
    return Ledger(
        total_bytes=host.total_bytes,
        reserved_bytes=host.reserved_bytes,
        weight_bytes=host.weight_bytes,
        scratch_bytes=_plan_scratch(subject, limits) if is_tensorrt else _scratch(subject, limits),
        slot_bytes=host.workload.kv_token_bytes * capacity,
        slots=wanted.max_num_seqs,
    )


def _chunk(subject: Subject, wanted: Wanted) -> int:
    default = min(CHUNK, subject.max_model_len) if subject.target == "tensorrt" else CPU_CHUNK
    return wanted.max_num_batched_tokens or default


def _limits(subject: Subject, wanted: Wanted) -> EngineLimits:
    return EngineLimits(wanted.max_num_seqs, subject.max_model_len, _chunk(subject, wanted))


def _scratch(subject: Subject, limits: EngineLimits) -> int:
    """Of one step with its most tokens."""
    return _run_scratch(subject, limits.max_num_batched_tokens, limits.max_num_seqs)


def _plan_scratch(subject: Subject, limits: EngineLimits) -> int:
    """Of TensorRT's largest run: a chunk of several rows over the cache. Layers take turns, and so
    do what is between their products and their attention."""
    rows = min(limits.max_num_seqs, CHUNK_ROWS)
    run = _run_scratch(subject, rows * limits.max_chunk, limits.max_num_seqs)
    heads = subject.query_width or subject.hidden_size
    element = DTYPE_BYTES[subject.dtype]
    over_cache = extend_scratch_bytes(rows, limits.capacity, heads, element)
    return max(run, over_cache, DECODE_SCRATCH_BYTES)


def _run_scratch(subject: Subject, tokens: int, rows: int) -> int:
    element = DTYPE_BYTES["float32" if subject.target == "cpu" else subject.dtype]
    width = subject.scratch_width or 4 * subject.hidden_size
    vocab = subject.workload.vocab_size
    return run_scratch_bytes(tokens, rows, width, subject.hidden_size, vocab, element)


def show(console: Console, plan: Mapping[str, Any]) -> None:
    """The tables, the least that has to be known of them, and what they are not."""
    machines = plan["machines"]
    console.table(_facts(plan))
    if len(machines) == 1:
        console.table(_memory(machines[0]))
        console.table(_speed(machines[0], plan["options"]))
    else:
        console.table(_compared(machines, plan["options"]))
    for name, reason in plan["refused"].items():
        console.out(f"{name}: not listed: {reason}")
    console.out(LIMIT if machines[0]["times_are"] == "limit" else EXPECTED)


def _facts(plan: Mapping[str, Any]) -> Table:
    model = plan["model"]
    first = plan["machines"][0]["memory"]
    rows = [
        ("model", f"{model['model_type']}, {format_count(model['num_parameters'])} parameters"),
        ("bundle", f"{model['target']}, {model['dtype']}, quantize {model['quantize']}"),
        ("weights", _weights(model, first)),
        ("KV cache", f"{format_bytes(first['kv_token_bytes'])} a token, {first['kv_dtype']}"),
        *(
            (f"host memory to {name}", f"about {format_bytes(size)} (estimate)")
            for name, size in plan["host_bytes"].items()
        ),
    ]
    title = f"Plan of {printable(model['name'])}"
    return Table(title, ("what", "value"), tuple((name, printable(text)) for name, text in rows))


def _weights(model: Mapping[str, Any], memory: Mapping[str, Any]) -> str:
    copies = round(memory["weight_bytes"] / max(1, model["weight_bytes"]), 1)
    size = format_bytes(memory["weight_bytes"])
    if copies > 1:
        size = f"{format_bytes(model['weight_bytes'])}, {copies:g} times: once for each graph"
    read = f"a token reads {format_bytes(memory['step_bytes'])}"
    return "; ".join([size, read, *model["notes"]])


def _memory(machine: Mapping[str, Any]) -> Table:
    memory = machine["memory"]
    slots = memory["slots"]
    rows = [
        ("there is", memory["total_bytes"], machine["source"]),
        ("process and libraries", memory["reserved_bytes"], "estimate"),
        ("weights", memory["weight_bytes"], ""),
        ("scratch", memory["scratch_bytes"], "estimate"),
        (f"KV cache of {slots} requests", memory["slot_bytes"] * slots, ""),
        ("needed", memory["used_bytes"], "fits" if memory["fits"] else "does not fit"),
    ]
    cells = [(name, format_bytes(size), note) for name, size, note in rows]
    cells.append(("requests that fit", str(memory["most_requests"]), "at their longest"))
    return Table(f"Memory: {machine['title']}", ("what", "size", ""), tuple(cells), frozenset({1}))


def _speed(machine: Mapping[str, Any], options: Mapping[str, Any]) -> Table:
    rows = tuple(
        (str(point["requests"]), *_times(point), _waits(point)) for point in machine["speed"]
    )
    return Table(_work(machine, options), SPEED_COLUMNS, rows, frozenset(range(4)))


def _compared(machines: Iterable[Mapping[str, Any]], options: Mapping[str, Any]) -> Table:
    rows = []
    for machine in machines:
        memory, speed = machine["memory"], machine["speed"]
        most = str(memory["most_requests"])
        sizes = (format_bytes(memory["total_bytes"]), format_bytes(memory["used_bytes"]), most)
        alone, full = _times(speed[0]), _times(speed[-1])
        rows.append((machine["name"], *sizes, *alone[:2], full[2] if speed[-1]["fits"] else "-"))
    title = f"{_work({'times_are': 'limit'}, options)}; alone, and tokens/s of all together"
    return Table(title, MACHINE_COLUMNS, tuple(rows), frozenset(range(1, 7)))


def _work(machine: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    kind = "limit" if machine["times_are"] == "limit" else "expected"
    lengths = f"{options['input_len']} prompt and {options['output_len']} new tokens"
    return f"Times ({kind}) of {lengths}"


def _times(point: Mapping[str, Any]) -> tuple[str, str, str]:
    ttft, tpot = point["ttft"] * 1e3, point["tpot"] * 1e3
    return f"{ttft:.1f}", f"{tpot:.2f}", f"{point['tokens_per_second']:.0f}"


def _waits(point: Mapping[str, Any]) -> str:
    return str(point["bound"]) if point["fits"] else "does not fit"
