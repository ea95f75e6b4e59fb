"""How many replicas there are to be."""

import re
from dataclasses import dataclass

from trtllm_lite.runtime.errors import UsageError

MOST = 256
_FORM = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


@dataclass(frozen=True)
class Scale:
    """As many replicas as the load asks for, within these two. Raises UsageError."""

    fewest: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.fewest <= self.most <= MOST:
            got = f"{self.fewest}" if self.fixed else f"{self.fewest}-{self.most}"
            raise UsageError(f"replicas: got {got}; allowed: N or FEWEST-MOST, from 1 to {MOST}")

    @property
    def fixed(self) -> bool:
        """Whether the number never changes."""
        return self.fewest == self.most


def parse_scale(text: str) -> Scale:
    """ "2" or "1-4". Raises UsageError."""
    found = _FORM.fullmatch(text.strip())
    if found is None:
        allowed = f"N or FEWEST-MOST, from 1 to {MOST}, such as 2 or 1-4"
        raise UsageError(f"replicas: got {text[:40]!r}; allowed: {allowed}")
    fewest = int(found[1])
    return Scale(fewest, fewest if found[2] is None else int(found[2]))
