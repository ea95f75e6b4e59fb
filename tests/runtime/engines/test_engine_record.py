"""engine.json: what is written is what is read, and a key is all that plans depend on."""

import json
from dataclasses import replace
from typing import Any

import pytest

from trtllm_lite.runtime.engines.record import (
    DimRange,
    EngineKey,
    EngineRecord,
    GraphKey,
    PlanRecord,
    Profile,
    parse_record,
    render_record,
)
from trtllm_lite.runtime.errors import BundleError
from trtllm_lite.runtime.manifest import FileEntry

ROWS = Profile((DimRange("batch", 1, 2, 4),))
GRAPH = GraphKey("decode", FileEntry("decode.onnx", 10, "a" * 64), (ROWS,))
KEY = EngineKey(
    "tensorrt_rtx",
    "1.7.1.116",
    ("sm86", "sm89"),
    None,
    4,
    64,
    64,
    128,
    FileEntry("weights.bin", 20, "b" * 64),
    (GRAPH,),
)
PLAN = PlanRecord("decode", FileEntry("decode.plan", 30, "c" * 64), 2, 2, 0, 0, 7, None, 5)
RECORD = EngineRecord(KEY, (PLAN,), "trtllm-lite 0.1.0")


def test_a_record_is_read_as_it_was_written() -> None:
    assert parse_record(render_record(RECORD)) == RECORD


CHANGES: list[dict[str, Any]] = [
    {"flavour": "tensorrt"},
    {"version": "1.7.2.0"},
    {"gpus": ("sm86",)},
    {"driver": "580.1"},
    {"max_num_seqs": 5},
    {"max_model_len": 65},
    {"max_num_batched_tokens": 65},
    {"capacity": 192},
    {"weights": replace(KEY.weights, sha256="d" * 64)},
    {"graphs": (replace(GRAPH, graph=replace(GRAPH.graph, sha256="d" * 64)),)},
    {"graphs": (replace(GRAPH, profiles=(Profile((DimRange("batch", 1, 4, 4),)),)),)},
    {"flags": ("no_tf32",)},
]


def test_every_change_of_the_key_is_another_fingerprint() -> None:
    assert {name for change in CHANGES for name in change} == set(EngineKey.__dataclass_fields__)
    made = [KEY.fingerprint, *(replace(KEY, **change).fingerprint for change in CHANGES)]
    assert len(set(made)) == len(made)
    assert all(len(name) == 32 for name in made)


def test_the_fingerprint_is_that_of_the_values() -> None:
    again = parse_record(render_record(RECORD)).key
    assert again is not KEY
    assert again.fingerprint == KEY.fingerprint


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"{", "not JSON"),
        (b"[]", "is not a record of trtllm-lite's TensorRT plans"),
        (b'{"format": "trtllm-lite-bundle"}', "is not a record of trtllm-lite's TensorRT plans"),
        (
            b'{"format": "trtllm-lite-engines", "format_version": "2.0"}',
            "has format_version '2.0', not '1.0'",
        ),
    ],
)
def test_foreign_records_are_refused(data: bytes, said: str) -> None:
    with pytest.raises(BundleError, match=said):
        parse_record(data)


def test_a_record_with_a_wrong_type_names_the_field() -> None:
    document = json.loads(render_record(RECORD))
    document["key"]["graphs"][0]["profiles"][0]["dims"][0]["max"] = "4"
    with pytest.raises(BundleError, match=r"graphs\[0\].profiles\[0\].dims\[0\].max"):
        parse_record(json.dumps(document).encode())
