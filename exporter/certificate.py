"""The parity certificate: what was compared, what came out, and which limits it had to keep."""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

CERTIFICATE_VERSION = "1.1"
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
    """One prompt: tokens compared, the first greedy divergence if any, and the logits' distance:
    `kl` of the worst step, `mean_kl` over the steps, in nats."""

    name: str
    prompt_tokens: int
    new_tokens: int
    first_divergence: int | None
    max_abs: float
    kl: float
    mean_kl: float = 0.0


@dataclass(frozen=True)
class QualityRecord:
    """One phase of a quantized bundle on a text: its perplexity and the reference's, the mean
    KL(reference || bundle) in nats a token, the share of equal most likely tokens. `text`: which
    text; `format`: of the phase's projections; `kv_dtype`: of the cache."""

    phase: str
    format: str
    text: str
    ppl: float
    ref_ppl: float
    kl: float
    top1: float
    num_tokens: int
    kv_dtype: str = "float32"


@dataclass(frozen=True)
class Certificate:
    """All of parity.json. `layers_verified` is below `num_layers` when the reference did not fit
    in memory; `skipped` names prompts that it could not hold; `quality` is empty for plain
    weights; `failure` is one line, None when every gate passed; `arithmetic` is how the bundle's
    side was computed."""

    gates: tuple[Gate, ...]
    prompts: tuple[PromptParity, ...]
    logit_scale: float
    reference: str
    num_layers: int
    layers_verified: int
    failure: str | None = None
    arithmetic: str = ""
    skipped: tuple[str, ...] = ()
    quality: tuple[QualityRecord, ...] = ()
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
