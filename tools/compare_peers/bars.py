"""What trtllm-lite is to reach in each cell of the comparison, and where it does not."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trtllm_lite.tools.compare_peers.contenders import ORT, OURS
from trtllm_lite.tools.compare_peers.document import advantage, best_peer, medians
from trtllm_lite.tools.compare_peers.turns import LONG_LENGTHS

MIB = 2**20
STEP_BYTES = 512 * MIB  # of weights: what hardly any cache holds


@dataclass(frozen=True)
class Bar:
    """One metric of ours against its rival: at least `least` times as good.

    The rival is `limit` where that is given, else the peer called `peer`, else the best of the
    width in the metric `best_in` (which is `metric` itself unless given). `ours`: which way to run
    a bundle is judged. `key` names the cell in notes. Figures are told times `scale`, with `digits`
    and `unit`.
    """

    metric: str
    label: str
    least: float
    scale: float = 1.0
    digits: int = 0
    unit: str = ""
    widths: tuple[int, ...] = (8,)
    limit: float | None = None
    peer: str | None = None
    best_in: str | None = None
    ours: str = OURS
    suffix: str = ""

    @property
    def key(self) -> str:
        return self.metric + self.suffix


def _time(length: int) -> Bar:
    label = f"time to the first token, {length:,} tokens"
    return Bar(f"ttft_{length}", label, 1.1, 1e3, 0, " ms")


def _decode(length: int, bits: int, least: float) -> Bar:
    label = f"decoding one request after {length:,} tokens"
    return Bar(f"decode_{length}", label, least, 1.0, 1, " tokens/s", (bits,))


def _requests(count: int) -> Bar:
    return Bar(f"total_{count}", f"{count} requests at once", 1.2, 1.0, 0, " tokens/s")


def _growth(length: int) -> Bar:
    label = f"growth of the time to the first token from 1,024 to {length:,} tokens"
    best = f"long_ttft_{length}"
    return Bar(f"growth_{length}", label, 1.0, 1.0, 2, "x", (8, 4), best_in=best)


BARS = (
    *(_time(length) for length in (128, 512, 1024)),
    *(_decode(length, 8, 1.25) for length in (128, 1024)),
    *(_decode(length, 4, 1.2) for length in (128, 1024)),
    *(_requests(count) for count in (4, 8, 16)),
    *(_growth(length) for length in LONG_LENGTHS),
    Bar("kl", "KL divergence from float32", 1.0, 1.0, 4, " nats", (8, 4)),
    Bar("perplexity", "perplexity over float32's", 1.0, 1.0, 4, "x", (4,)),
    Bar("first_token", "process start to first token", 1.0, 1.0, 2, " s", (8, 4), limit=0.6),
    Bar("rss", "memory, one request", 1 / 1.15, 1 / MIB, 0, " MiB", peer="llama.cpp Q8_0"),
    Bar(
        "rss",
        "memory, one request, two formats (ONNX Runtime's operators)",
        1 / 1.6,
        1 / MIB,
        unit=" MiB",
        peer="llama.cpp Q8_0",
        ours=ORT,
        suffix="_two_formats",
    ),
    Bar("memory_share", "share of the rate of memory", 1.0, 100, 0, "%", (8, 4), limit=0.8),
)


@dataclass(frozen=True)
class Verdict:
    """How one bundle does under one bar: its figure, the rival's, and how many times better."""

    model: str
    bits: int
    bar: Bar
    ours: str
    value: float
    rival: str
    other: float

    @property
    def advantage(self) -> float:
        return advantage(self.bar.metric, self.value, self.other)

    @property
    def behind(self) -> bool:
        return self.advantage < self.bar.least

    def text(self) -> str:
        """One phrase, without the reason."""
        ours = self._told(self.value)
        if self.bar.limit is not None:
            return f"{self.bar.label}: {ours}; the bar is {self._told(self.other)}"
        theirs = f"{self.rival} ({self._told(self.other)})"
        if self.bar.least < 1:
            text = f"{1 / self.advantage:.2f} times {theirs}; the bar is {1 / self.bar.least:.2f}"
        else:
            text = f"{self._times():.2f} times as good as {theirs}; the bar is {self.bar.least:.2f}"
        return f"{self.bar.label}: {ours}, {text}"

    def _times(self) -> float:
        """To two digits, and never as much as the bar where it is less."""
        shown = round(self.advantage, 2)
        if self.behind and shown >= self.bar.least:
            return math.floor(self.advantage * 100) / 100
        return shown

    def _told(self, value: float) -> str:
        return f"{value * self.bar.scale:.{self.bar.digits}f}{self.bar.unit}"


def verdicts(found: Mapping[str, Any], bits: int) -> Iterator[Verdict]:
    """Of one document and width: every bar whose figures are known, for the first bundle that is
    run in the bar's way."""
    figures = medians(found)
    for bar in BARS:
        ours = [c for c in found["contenders"] if c["peer"] == bar.ours and c["bits"] == bits]
        if bits not in bar.widths or not ours or not _applies(bar, ours[0]):
            continue
        value = figures.get(bar.metric, {}).get(ours[0]["name"])
        rival = _rival(found, bar, bits, figures.get(bar.metric, {}))
        if value is not None and rival is not None:
            yield Verdict(found["model"], bits, bar, ours[0]["name"], value, *rival)


def _applies(bar: Bar, contender: Mapping[str, Any]) -> bool:
    """How much of the rate of memory is used says something only of weights that no cache holds."""
    return bar.metric != "memory_share" or (contender.get("step_bytes") or 0) >= STEP_BYTES


def _rival(
    found: Mapping[str, Any], bar: Bar, bits: int, figures: Mapping[str, float]
) -> tuple[str, float] | None:
    if bar.limit is not None:
        return "the limit", bar.limit
    name = bar.peer
    if name is None:
        best = best_peer(found, bar.best_in or bar.metric, bits)
        name = best[0] if best else ""
    return (name, figures[name]) if name in figures else None
