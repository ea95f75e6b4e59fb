"""Steps that hang, crash or talk nonsense fail alone: the others go on in a new process."""

import json
import sys
from pathlib import Path

import pytest

from trtllm_lite.tools.doctor_checks import runner as runner_module
from trtllm_lite.tools.doctor_checks.jobs import (
    CORRECTNESS,
    SMOLLM2,
    TINY,
    Job,
    read_job,
    write_job,
)
from trtllm_lite.tools.doctor_checks.result import CheckResult, Numbers, from_json
from trtllm_lite.tools.doctor_checks.runner import Runner
from trtllm_lite.tools.doctor_checks.worker import Step, run_steps, steps_of

SCRIPT = """
import json, os, signal, sys, time
_, job, *names = sys.argv
def say(value):
    print(json.dumps(value), flush=True)
for name in names:
    if name == "no start":
        sys.exit("ImportError: libcudart.so.13: no such file\\n\\n")
    say({"begin": name})
    if name == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "hang":
        time.sleep(60)
    if name == "nonsense":
        print("no JSON", flush=True)
    if name == "close":
        os.close(1)
        time.sleep(60)
    if name == "quit":
        sys.exit(3)
    assert json.load(open(job))["target"] == "cuda"
    say({"result": {"name": name, "lane": "l", "status": "passed", "reason": "",
                    "numbers": {"pid": os.getpid()}, "seconds": 0.5}})
"""


def nothing(bench: object) -> Numbers:
    return {}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job("cuda", "float16", TINY, str(tmp_path))


def run(
    job: Job, names: list[str], monkeypatch: pytest.MonkeyPatch, limit_s: float = 60.0
) -> tuple[list[CheckResult], list[CheckResult]]:
    folder = Path(job.folder)
    script = folder / "worker.py"
    script.write_text(SCRIPT)
    steps = tuple(Step(n, 0.5 if n == "hang" else 30.0, nothing) for n in names)
    monkeypatch.setattr(runner_module, "steps_of", lambda _: steps)
    monkeypatch.setattr(runner_module, "EXIT_S", 0.2)
    told: list[CheckResult] = []
    results = Runner(folder, limit_s, (sys.executable, str(script))).run(job, told.append)
    return results, told


def test_everything_in_one_process(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    results, told = run(job, ["a", "b", "c"], monkeypatch)
    assert [(r.name, r.status, r.seconds) for r in results] == [
        ("a", "passed", 0.5),
        ("b", "passed", 0.5),
        ("c", "passed", 0.5),
    ]
    assert len({r.numbers["pid"] for r in results}) == 1
    assert told == results


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("crash", "its process ended with signal 11 (Segmentation fault)"),
        ("hang", "took longer than 0.5 s"),
        ("quit", "its process ended with code 3"),
        ("close", "its process hangs at its end"),
        ("no start", "code 1: ImportError: libcudart.so.13: no such file"),
    ],
)
def test_a_bad_step_fails_alone(
    job: Job, monkeypatch: pytest.MonkeyPatch, bad: str, said: str
) -> None:
    results, _ = run(job, ["a", bad, "b", "c"], monkeypatch)
    assert [(r.name, r.status) for r in results] == [
        ("a", "passed"),
        (bad, "failed"),
        ("b", "passed"),
        ("c", "passed"),
    ]
    assert said in results[1].reason
    assert results[1].lane == job.lane
    assert results[0].numbers["pid"] != results[2].numbers["pid"] == results[3].numbers["pid"]


def test_what_is_no_line_of_the_protocol(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    results, _ = run(job, ["nonsense", "b"], monkeypatch)
    assert [r.status for r in results] == ["failed", "passed"]
    assert results[0].reason == "its process said something else than a result"


def test_the_time_of_all_ends_the_rest(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    results, told = run(job, ["a", "b"], monkeypatch, limit_s=0.0)
    assert [(r.status, r.reason) for r in results] == [("skipped", "no time was left for it")] * 2
    assert told == results
    late, _ = run(job, ["a", "hang", "b"], monkeypatch, limit_s=1.2)
    assert late[1].status == "failed"
    assert "took longer than" in late[1].reason


def test_a_job_is_what_was_written(tmp_path: Path) -> None:
    job = Job("tensorrt", "bfloat16", SMOLLM2, "/somewhere", 3e12)
    write_job(job, tmp_path / "job.json")
    assert read_job(tmp_path / "job.json") == job
    assert job.lane == "tensorrt, SmolLM2-135M's shape"


def test_steps_of_each_target() -> None:
    names = [check.name for check in CORRECTNESS]
    tiny = [step.name for step in steps_of(Job("tensorrt", "float16", TINY, "x"))]
    assert tiny == ["export", "build plans", *names]
    assert [s.name for s in steps_of(Job("cuda", "float16", TINY, "x"))] == ["export", *names]
    large = steps_of(Job("cuda", "float16", SMOLLM2, "x"))
    assert [step.name for step in large][-2:] == ["time per token of one request", "throughput"]


def test_the_worker_writes_a_line_before_and_after_each_step(job: Job) -> None:
    """Without a bundle every check says what is missing; nothing ends the worker."""
    from trtllm_lite.tools.doctor_checks.openers import opener_of
    from trtllm_lite.tools.doctor_checks.sessions import JobBench

    lines: list[str] = []
    names = [check.name for check in CORRECTNESS]
    run_steps(job, names, JobBench(job, opener_of("cuda")), lines.append)
    values = [json.loads(line) for line in lines]
    assert [v["begin"] for v in values[::2]] == names
    results = [from_json(v["result"]) for v in values[1::2]]
    assert [r.name for r in results] == names
    assert {(r.status, r.reason) for r in results} == {
        ("skipped", "there is no bundle: see export")
    }
