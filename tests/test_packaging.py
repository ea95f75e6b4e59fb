"""What is built is what is in the repo, and it runs in an environment that has no exporter.

One copy of the tree (uncommitted files included), one sdist, two wheels and one clean environment
serve the whole file.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import trtllm_lite

ROOT = Path(__file__).parent.parent
PARTS = ("exporter", "models", "runtime", "tools")
BUILD = "import sys, setuptools.build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"

ASK = """
import json, sys
from trtllm_lite import LLM, SamplingParams
with LLM(sys.argv[1]) as llm:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    result = llm.generate(prompt_token_ids=json.loads(sys.argv[2]), params=params)
print(json.dumps([list(r.outputs[0].token_ids) for r in result]))
print(json.dumps([name for name in ("torch", "transformers", "onnx") if name in sys.modules]))
"""

ABSENT = """
import importlib.util, json
names = ("torch", "transformers", "onnx", "onnxscript", "safetensors", "gguf")
print(json.dumps([name for name in names if importlib.util.find_spec(name)]))
"""


def run(command: Sequence[str | Path], cwd: Path) -> str:
    """The command's stdout. A failure shows all that it printed."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def build(kind: str, source: Path, target: Path) -> Path:
    """Call the build backend as pip does: `kind` is build_sdist or build_wheel."""
    target.mkdir()
    lines = run([sys.executable, "-c", BUILD, kind, target], cwd=source).splitlines()
    return target / lines[-1]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean copy of what git would commit, links kept as links."""
    target = tmp_path_factory.mktemp("packaging") / "tree"
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in sorted(set(run(command, cwd=ROOT).split("\0")) - {""}):
        source, copy = ROOT / name, target / name
        if source.is_symlink() or source.is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy, follow_symlinks=False)
    return target


@pytest.fixture(scope="module")
def sdist(tree: Path) -> Path:
    return build("build_sdist", tree, tree.parent / "sdist")


@pytest.fixture(scope="module")
def wheel(tree: Path, sdist: Path) -> Path:
    """Built after the sdist, so that the two cannot disturb each other's build folder."""
    return build("build_wheel", tree, tree.parent / "wheel")


@pytest.fixture(scope="module")
def clean_python(wheel: Path) -> Path:
    """The interpreter of an environment that holds the wheel with [cpu], and nothing else."""
    folder = wheel.parent.parent / "clean"
    run([sys.executable, "-m", "venv", "--without-pip", folder], cwd=wheel.parent)
    python = folder / "bin" / "python"
    install(python, "-c", str(ROOT / "constraints.txt"), f"{wheel}[cpu]")
    return python


def install(python: Path, *arguments: str) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "--python", python, "install", "--quiet", *arguments], cwd=python.parent)


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


def expected_names(tree: Path) -> set[str]:
    """Where each module and data file of the tree belongs in the wheel."""
    found = {f"trtllm_lite/{p.name}" for p in (tree / "trtllm_lite").iterdir() if p.is_file()}
    for part in PARTS:
        for path in (tree / part).rglob("*"):
            kept = (
                path.suffix in (".py", ".json", ".toml", ".txt", ".gz") or path.name == "py.typed"
            )
            if path.is_file() and (kept or path.parent.name in ("static", "docs_page")):
                found.add(f"trtllm_lite/{path.relative_to(tree).as_posix()}")
    return found


def test_the_wheel_holds_every_module_once_and_nothing_else(tree: Path, wheel: Path) -> None:
    names = names_in(wheel)
    assert len(names) == len(set(names))
    code = {name for name in names if ".dist-info/" not in name}
    compiled = {name for name in code if name.endswith(".so")}
    assert compiled <= {"trtllm_lite/runtime/kernels/trtllm_lite_kernels.native.so"}
    assert code - compiled == expected_names(tree)
    info = f"trtllm_lite-{trtllm_lite.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"trtllm_lite", info}
    assert f"{info}/licenses/LICENSE" in names


def test_the_sdist_builds_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    run(["tar", "-xf", sdist], cwd=tmp_path)
    source = tmp_path / sdist.name.removesuffix(".tar.gz")
    assert names_in(build("build_wheel", source, tmp_path / "again")) == names_in(wheel)


def test_cpu_extra_alone_gives_the_command_line(clean_python: Path, tmp_path: Path) -> None:
    command = clean_python.parent / "trtllm-lite"
    assert trtllm_lite.__version__ in run([command, "--version"], cwd=tmp_path)
    assert "generate" in run([command, "--help"], cwd=tmp_path)
    assert "Usage" in run([clean_python, "-m", "trtllm_lite", "--help"], cwd=tmp_path)


def test_cpu_extra_alone_brings_no_exporter(clean_python: Path, tmp_path: Path) -> None:
    assert json.loads(run([clean_python, "-c", ABSENT], cwd=tmp_path)) == []


def test_cpu_extra_alone_generates(clean_python: Path, tmp_path: Path, tiny_bundle: Path) -> None:
    prompts = json.dumps([[1, 2, 3, 4, 5], [7, 6]])
    there = run([clean_python, "-c", ASK, tiny_bundle, prompts], cwd=tmp_path).splitlines()
    here = run([sys.executable, "-c", ASK, tiny_bundle, prompts], cwd=tmp_path).splitlines()
    assert json.loads(there[-1]) == []
    assert [len(tokens) for tokens in json.loads(there[-2])] == [8, 8]
    assert there == here


def test_an_editable_install_is_the_working_tree(
    tree: Path, clean_python: Path, tmp_path: Path
) -> None:
    """Comes last in the file: it replaces the wheel in the clean environment."""
    install(clean_python, "--no-deps", "--editable", str(tree))
    code = "import trtllm_lite.runtime.errors as e, trtllm_lite.tools as t; print(e.__file__)"
    where = Path(run([clean_python, "-c", code], cwd=tmp_path).strip())
    assert where.resolve() == (tree / "runtime" / "errors.py").resolve()
    new = tree / "runtime" / "brand_new.py"
    new.write_text("VALUE = 7\n")
    code = "from trtllm_lite.runtime.brand_new import VALUE; print(VALUE)"
    assert run([clean_python, "-c", code], cwd=tmp_path).strip() == "7"
    top = "import importlib.util as u; print([n for n in ('runtime', 'tests') if u.find_spec(n)])"
    assert run([clean_python, "-c", top], cwd=tmp_path).strip() == "[]"
