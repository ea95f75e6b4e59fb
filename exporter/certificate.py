"""The parity certificate: what was compared, what came out, and which limits it had to keep."""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

CERTIFICATE_VERSION = "1.0"
UNBOUNDED = 1e300


def finite(value: float) -> float:
    """The value, or UNBOUNDED for infinity and NaN, which JSON lacks."""
    return value if math.isfinite(value) else UNBOUNDED


@dataclass(frozen=True)
class Gate:
    """One check: `value` has to stay within `limit` (at least it for agreement, else at most)."""

    name: str
    passed: bool
    value: float
    limit: float
    meaning: str = ""


@dataclass(frozen=True)
class PromptParity:
    """One prompt: tokens compared, the first greedy divergence if any, and the logits' distance."""

    name: str
    prompt_tokens: int
    new_tokens: int
    first_divergence: int | None
    max_abs: float
    kl: float


@dataclass(frozen=True)
class Certificate:
    """All of parity.json. `layers_verified` is below `num_layers` when the reference did not fit
    in memory; `skipped` names prompts that it could not hold; `failure` is one line, None when
    every gate passed."""

    gates: tuple[Gate, ...]
    prompts: tuple[PromptParity, ...]
    logit_scale: float
    reference: str
    num_layers: int
    layers_verified: int
    failure: str | None = None
    skipped: tuple[str, ...] = ()
    tools: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    peak_rss_bytes: int = 0
    version: str = CERTIFICATE_VERSION

    @property
    def passed(self) -> bool:
        return all(gate.passed for gate in self.gates)

    def to_json(self) -> dict[str, Any]:
        return {"passed": self.passed, **asdict(self)}

    def write(self, path: Path) -> None:
        text = json.dumps(self.to_json(), indent=1, ensure_ascii=False, allow_nan=False)
        path.write_text(text + "\n", encoding="utf-8")
