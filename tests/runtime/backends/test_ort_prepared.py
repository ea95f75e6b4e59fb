"""Prepared graphs: the same results, the weights once in the file and once in memory."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest

from trtllm_lite.runtime.backends.base import Batch, SessionOptions
from trtllm_lite.runtime.backends.onnxruntime import open_session, version
from trtllm_lite.runtime.backends.ort_prepared import DATA_NAME, ort_preparer
from trtllm_lite.runtime.backends.ort_session import OrtSession
from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.cache_entry import STAMP_NAME, stamp_key, write_stamp
from trtllm_lite.runtime.errors import BundleError
from trtllm_lite.runtime.host_cache import HostCache, PrepareError
from trtllm_lite.runtime.manifest import Phase
from trtllm_lite.runtime.progress import NoProgress

OPTIONS = SessionOptions(2, 64, intra_op_num_threads=1)
PHASES: tuple[Phase, ...] = ("prefill", "decode")
LARGE = 4 * 2**20
"""Bytes of one of the four matrices of the heavy bundle."""


@pytest.fixture
def cached(heavy_bundle: Bundle) -> SessionOptions:
    return replace(OPTIONS, host_cache=HostCache("b" * 64, "h" * 64, (heavy_bundle.folder / "c",)))


def batch(phase: Phase) -> Batch:
    ids = np.array([[3, 5, 7], [11, 13, 17]])
    zeros, all_three = np.zeros(2, np.int32), np.full(2, 3, np.int32)
    return Batch(phase, 0, ids, zeros, all_three, all_three, np.array([[2, 0], [1, 2]]))


def entry(options: SessionOptions) -> Path:
    assert options.host_cache is not None
    (folder,) = (p for p in options.host_cache.roots[0].iterdir() if p.is_dir())
    return folder


def results(session: OrtSession) -> list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    return [session.run(batch(phase)).copy() for phase in PHASES]


def test_prepared_graphs_give_the_same_results(
    heavy_bundle: Bundle, cached: SessionOptions
) -> None:
    plain, mapped = open_session(heavy_bundle, OPTIONS), open_session(heavy_bundle, cached)
    assert (plain.info.weights, mapped.info.weights) == ("private", "mapped")
    for a, b in zip(results(plain), results(mapped), strict=True):
        assert np.abs(a).max() > 0.01
        np.testing.assert_array_equal(a, b)


def test_weights_of_both_graphs_lie_once_in_the_file(
    heavy_bundle: Bundle, cached: SessionOptions
) -> None:
    open_session(heavy_bundle, cached).close()
    folder = entry(cached)
    files = {p.name for p in folder.iterdir()}
    assert files == {DATA_NAME, STAMP_NAME, "prefill.onnx", "decode.onnx"}
    size = (folder / DATA_NAME).stat().st_size
    # Each matrix as it is and packed, and embedding and head.
    assert 2 * 4 * LARGE <= size < 2 * 4 * LARGE + LARGE
    assert (folder / "decode.onnx").stat().st_size < 2**16


def test_a_second_session_shares_the_weights_of_the_first(
    heavy_bundle: Bundle, cached: SessionOptions, memory_in_use: Callable[[], int]
) -> None:
    sessions = [open_session(heavy_bundle, replace(cached, phases=("decode",)))]
    sessions[0].run(batch("decode"))
    before = memory_in_use()
    sessions.append(open_session(heavy_bundle, cached))
    results(sessions[1])
    shared = memory_in_use() - before
    sessions.append(open_session(heavy_bundle, OPTIONS))
    results(sessions[2])
    private = memory_in_use() - before - shared
    assert shared < 2 * LARGE  # two more graphs with four matrices each
    assert private > 4 * LARGE


def test_a_huge_page_copy_is_private(heavy_bundle: Bundle, cached: SessionOptions) -> None:
    session = open_session(heavy_bundle, replace(cached, huge_pages=True))
    assert session.info.weights == "private"
    assert open_session(heavy_bundle, replace(OPTIONS, huge_pages=False)).info.huge_page_bytes == 0
    for a, b in zip(results(session), results(open_session(heavy_bundle, OPTIONS)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_prepared_files_that_cannot_be_loaded_are_dropped_and_not_needed(
    heavy_bundle: Bundle, cached: SessionOptions, caplog: pytest.LogCaptureFixture
) -> None:
    open_session(heavy_bundle, cached).close()
    folder = entry(cached)
    key = stamp_key(folder)
    (folder / "decode.onnx").write_bytes(b"not a graph")
    (folder / STAMP_NAME).unlink()
    assert key is not None
    write_stamp(folder, key)
    with caplog.at_level(logging.WARNING):
        session = open_session(heavy_bundle, cached)
    assert session.info.weights == "private"
    assert "without the prepared files" in caplog.text
    assert not folder.exists()
    assert open_session(heavy_bundle, cached).info.weights == "mapped"


def test_a_graph_that_cannot_be_loaded_is_refused_with_a_cache_as_without(
    heavy_bundle: Bundle, cached: SessionOptions
) -> None:
    (heavy_bundle.folder / "decode.onnx").write_bytes(b"not a graph")
    with pytest.raises(BundleError) as caught:
        open_session(heavy_bundle, cached)
    assert caught.value.field == "graphs[1].file"


def test_what_onnxruntime_refuses_to_save_is_a_prepare_error(
    heavy_bundle: Bundle, tmp_path: Path
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("two\nlines")

    fake = SimpleNamespace(**vars(onnxruntime))
    fake.InferenceSession = refuse
    preparer = ort_preparer(fake, {"decode": heavy_bundle.graph_path("decode")})
    folder = tmp_path / "made"
    folder.mkdir()
    with pytest.raises(PrepareError, match=r"decode\.onnx cannot be prepared: two lines"):
        preparer.prepare(folder, NoProgress())
    assert [p.name for p in folder.iterdir()] == [DATA_NAME]


def test_files_are_made_again_for_another_version(heavy_bundle: Bundle) -> None:
    other = SimpleNamespace(**vars(onnxruntime))
    other.__version__ = "9.9"
    paths = {phase: heavy_bundle.graph_path(phase) for phase in PHASES}
    assert ort_preparer(other, paths).version != ort_preparer(onnxruntime, paths).version
    assert version() == onnxruntime.__version__
