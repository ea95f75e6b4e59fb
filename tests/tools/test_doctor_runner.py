"""Steps that hang, crash or talk nonsense fail alone: the others go on in a new process."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from trtllm_lite.tools.doctor_checks import runner as runner_module
from trtllm_lite.tools.doctor_checks.jobs import (
    CORRECTNESS,
    SMOLLM2,
    TINY,
    Job,
    ModelPlan,
    Times,
    read_job,
    write_job,
)
from trtllm_lite.tools.doctor_checks.memory_checks import SameAsGraphs
from trtllm_lite.tools.doctor_checks.proof import ProofPlan
from trtllm_lite.tools.doctor_checks.result import CheckResult, Numbers, from_json
from trtllm_lite.tools.doctor_checks.runner import Runner
from trtllm_lite.tools.doctor_checks.sessions import JobBench
from trtllm_lite.tools.doctor_checks.steps import Step, steps_of, time_to_begin
from trtllm_lite.tools.doctor_checks.worker import run_steps
from trtllm_lite.tools.doctor_checks.workshop import Workshop

SCRIPT = """
import json, os, signal, sys, time
_, job = sys.argv
def say(value):
    print(json.dumps(value), flush=True)
if os.path.exists(job + ".no"):
    os.remove(job + ".no")
    sys.exit("ImportError: libcudart.so.13: no such file\\n\\n")
say({"ready": True})
for line in sys.stdin:
    name = line.strip()
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


def nothing(bench: object, shop: object) -> Numbers:
    return {}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job("cuda", "float16", TINY, str(tmp_path))


class Now:
    """A clock that stands still between results, which may put it on: seconds by name."""

    def __init__(self, **seconds: float) -> None:
        self._seconds, self._now = seconds, 0.0

    def __call__(self) -> float:
        return self._now

    def heard(self, result: CheckResult) -> None:
        self._now += self._seconds.get(result.name, 0.0)


def step(name: str, expected: float = 0.0) -> Step:
    times = Times(expected, 0.5 if name == "hang" else 30.0)
    return Step(name, times, nothing, makes=name == "make")


def run(
    job: Job, steps: list[str | Step], monkeypatch: pytest.MonkeyPatch, now: Now | None = None
) -> tuple[list[CheckResult], list[CheckResult]]:
    """Within 60 seconds of a clock that stands still."""
    folder = Path(job.folder)
    script = folder / "worker.py"
    script.write_text(SCRIPT)
    made = tuple(step(s) if isinstance(s, str) else s for s in steps)
    monkeypatch.setattr(runner_module, "steps_of", lambda _: made)
    monkeypatch.setattr(runner_module, "EXIT_S", 0.2)
    clock, told = now or Now(), list[CheckResult]()

    def tell(result: CheckResult) -> None:
        told.append(result)
        clock.heard(result)

    command = (sys.executable, str(script))
    return Runner(folder, 60.0, command, clock).run(job, tell), told


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


def test_a_process_that_does_not_start_fails_one_step(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    (Path(job.folder) / "job.json.no").touch()
    results, _ = run(job, ["a", "b"], monkeypatch)
    assert [r.status for r in results] == ["failed", "passed"]
    assert "code 1: ImportError: libcudart.so.13: no such file" in results[0].reason


def test_a_job_that_loses_process_after_process_is_given_up(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, _ = run(job, ["a", *["crash"] * 4, "b"], monkeypatch)
    assert [r.status for r in results] == ["passed", *["failed"] * 3, *["skipped"] * 2]
    assert {r.reason for r in results[4:]} == {"left out: 3 processes in a row were lost"}
    between, _ = run(job, ["crash", "crash", "a", "crash", "crash", "b"], monkeypatch)
    assert [r.status for r in between][-1] == "passed"


def test_what_comes_last_is_left_out(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is anything behind it begun, even what needs less."""
    results, told = run(job, ["a", step("b", 21.0), "c"], monkeypatch, Now(a=40.0))
    assert [r.status for r in results] == ["passed", "skipped", "skipped"]
    said = "left out: 20 s of 60 are left, and what comes next takes about 21"
    assert {r.reason for r in results[1:]} == {said}
    assert told == results
    enough, _ = run(job, ["a", step("b", 20.0), "c"], monkeypatch, Now(a=40.0))
    assert [r.status for r in enough] == ["passed"] * 3


def test_what_others_need_is_not_made_without_time_for_one_of_them(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str | Step] = [step("make", 40.0), step("a", 21.0), "b"]
    assert {r.status for r in run(job, steps, monkeypatch)[0]} == {"skipped"}
    steps = [step("make", 40.0), step("a", 20.0), step("b", 61.0)]
    assert [r.status for r in run(job, steps, monkeypatch)[0]] == ["passed", "passed", "skipped"]


def test_the_end_of_all_time_is_no_failure(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    now = Now(a=59.8, hang=10.0)
    results, _ = run(job, ["a", "hang", "b"], monkeypatch, now)
    assert [r.status for r in results] == ["passed", "skipped", "skipped"]
    assert results[1].reason.startswith("not finished: the time of all checks was over")


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
    large = [step.name for step in steps_of(Job("cuda", "float16", SMOLLM2, "x"))]
    assert large[-5:] == [SameAsGraphs.name, *(f"throughput at {n}" for n in (1, 8, 32, 128))]
    both = steps_of(Job("cuda", "float16", replace(TINY, checks="all"), "x"))
    assert {s.name for s in both} == {"export", *names, *large}


@pytest.mark.parametrize("target", ["cuda", "tensorrt"])
@pytest.mark.parametrize("model", [TINY, SMOLLM2], ids=lambda m: m.shape)
def test_nothing_is_expected_to_take_longer_than_it_may(model: ModelPlan, target: str) -> None:
    steps = steps_of(Job(target, "float16", model, "x"))
    assert [s.name for s in steps if not 0 < s.times.expected < s.times.most] == []
    assert time_to_begin(steps) > time_to_begin(steps[1:])


def test_all_that_is_expected_fits() -> None:
    """On a machine as it is expected nothing is left out."""
    models, targets = ProofPlan().models, ("cuda", "tensorrt")
    jobs = [Job(target, "float16", model, "x") for model in models for target in targets]
    jobs += [Job("tensorrt", "float16", TINY, "x", form=form) for form in ProofPlan().forms]
    expected = sum(s.times.expected for job in jobs for s in steps_of(job))
    assert expected < ProofPlan().limit_s < 480


def test_the_worker_writes_a_line_for_each_step(job: Job) -> None:
    """Without a bundle every check says what is missing; nothing ends the worker."""
    lines: list[str] = []
    names = [check.name for check in CORRECTNESS]
    shop = Workshop()
    run_steps(job, [f"{name}\n" for name in names], JobBench(job, shop), shop, lines.append)
    ready, *values = [json.loads(line) for line in lines]
    assert ready == {"ready": True}
    results = [from_json(v["result"]) for v in values]
    assert [r.name for r in results] == names
    assert {(r.status, r.reason) for r in results} == {
        ("skipped", "there is no bundle: see export")
    }
