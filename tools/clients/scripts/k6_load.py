"""k6: a ramp to 64 streams at once, with clients that leave, and what the books say afterwards."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from trtllm_lite.tools.clients.scripts import raw
from trtllm_lite.tools.clients.scripts.checks import Target

HERE = Path(__file__).parent
WAYS = ("finished", "aborted", "failed")


@dataclass(frozen=True)
class Load:
    """seen: what the clients counted. before, after: the server's metrics while it was idle."""

    seen: Mapping[str, int]
    before: Mapping[str, float]
    after: Mapping[str, float]

    def change(self, name: str) -> float:
        return raw.total(self.after, name) - raw.total(self.before, name)


def every_answer_is_whole_or_the_promised_503(target: Target) -> None:
    seen = _loaded(target).seen
    assert seen["wrong"] == 0, seen
    assert seen["whole"] >= 32, seen
    assert seen["refused"] >= 1, f"64 streams never filled the queue: {seen}"
    assert seen["left"] >= 1, seen


def the_server_is_healthy_all_the_while(target: Target) -> None:
    seen = _loaded(target).seen
    assert seen["unhealthy"] == 0, seen
    assert seen["healthy"] >= 20, seen


def the_metrics_count_what_the_clients_saw(target: Target) -> None:
    load = _loaded(target)
    ended = {way: load.change(f"requests_{way}_total") for way in WAYS}
    assert load.change("requests_accepted_total") == sum(ended.values()), ended
    assert ended["failed"] == 0, ended
    assert ended["finished"] >= load.seen["whole"], (ended, load.seen)
    assert _refused(load.after) - _refused(load.before) >= load.seen["refused"]


def the_server_answers_afterwards(target: Target) -> None:
    _loaded(target)
    assert raw.ask(target, "/health").status == 200
    assert raw.chat_text(target)


@cache
def _loaded(target: Target) -> Load:
    """One run of k6 for all checks."""
    before = raw.wait_until_idle(target)
    seen = _load(target)
    print(seen)  # noqa: T201  # for the log: what a run has come to
    return Load(seen, before, raw.wait_until_idle(target))


def _load(target: Target) -> dict[str, int]:
    """What the clients counted. Raises AssertionError when k6 did not run to its end."""
    folder = Path(target.folder)
    facts, summary = folder / "load-target.json", folder / "load-summary.json"
    facts.write_text(
        json.dumps({"url": target.url, "key": target.key, "model": target.model}), encoding="utf-8"
    )
    summary.unlink(missing_ok=True)
    program = Path(sys.executable).parent / "k6"
    command = [
        *(str(program), "run", "--quiet", "--no-usage-report"),
        *("-e", f"TARGET={facts}", "-e", f"SUMMARY={summary}", str(HERE / "load.js")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=folder)
    assert summary.exists(), (done.stdout + done.stderr)[-400:]
    made: dict[str, int] = json.loads(summary.read_text(encoding="utf-8"))
    return made


def _refused(series: Mapping[str, float]) -> float:
    return series.get('trtllm_lite_requests_rejected_total{reason="queue_full"}', 0.0)
