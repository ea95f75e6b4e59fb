"""Manifests as earlier releases wrote them: kept files, never written again."""

from pathlib import Path

import pytest

from trtllm_lite.runtime.manifest import MANIFEST_NAME, Manifest
from trtllm_lite.runtime.manifest_io import read_manifest

KEPT = Path(__file__).parent / "kept"


def opened(name: str, folder: Path) -> Manifest:
    (folder / MANIFEST_NAME).write_bytes((KEPT / name).read_bytes())
    return read_manifest(folder)


@pytest.mark.parametrize("name", sorted(path.name for path in KEPT.glob("bundle-*.json")))
def test_a_manifest_of_the_first_release_opens(name: str, tmp_path: Path) -> None:
    manifest = opened(name, tmp_path)
    assert manifest.model.architecture == "LlamaForCausalLM"
    assert manifest.graph("prefill").file == "prefill.onnx"
    assert manifest.graph("decode").file == "decode.onnx"
    assert manifest.limits.max_model_len == 128


def test_there_is_one_of_the_first_release() -> None:
    assert (KEPT / "bundle-1.0.json").is_file()
