"""What `plan` tells: a JSON document, and its tables."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from trtllm_lite.runtime.planning.together import predict
from trtllm_lite.tools.console import Console, Table, format_bytes, format_count, printable
from trtllm_lite.tools.plan_machines import Host
from trtllm_lite.tools.plan_memory import chunk, make_ledger
from trtllm_lite.tools.plan_subject import Subject, Wanted

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
            "max_num_seqs": subject.max_num_seqs,
            "max_num_batched_tokens": chunk(subject, wanted),
        },
        "host_bytes": dict(subject.host_bytes),
        "machines": [_machine(subject, host, wanted) for host in hosts],
        "refused": dict(refused),
    }


def _machine(subject: Subject, host: Host, wanted: Wanted) -> dict[str, Any]:
    ledger = make_ledger(subject, host, wanted)
    most = subject.max_num_seqs
    counts = sorted({n for n in REQUESTS if n < most} | {most})
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


def show(console: Console, plan: Mapping[str, Any]) -> None:
    """The tables, the least that has to be known of them, and what they are not."""
    machines = plan["machines"]
    console.table(_facts(plan))
    if len(machines) == 1:
        console.table(_memory(machines[0]))
        console.table(_speed(machines[0], plan["options"]))
    else:
        console.table(_compared(machines, plan["options"]))
    if _copies(plan["model"], machines[0]["memory"]) > 1:
        console.out("Weights are held once with --share-weights or --single-engine.")
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
    copies = _copies(model, memory)
    size = format_bytes(memory["weight_bytes"])
    if copies > 1:
        size = f"{format_bytes(model['weight_bytes'])}, {copies:g} times: once for each graph"
    read = f"a token reads {format_bytes(memory['step_bytes'])}"
    return "; ".join([size, read, *model["notes"]])


def _copies(model: Mapping[str, Any], memory: Mapping[str, Any]) -> float:
    """How often the weights lie in the machine's memory."""
    held, once = int(memory["weight_bytes"]), int(model["weight_bytes"])
    return round(held / max(1, once), 1)


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
