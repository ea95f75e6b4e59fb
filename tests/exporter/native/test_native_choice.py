"""Which kernels run, when they were asked for and when they are left to choose."""

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trtllm_lite.runtime.backends import ort_graphs
from trtllm_lite.runtime.errors import BundleError, UsageError
from trtllm_lite.runtime.kernels import Kernels, find_kernels
from trtllm_lite.runtime.manifest_io import read_manifest, write_manifest
from trtllm_lite.runtime.native_table import GRAPHS, TABLE_NAME

Open = Callable[..., Any]
Exported = Callable[[str], Path]


@pytest.fixture
def int8_bundle(llama_bundle: Exported, copied: Callable[[Path], Path]) -> Path:
    return copied(llama_bundle("int8"))


def runs(open_kernels: Open, bundle: Path, kernels: str, **more: Any) -> str:
    session = open_kernels(bundle, kernels, **more)
    made: str = session.info.kernels
    session.close()
    return made


def change(bundle: Path, name: str, data: bytes) -> None:
    """Replace a file of a bundle, as an exporter with a fault would have written it."""
    (bundle / name).write_bytes(data)
    manifest = read_manifest(bundle)
    digest = hashlib.sha256(data).hexdigest()
    files = tuple(
        replace(f, size=len(data), sha256=digest) if f.path == name else f for f in manifest.files
    )
    write_manifest(bundle, replace(manifest, files=files))


def test_auto_takes_the_native_ones(int8_bundle: Path, open_kernels: Open) -> None:
    wanted = "native" if find_kernels().library is not None else "onnxruntime"
    assert runs(open_kernels, int8_bundle, "auto") == wanted
    assert runs(open_kernels, int8_bundle, "native") == "native"
    assert runs(open_kernels, int8_bundle, "onnxruntime") == "onnxruntime"


def test_both_phases_are_one_session(int8_bundle: Path, open_kernels: Open) -> None:
    """So that the weights are in memory once."""
    session = open_kernels(int8_bundle, "native")
    assert session.info.weights == "mapped"
    assert session.info.multi_token_decode
    graphs = session._graphs
    assert graphs["prefill"].session is graphs["decode"].session
    assert graphs["prefill"].io is not graphs["decode"].io


def test_a_second_session_uses_what_the_first_has_made(
    int8_bundle: Path, open_kernels: Open
) -> None:
    open_kernels(int8_bundle, "native").close()
    (made,) = (int8_bundle / ".cache").glob("native-*/native.bin")
    before = made.stat()
    open_kernels(int8_bundle, "native").close()
    assert (made.stat().st_ino, made.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"host_cache": None}, "they need the host cache"),
        ({"huge_pages": True}, "whose files have no huge pages"),
    ],
)
def test_options_they_cannot_honour(
    int8_bundle: Path, open_kernels: Open, more: dict[str, Any], said: str
) -> None:
    assert runs(open_kernels, int8_bundle, "auto", **more) == "onnxruntime"
    with pytest.raises(UsageError, match=f"kernels: got 'native'; not possible here: .*{said}"):
        open_kernels(int8_bundle, "native", **more)


def test_a_bundle_without_a_graph_for_them(
    llama_bundle: Exported, copied: Callable[[Path], Path], open_kernels: Open
) -> None:
    bundle = copied(llama_bundle("none"))
    assert runs(open_kernels, bundle, "auto") == "onnxruntime"
    with pytest.raises(UsageError, match="the bundle has no graph for them"):
        open_kernels(bundle, "native")


def test_a_machine_without_them(
    int8_bundle: Path, open_kernels: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "this processor has no AVX-512 VNNI"
    monkeypatch.setattr(ort_graphs, "find_kernels", lambda: Kernels(None, reason))
    assert runs(open_kernels, int8_bundle, "auto") == "onnxruntime"
    with pytest.raises(UsageError, match=f"not possible here: {reason}"):
        open_kernels(int8_bundle, "native")


def test_weights_that_cannot_be_prepared(int8_bundle: Path, open_kernels: Open) -> None:
    table = json.loads((int8_bundle / TABLE_NAME).read_bytes())
    table["weights"][0]["codes"][0] = 2**40
    change(int8_bundle, TABLE_NAME, json.dumps(table).encode())
    assert runs(open_kernels, int8_bundle, "auto") == "onnxruntime"
    with pytest.raises(UsageError, match="its weights cannot be prepared on this machine"):
        open_kernels(int8_bundle, "native")


def test_a_graph_that_cannot_be_loaded(
    int8_bundle: Path, open_kernels: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """`auto` says so in the log, forgets what it prepared, and runs without."""
    data = (int8_bundle / GRAPHS["fast"]).read_bytes()
    assert b"BlockLinear" in data
    change(int8_bundle, GRAPHS["fast"], data.replace(b"BlockLinear", b"BlockLinnar"))
    said = r"native-fast\.onnx.file: cannot be loaded: .*BlockLinnar"
    with pytest.raises(BundleError, match=said):
        open_kernels(int8_bundle, "native")
    with caplog.at_level(logging.WARNING, "trtllm_lite.runtime.backends.ort_graphs"):
        assert runs(open_kernels, int8_bundle, "auto") == "onnxruntime"
    assert "loading without the native kernels" in caplog.text
    assert not list((int8_bundle / ".cache").glob("native-*"))


def test_unknown_kernels(int8_bundle: Path, open_kernels: Open) -> None:
    with pytest.raises(UsageError, match="kernels: got 'cuda'; allowed: auto, native, onnxruntime"):
        open_kernels(int8_bundle, "cuda")


def test_exact_rounding_is_never_dropped(int8_bundle: Path, open_kernels: Open) -> None:
    """ONNX Runtime's operators cannot round so: asked for by name, that is an error."""
    with pytest.raises(UsageError, match=r"rounding: got 'exact'; only the native kernels .*asked"):
        open_kernels(int8_bundle, "onnxruntime", rounding="exact")
    with pytest.raises(UsageError, match="rounding: got 'fastest'; allowed: exact, fast"):
        open_kernels(int8_bundle, "onnxruntime", rounding="fastest")
    assert runs(open_kernels, int8_bundle, "auto", rounding="exact") == "native"
