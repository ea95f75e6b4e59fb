"""How many replicas an option asks for."""

import pytest

from trtllm_lite.runtime.errors import UsageError
from trtllm_lite.runtime.server.replicas.scale import Scale, parse_scale


@pytest.mark.parametrize(
    ("text", "scale", "fixed"),
    [
        ("1", Scale(1, 1), True),
        (" 2 ", Scale(2, 2), True),
        ("1-4", Scale(1, 4), False),
        ("256", Scale(256, 256), True),
    ],
)
def test_a_number_or_two(text: str, scale: Scale, fixed: bool) -> None:
    assert parse_scale(text) == scale
    assert scale.fixed == fixed


@pytest.mark.parametrize("text", ["", "0", "-1", "2-1", "0-2", "257", "auto", "1-2-3", "9" * 30])
def test_anything_else_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(UsageError, match="from 1 to 256"):
        parse_scale(text)
