"""What a certificate says for itself in one line."""

import pytest

from trtllm_lite.tools.gates import outcome

WHOLE = {"passed": True, "layers_verified": 4, "num_layers": 4}


@pytest.mark.parametrize(
    ("certificate", "expected"),
    [
        (WHOLE, "passed"),
        ({**WHOLE, "skipped": []}, "passed"),
        ({**WHOLE, "layers_verified": 2}, "passed, first 2 of 4 layers only"),
        (
            {**WHOLE, "skipped": ["past 8197"]},
            "passed, without the prompts past 8197 (no memory for the reference)",
        ),
        ({**WHOLE, "passed": False, "failure": "logits"}, "failed: logits"),
        ({}, "failed"),
    ],
)
def test_outcome(certificate: dict[str, object], expected: str) -> None:
    assert outcome(certificate) == expected
