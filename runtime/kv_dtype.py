"""How K and V lie in the cache, and which of the forms that a bundle has is used."""

from collections.abc import Sequence
from typing import Literal, get_args

from trtllm_lite.runtime.errors import UsageError

KVDtype = Literal["float32", "float16", "int8"]
"""Element type of the cache. All arithmetic is float32. int8 is in steps of each channel, found on
a calibration text."""
KVChoice = Literal["auto", "float32", "float16", "int8"]
"""A type of the cache by name, or the one that the bundle was made for."""


def check_kv_choice(wanted: str) -> None:
    """Raises UsageError for what is no KVChoice."""
    if wanted not in get_args(KVChoice):
        raise UsageError(f"kv_dtype: got {wanted!r}; allowed: {', '.join(get_args(KVChoice))}")


def choose_kv_dtype(wanted: KVChoice, available: Sequence[KVDtype]) -> KVDtype:
    """`available`: what the native graphs of a bundle have, its own choice first. Raises
    UsageError for another one."""
    if wanted == "auto":
        return available[0]
    if wanted not in available:
        raise UsageError(
            f"kv_dtype: got {wanted!r}; the bundle has {', '.join(available)}; export it with "
            f"--kv-dtype {wanted}"
        )
    return wanted
