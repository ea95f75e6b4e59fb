"""What would lie in a machine's memory: `plan`'s ledger of a subject on a host."""

from collections.abc import Iterator
from dataclasses import replace

from trtllm_lite.runtime.engines.memory import KVMemory, PhaseMemory
from trtllm_lite.runtime.engines.memory import Ledger as PlanLedger
from trtllm_lite.runtime.engines.profiles import (
    CHUNK,
    CHUNK_ROWS,
    EngineLimits,
    most_logits,
    profiles,
    profiles_of_single,
)
from trtllm_lite.runtime.manifest import DTYPE_BYTES
from trtllm_lite.runtime.planning.memory import (
    Ledger,
    PlanRun,
    run_scratch_bytes,
)
from trtllm_lite.tools.plan_machines import Host
from trtllm_lite.tools.plan_subject import TENSORRT, Subject, Wanted

CPU_CHUNK = 256
LOGIT_BYTES = DTYPE_BYTES["float32"]


def make_ledger(subject: Subject, host: Host, wanted: Wanted) -> Ledger:
    """What lies in the machine's memory. A slot has room for the padding of its last chunk, as the
    engine's have."""
    if subject.target == TENSORRT:
        return _with_plans(subject, host, wanted)
    tokens = chunk(subject, wanted)
    return Ledger(
        total_bytes=host.total_bytes,
        reserved_bytes=host.reserved_bytes,
        weight_bytes=host.workload.weight_bytes,
        scratch_bytes=_run_scratch(subject, tokens)
        + LOGIT_BYTES * subject.max_num_seqs * subject.workload.vocab_size,
        slot_bytes=host.workload.kv_token_bytes * (subject.max_model_len + tokens),
        slots=subject.max_num_seqs,
    )


def chunk(subject: Subject, wanted: Wanted) -> int:
    """Most tokens of a step."""
    default = min(CHUNK, subject.max_model_len) if subject.target == TENSORRT else CPU_CHUNK
    return wanted.max_num_batched_tokens or default


def plan_ledger(subject: Subject, limits: EngineLimits, wanted: Wanted) -> PlanLedger:
    """As `trtllm-lite build` has it before it builds."""
    shared = subject.weights.all_matrices if wanted.share_weights else 0
    kv = KVMemory(subject.workload.kv_token_bytes, limits.max_num_seqs, limits.capacity)
    return PlanLedger(tuple(_plans(subject, limits, wanted)), kv, shared)


def _plans(subject: Subject, limits: EngineLimits, wanted: Wanted) -> Iterator[PhaseMemory]:
    weights = subject.weights
    for graph in subject.graphs:
        boxes = profiles(graph, limits)
        if wanted.single_engine:
            if graph.phase != "extend":
                continue
            boxes = profiles_of_single(graph, limits)
        held = weights.vectors[graph.phase] if wanted.share_weights else weights.of(graph.phase)
        logits = most_logits(boxes) * subject.workload.vocab_size * LOGIT_BYTES
        yield PhaseMemory(graph.phase, held, logits)


def _with_plans(subject: Subject, host: Host, wanted: Wanted) -> Ledger:
    limits = EngineLimits(subject.max_num_seqs, subject.max_model_len, chunk(subject, wanted))
    plans = plan_ledger(subject, limits, wanted)
    single = wanted.single_engine
    activation = max(plan_activation(subject, limits, p, single=single) for p in plans.phases)
    return Ledger(
        total_bytes=host.total_bytes,
        reserved_bytes=host.reserved_bytes,
        weight_bytes=plans.weights,
        scratch_bytes=activation + max(plan.logits for plan in plans.phases),
        slot_bytes=plans.kv.bytes_per_token * plans.kv.capacity,
        slots=plans.kv.num_slots,
    )


def plan_activation(
    subject: Subject, limits: EngineLimits, plan: PhaseMemory, *, single: bool
) -> int:
    """Estimate of what TensorRT keeps between and inside of the layers of the largest run of the
    plan. single: it runs steps as well."""
    chunk_rows = min(limits.max_num_seqs, CHUNK_ROWS)
    step = PlanRun(
        rows=limits.max_num_seqs,
        tokens=limits.max_num_seqs,
        capacity=limits.capacity,
        logit_bytes=LOGIT_BYTES * limits.max_num_seqs * subject.workload.vocab_size,
        hidden=subject.hidden_size,
        query_width=subject.query_width or subject.hidden_size,
        width=_width(subject),
        element_bytes=DTYPE_BYTES[subject.dtype],
    )
    several = replace(
        step, rows=chunk_rows, tokens=chunk_rows * limits.max_chunk, logit_bytes=plan.logits
    )
    if plan.phase == "prefill":
        return several.prefill_bytes
    if plan.phase == "decode":
        return step.decode_bytes
    return max(several.extend_bytes, step.decode_bytes if single else 0)


def _run_scratch(subject: Subject, tokens: int) -> int:
    element = DTYPE_BYTES["float32" if subject.target == "cpu" else subject.dtype]
    return run_scratch_bytes(tokens, _width(subject), element)


def _width(subject: Subject) -> int:
    return subject.scratch_width or 4 * subject.hidden_size
