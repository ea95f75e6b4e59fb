"""Figures of finished requests, on one line."""

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from trtllm_lite.tools.console import format_seconds

if TYPE_CHECKING:
    from trtllm_lite.runtime.outputs import RequestOutput


def request_line(result: "RequestOutput") -> str:
    """ "TTFT 120.0 ms, TPOT 25.0 ms, 40.0 tokens/s (17 prompt tokens, 5 cached; 64 new)"."""
    metrics = result.metrics
    parts = [f"TTFT {format_seconds(metrics.ttft)}"]
    if metrics.tpot:
        parts += [f"TPOT {format_seconds(metrics.tpot)}", f"{1 / metrics.tpot:.1f} tokens/s"]
    cached = f", {result.cached_tokens} cached" if result.cached_tokens else ""
    prompt = f"{len(result.prompt_token_ids)} prompt tokens{cached}"
    new = f"{new_tokens(result)} new{_drafted([result])}{_ending(result)}"
    return f"{', '.join(parts)} ({prompt}; {new})"


def total_line(results: Sequence["RequestOutput"]) -> str:
    """One line for requests that ran together: tokens per second of all, medians of each."""
    tokens = sum(map(new_tokens, results))
    seconds = span(results)
    ttft = median([r.metrics.ttft for r in results if r.metrics.ttft is not None] or [0.0])
    tpot = median([r.metrics.tpot for r in results if r.metrics.tpot is not None] or [0.0])
    rate = f", {tokens / seconds:.1f} tokens/s" if seconds > 0 else ""
    medians = f"median TTFT {format_seconds(ttft)}, TPOT {format_seconds(tpot)}"
    done = f"{tokens} tokens{_drafted(results)} in {format_seconds(seconds)}{rate}"
    return f"{len(results)} requests, {done}; {medians}"


def new_tokens(result: "RequestOutput") -> int:
    """Generated tokens over all choices."""
    return sum(len(choice.token_ids) for choice in result.outputs)


def span(results: Sequence["RequestOutput"]) -> float:
    """Seconds from the first arrival to the last end."""
    start = min(r.metrics.arrival_time for r in results)
    return max(r.metrics.finished_time or start for r in results) - start


def _drafted(results: Sequence["RequestOutput"]) -> str:
    """Of the new tokens, those that speculation had guessed."""
    drafted = sum(r.metrics.num_draft_tokens for r in results)
    accepted = sum(r.metrics.num_accepted_tokens for r in results)
    return f", {accepted} of {drafted} guesses right" if drafted else ""


def _ending(result: "RequestOutput") -> str:
    cut = any(choice.finish_reason == "length" for choice in result.outputs)
    return ", cut at the limit" if cut else ""
