"""Our numbers under vLLM's names, for dashboards and load generators that were made for it.

Names, types and labels: vllm/v1/metrics/loggers.py. The two that newer versions call otherwise
(`gpu_cache_usage_perc`, `time_per_output_token_seconds`) are here under both names.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client.core import Metric

from trtllm_lite.runtime.server.engine_metrics import PREFIX

VLLM = "vllm:"


@dataclass(frozen=True)
class _Alias:
    """`ours` without its prefix, and what the other calls it; `labels`: new names of labels."""

    ours: str
    theirs: str
    labels: tuple[tuple[str, str], ...] = field(default=())


_SAME = (
    *("prompt_tokens", "generation_tokens", "request_prompt_tokens", "request_generation_tokens"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds"),
    *("request_time_per_output_token_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "request_inference_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds"),
)
_ALIASES = (
    _Alias("requests_running", "num_requests_running"),
    _Alias("requests_waiting", "num_requests_waiting"),
    _Alias("kv_cache_usage_ratio", "kv_cache_usage_perc"),
    _Alias("kv_cache_usage_ratio", "gpu_cache_usage_perc"),
    _Alias("prefix_query_tokens", "prefix_cache_queries"),
    _Alias("prefix_hit_tokens", "prefix_cache_hits"),
    _Alias("preemptions", "num_preemptions"),
    _Alias("draft_tokens", "spec_decode_num_draft_tokens"),
    _Alias("accepted_draft_tokens", "spec_decode_num_accepted_tokens"),
    _Alias("choices_finished", "request_success", (("reason", "finished_reason"),)),
    _Alias("requests_rejected", "admission_rejections"),
    _Alias("inter_token_latency_seconds", "time_per_output_token_seconds"),
    *(_Alias(name, name) for name in _SAME),
)


def vllm_families(ours: Iterable[Metric]) -> Iterator[Metric]:
    """Copies of those families that vLLM has too: equal numbers, its names."""
    by_name = {family.name: family for family in ours}
    for alias in _ALIASES:
        family = by_name.get(PREFIX + alias.ours)
        if family is not None:
            yield _renamed(family, VLLM + alias.theirs, dict(alias.labels))


def _renamed(family: Metric, name: str, labels: dict[str, str]) -> Metric:
    made = Metric(name, family.documentation, family.type)
    for sample in family.samples:
        suffix = sample.name.removeprefix(family.name)
        if suffix != "_created":
            renamed = {labels.get(key, key): value for key, value in sample.labels.items()}
            made.add_sample(name + suffix, renamed, sample.value)
    return made
