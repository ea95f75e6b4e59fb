"""What `--target cuda` can be asked for."""

from pathlib import Path
from typing import Any

import pytest

from trtllm_lite.exporter.options import ExportOptions
from trtllm_lite.runtime.errors import UsageError


def made(**options: Any) -> ExportOptions:
    return ExportOptions(model="m", output=Path("o"), target="cuda", **options)


def test_it_computes_in_float16_unless_told_otherwise() -> None:
    assert made().dtype == "float16"
    assert made(dtype="bfloat16").dtype == "bfloat16"


def test_weights_have_one_format_in_both_phases() -> None:
    assert made(quantize="int8").prefill_format == "same"
    assert made(quantize="none").prefill_format is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float32"}, "no float32 kernel on CUDA; allowed .*: float16, bfloat16"),
        ({"quantize": "int8", "prefill_format": "w8a8"}, "no kernel on CUDA"),
        ({"quantize": "fp8"}, "only TensorRT"),
        ({"quantize": "int8", "kv_dtype": "int8"}, "cache has the type of --dtype"),
    ],
)
def test_what_it_cannot_do(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        made(**options)
