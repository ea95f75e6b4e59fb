"""One suite's run: its files, its environment, pytest, and the results."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import trtllm_lite
from trtllm_lite.tools.compare_peers.prepare import Step, run_steps
from trtllm_lite.tools.conformance.fetch import Tell, fetched
from trtllm_lite.tools.conformance.judge import ConformanceError, Result
from trtllm_lite.tools.conformance.suites import Suite

ROOT = Path(trtllm_lite.__file__).resolve().parent.parent
TEST_SECONDS = 300
END_SECONDS = 120
FINISHED = (0, 1, 5)  # pytest's codes: all passed, some failed, none left to run

# The checkout goes to the end of the path, so that the environment's own packages come first.
BOOT = "import sys; sys.path.append(sys.argv.pop(1)); import pytest; sys.exit(pytest.main())"


@dataclass(frozen=True)
class Place:
    """Where a run keeps what it fetches, installs and writes."""

    folder: Path

    @property
    def logs(self) -> Path:
        return self.folder / "log"

    @property
    def settings(self) -> Path:
        """pytest's, which are none: otherwise it looks for some in the folders above."""
        return self.folder / "pytest.ini"

    def environment(self, suite: Suite) -> Path:
        return self.folder / f"env-{suite.name}"

    def log(self, suite: Suite) -> Path:
        """What pytest writes."""
        return self.logs / f"{suite.name}.txt"

    def results(self, suite: Suite) -> Path:
        return self.logs / f"{suite.name}.jsonl"


def run_suite(suite: Suite, place: Place, bundle: Path, tell: Tell) -> list[Result]:
    """Fetch, install and run a suite. Raises ConformanceError when it does not come to its end."""
    place.logs.mkdir(parents=True, exist_ok=True)
    place.settings.write_text("[pytest]\n", encoding="utf-8")
    home = suite.home
    if suite.archive is not None:
        home = fetched(suite.archive, place.folder / "cache", tell)
    if home is None:
        raise ConformanceError(f"{suite.name} has neither an archive nor a folder")
    run_steps(environment_steps(suite, place), place.logs, tell, keep_going=False)
    tell(f"running {suite.name}; pytest writes {place.log(suite)}")
    code = run_to_the_end(command(suite, place, home, bundle), home, place.log(suite))
    if code not in FINISHED:
        raise ConformanceError(
            f"pytest ended {suite.name} with code {code}; see {place.log(suite)}"
        )
    return read_results(place.results(suite))


def run_to_the_end(words: Sequence[str], home: Path, log: Path) -> int:
    """The exit code. pytest is interrupted where we are, and given time to end its servers."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            words, cwd=home, env=environment(), stdout=file, stderr=subprocess.STDOUT
        )
    try:
        return process.wait()
    except BaseException:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        raise


def environment_steps(suite: Suite, place: Place) -> list[Step]:
    """A virtual environment with the suite's requirements; others install again."""
    folder = place.environment(suite)
    python = folder / "bin" / "python"
    digest = hashlib.sha256("\n".join(suite.requirements).encode()).hexdigest()[:12]
    install = (str(python), "-m", "pip", "install", "--quiet", *suite.requirements)
    return [
        Step(f"environment of {suite.name}", python, (sys.executable, "-m", "venv", str(folder))),
        Step(f"packages of {suite.name}", folder / f".installed-{digest}", install),
    ]


def command(suite: Suite, place: Place, home: Path, bundle: Path) -> list[str]:
    """pytest in the suite's environment, with our plugins and none of its own caches."""
    module = (sys.executable, "-m", "trtllm_lite", "serve")
    serve = (*module, str(bundle.resolve()), *suite.serve)
    plugins = [word for name in suite.plugins for word in ("-p", name)]
    return [
        *(str(place.environment(suite) / "bin" / "python"), "-c", BOOT, str(ROOT)),
        *(*plugins, "-p", "no:cacheprovider", "-c", str(place.settings)),
        *("--rootdir", str(home), f"--timeout={TEST_SECONDS}", "--tb=native", "-q"),
        "--continue-on-collection-errors",
        *("--expected", str(suite.expected), "--results", str(place.results(suite))),
        *("--serve-log", str(place.logs / f"{suite.name}-servers.txt")),
        *("--serve-bundle", str(bundle.resolve())),
        *(f"--serve={word}" for word in serve),
        *suite.options,
        *suite.tests,
    ]


def environment() -> dict[str, str]:
    """The caller's variables without settings of Python and pytest; no package fetches models."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST"))}
    offline = {"HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    return kept | offline | {"PYTHONDONTWRITEBYTECODE": "1"}


def read_results(path: Path) -> list[Result]:
    """Every test once, in alphabetical order. Raises ConformanceError for a damaged file."""
    made: dict[str, Result] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        result = Result.from_json(json.loads(line))
        made[result.test] = result
    return [made[test] for test in sorted(made)]
