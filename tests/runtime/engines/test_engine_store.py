"""Plans are handed out only when record, bundle, TensorRT and GPU fit, and only the very bytes."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from trtllm_lite.runtime.bundle import Bundle
from trtllm_lite.runtime.engines.record import (
    EngineKey,
    EngineRecord,
    GraphKey,
    PlanRecord,
    render_record,
)
from trtllm_lite.runtime.engines.store import Machine, Need, find_engine, stored_engines
from trtllm_lite.runtime.errors import BundleError
from trtllm_lite.runtime.manifest import FileEntry

MACHINE = Machine("tensorrt", "11.4.0.106", "sm89")
NEED = Need(max_num_seqs=4, capacity=128)


def key_of(bundle: Bundle) -> EngineKey:
    files = {f.path: f for f in bundle.manifest.files}
    graphs = tuple(GraphKey(g.phase, files[g.file], ()) for g in bundle.manifest)
    return EngineKey(
        "tensorrt", "11.4.0.106", ("sm89",), None, 4, 64, 64, 128, files["weights.bin"], graphs
    )


def put(bundle: Bundle, key: EngineKey) -> Path:
    """A complete set of plans of that key, whose bytes say which phase they are."""
    folder = bundle.folder / "engines" / key.fingerprint
    folder.mkdir(parents=True)
    plans = []
    for graph in key.graphs:
        name, data = f"{graph.phase}.plan", f"plan of {graph.phase}".encode()
        (folder / name).write_bytes(data)
        entry = FileEntry(name, len(data), hashlib.sha256(data).hexdigest())
        plans.append(PlanRecord(graph.phase, entry, 2, 2, 0, 0, None, None, None))
    record = EngineRecord(key, tuple(plans), "trtllm-lite")
    (folder / "engine.json").write_bytes(render_record(record))
    return folder


def test_the_plans_of_this_machine_are_found(engine_bundle: Bundle) -> None:
    put(engine_bundle, key_of(engine_bundle))
    found = find_engine(engine_bundle, MACHINE, NEED)
    for phase in ("prefill", "decode", "extend"):
        assert found.plan_bytes(phase) == f"plan of {phase}".encode()
    found.check_plans()


def test_no_plans(engine_bundle: Bundle) -> None:
    with pytest.raises(BundleError, match=r"no TensorRT plans; build them with `trtllm-lite build"):
        find_engine(engine_bundle, MACHINE, NEED)


MISFITS: dict[str, Callable[[EngineKey], EngineKey]] = {
    "was built by tensorrt_rtx, this machine has tensorrt": lambda k: replace(
        k, flavour="tensorrt_rtx"
    ),
    "was built by tensorrt 10.16.1.11, this machine has 11.4.0.106": lambda k: replace(
        k, version="10.16.1.11"
    ),
    "was built for sm80, sm90, this GPU is sm89": lambda k: replace(k, gpus=("sm80", "sm90")),
    "was built from other weights than weights.bin has now": lambda k: replace(
        k, weights=replace(k.weights, sha256="0" * 64)
    ),
    "was built from another decode graph than decode.onnx is now": lambda k: replace(
        k,
        graphs=tuple(
            replace(g, graph=replace(g.graph, sha256="0" * 64)) if g.phase == "decode" else g
            for g in k.graphs
        ),
    ),
    "has no plan for the extend graph": lambda k: replace(k, graphs=k.graphs[:2]),
    "takes 3 requests at once, 4 are asked for": lambda k: replace(k, max_num_seqs=3),
    "holds 64 tokens in a slot": lambda k: replace(k, capacity=64),
}


@pytest.mark.parametrize("said", MISFITS)
def test_the_cause_is_said_with_the_command(engine_bundle: Bundle, said: str) -> None:
    put(engine_bundle, MISFITS[said](key_of(engine_bundle)))
    with pytest.raises(BundleError) as caught:
        find_engine(engine_bundle, MACHINE, NEED)
    text = str(caught.value)
    assert said in text
    assert f"`trtllm-lite build {engine_bundle.folder}`" in text
    assert "\n" not in text


def test_of_several_the_smallest_that_fits_is_taken(engine_bundle: Bundle) -> None:
    key = key_of(engine_bundle)
    for capacity in (64, 1024, 256, 4096):
        put(engine_bundle, replace(key, capacity=capacity))
    assert find_engine(engine_bundle, MACHINE, NEED).record.key.capacity == 256
    assert find_engine(engine_bundle, MACHINE, Need(4, 257)).record.key.capacity == 1024


def test_a_changed_plan_is_not_handed_out(engine_bundle: Bundle) -> None:
    folder = put(engine_bundle, key_of(engine_bundle))
    found = find_engine(engine_bundle, MACHINE, NEED)
    (folder / "decode.plan").write_bytes(b"plan of decodf")
    with pytest.raises(BundleError, match="is not the plan that was built here, and is not loaded"):
        found.plan_bytes("decode")
    with pytest.raises(BundleError, match=r"decode\.plan"):
        found.check_plans()
    assert found.plan_bytes("prefill")


@pytest.mark.parametrize("data", [b"", b"plan of decode and more"])
def test_a_plan_of_another_size_is_not_handed_out(engine_bundle: Bundle, data: bytes) -> None:
    folder = put(engine_bundle, key_of(engine_bundle))
    (folder / "decode.plan").write_bytes(data)
    with pytest.raises(BundleError, match="changed or damaged"):
        find_engine(engine_bundle, MACHINE, NEED).plan_bytes("decode")


def test_a_plan_behind_a_link_is_not_handed_out(engine_bundle: Bundle, tmp_path: Path) -> None:
    folder = put(engine_bundle, key_of(engine_bundle))
    elsewhere = tmp_path / "elsewhere"
    (folder / "decode.plan").rename(elsewhere)
    (folder / "decode.plan").symlink_to(elsewhere)
    with pytest.raises(BundleError, match="symbolic link"):
        find_engine(engine_bundle, MACHINE, NEED).plan_bytes("decode")


def test_a_record_in_the_wrong_folder_is_refused(engine_bundle: Bundle) -> None:
    folder = put(engine_bundle, key_of(engine_bundle))
    folder.rename(folder.with_name("0" * 32))
    with pytest.raises(BundleError, match="belongs to another folder"):
        find_engine(engine_bundle, MACHINE, NEED)


def test_what_is_no_set_of_plans_is_not_looked_at(engine_bundle: Bundle) -> None:
    put(engine_bundle, key_of(engine_bundle))
    (engine_bundle.folder / "engines" / ".partial-123").mkdir()
    (engine_bundle.folder / "engines" / "notes.txt").write_text("mine")
    assert len(list(stored_engines(engine_bundle.folder))) == 1


def test_a_damaged_record_does_not_hide_the_others(engine_bundle: Bundle) -> None:
    key = key_of(engine_bundle)
    put(engine_bundle, key)
    (put(engine_bundle, replace(key, capacity=64)) / "engine.json").write_bytes(b"{")
    assert find_engine(engine_bundle, MACHINE, NEED).record.key == key
    with pytest.raises(BundleError, match="not JSON"):
        find_engine(engine_bundle, MACHINE, Need(4, 4096))


def test_of_equals_the_last_one_built_is_taken(engine_bundle: Bundle) -> None:
    key = key_of(engine_bundle)
    masked = replace(key, flags=("attention_masks",))
    for made, at in ((key, 200), (masked, 100)):
        os.utime(put(engine_bundle, made) / "engine.json", (at, at))
    assert find_engine(engine_bundle, MACHINE, NEED).record.key == key
    os.utime(engine_bundle.folder / "engines" / masked.fingerprint / "engine.json", (300, 300))
    assert find_engine(engine_bundle, MACHINE, NEED).record.key == masked
