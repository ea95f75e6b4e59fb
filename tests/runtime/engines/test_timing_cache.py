"""The file of kernel timings, against a builder configuration that keeps them."""

from pathlib import Path
from typing import Any

import pytest

from trtllm_lite.runtime.engines.timing_cache import TimingCacheFile
from trtllm_lite.runtime.errors import UsageError


class Timings:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def serialize(self) -> bytes:
        return self.data


class Config:
    """IBuilderConfig, as far as timings go. Takes those that begin with "here"."""

    progress_monitor: Any = None
    num_compute_capabilities = 0

    def __init__(self) -> None:
        self.timings: Timings | None = None

    def set_compute_capability(self, capability: Any, index: int) -> bool:
        raise AssertionError(capability)

    def add_optimization_profile(self, profile: Any) -> int:
        raise AssertionError(profile)

    def set_flag(self, flag: Any) -> None:
        raise AssertionError(flag)

    def clear_flag(self, flag: Any) -> None:
        raise AssertionError(flag)

    def create_timing_cache(self, data: bytes) -> Timings:
        return Timings(data or b"here")

    def set_timing_cache(self, cache: Any, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        self.timings = cache
        return bool(cache.data.startswith(b"here"))

    def get_timing_cache(self) -> Timings | None:
        return self.timings


def test_timings_are_used_and_kept(tmp_path: Path) -> None:
    path, config = tmp_path / "timings", Config()
    TimingCacheFile(path).load(config)
    assert config.timings is not None
    config.timings.data += b" measured"
    TimingCacheFile(path).keep(config)
    assert path.read_bytes() == b"here measured"
    again = Config()
    TimingCacheFile(path).load(again)
    assert again.timings is not None
    assert again.timings.data == b"here measured"
    assert [p.name for p in tmp_path.iterdir()] == ["timings"]


def test_no_timings_leave_no_file(tmp_path: Path) -> None:
    TimingCacheFile(tmp_path / "timings").keep(Config())
    assert list(tmp_path.iterdir()) == []


def test_timings_of_another_gpu_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "timings"
    path.write_bytes(b"elsewhere")
    with pytest.raises(UsageError, match="was made by another TensorRT or on another GPU"):
        TimingCacheFile(path).load(Config())


def test_a_folder_is_no_file_of_timings(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--timing-cache: .* is not a file of timings"):
        TimingCacheFile(tmp_path).load(Config())
