"""Numbers from replicas to the front."""

import os
import time
from pathlib import Path

from trtllm_lite.runtime.server.metrics import Metrics
from trtllm_lite.runtime.server.replicas.metrics import merged
from trtllm_lite.runtime.server.replicas.numbers import read_numbers, write_numbers


def test_the_last_word_of_each_replica_counts(tmp_path: Path) -> None:
    write_numbers(tmp_path, "2", b"b")
    write_numbers(tmp_path, "1", b"old")
    write_numbers(tmp_path, "1", b"new")
    (tmp_path / "3.part").write_bytes(b"half")
    assert read_numbers(tmp_path, 60) == {"1": b"new", "2": b"b"}


def test_a_replica_that_tells_nothing_any_more_goes(tmp_path: Path) -> None:
    write_numbers(tmp_path, "1", b"a")
    write_numbers(tmp_path, "2", b"b")
    before = time.time() - 100
    os.utime(tmp_path / "1.prom", (before, before))
    assert read_numbers(tmp_path, 60) == {"2": b"b"}
    assert read_numbers(tmp_path / "none", 60) == {}


def test_real_numbers_keep_every_sample_and_one_head_a_name() -> None:
    metrics = Metrics("vllm", 64)
    metrics.rejected("queue_full")
    metrics.of("m").accepted()
    text = metrics.text()
    together = merged({"front": text, "17": text}).decode().splitlines()
    heads = [line for line in together if line.startswith("# TYPE ")]
    assert len(heads) == len(set(heads)) == text.count(b"# TYPE ")
    samples = [line for line in together if not line.startswith("#")]
    alone = [line for line in text.decode().splitlines() if not line.startswith("#")]
    assert len(samples) == 2 * len(alone)
    assert 'trtllm_lite_requests_accepted_total{model_name="m",replica="17"} 1.0' in samples
    assert any(line.startswith("vllm:") and 'replica="17"' in line for line in samples)
