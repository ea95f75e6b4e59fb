"""The repo's shape: packages, links, import boundaries, sizes. What no other checker looks at."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import trtllm_lite

ROOT = Path(__file__).parent.parent
PARTS = ("exporter", "models", "runtime", "tools")
HEAVY = ("torch", "transformers", "onnx", "onnxscript", "onnx_ir", "safetensors", "gguf")
FILE_LINES, CLASS_LINES, FUNCTION_LINES = 400, 250, 50

# Beyond numpy and the standard library: which runtime file may import what.
THIRD_PARTY = {
    "backends/onnxruntime.py": {"onnxruntime"},
    "tokenizer.py": {"tokenizers"},
    "chat_template.py": {"jinja2"},
    "template_sandbox.py": {"jinja2"},
    "llguidance_grammar.py": {"llguidance"},
    "server/replicas/ray_fleet.py": {"ray"},
}
# What the server alone may import, in any of its files.
WEB = {
    *("starlette", "uvicorn", "h11", "pydantic", "orjson", "prometheus_client", "opentelemetry"),
}

IMPORT_ALL = """
import importlib, pkgutil, sys
heavy = {heavy!r}
sys.modules.update(dict.fromkeys((*heavy, "onnxruntime")))
import trtllm_lite.runtime as runtime
names = [m.name for m in pkgutil.walk_packages(runtime.__path__, "trtllm_lite.runtime.")]
backend = "trtllm_lite.runtime.backends.onnxruntime"
extra = "trtllm_lite.runtime.server.replicas.ray_fleet"
for name in names:
    if name not in (backend, extra):
        importlib.import_module(name)
del sys.modules["onnxruntime"]
if backend in names:
    importlib.import_module(backend)
parts = ("trtllm_lite.exporter", "trtllm_lite.models", "trtllm_lite.tools")
sys.exit(", ".join(name for name in sys.modules if name.startswith(parts)) or 0)
"""


def code_files() -> list[Path]:
    """Every Python file of the package, once (the links in trtllm_lite/ are not followed)."""
    parts = (path for part in PARTS for path in (ROOT / part).rglob("*.py"))
    return sorted([*parts, *(ROOT / "trtllm_lite").glob("*.py")])


def files_of_tests() -> list[Path]:
    return sorted((ROOT / "tests").rglob("*.py"))


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(tree: ast.Module) -> Iterator[str]:
    """Top-level names of all imports, also of those inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


def test_every_package_is_built() -> None:
    found = {
        ".".join(("trtllm_lite", *init.parent.relative_to(ROOT).parts))
        for part in PARTS
        for init in (ROOT / part).rglob("__init__.py")
    }
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(config["tool"]["setuptools"]["packages"]) == found | {"trtllm_lite"}


def test_every_module_lies_in_a_package() -> None:
    orphans = [name_of(p) for p in code_files() if not (p.parent / "__init__.py").exists()]
    assert orphans == []


@pytest.mark.skipif(sys.platform == "win32", reason="git checks links out as files")
@pytest.mark.parametrize("part", PARTS)
def test_checkers_see_the_part(part: str) -> None:
    link = ROOT / "trtllm_lite" / part
    assert link.is_symlink()
    assert link.readlink() == Path("..") / part
    assert link.resolve() == (ROOT / part).resolve()


def test_runtime_imports_without_heavy_packages() -> None:
    code = IMPORT_ALL.format(heavy=HEAVY)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_runtime_files_import_only_what_is_theirs() -> None:
    allowed = sys.stdlib_module_names | {"numpy", "trtllm_lite"}
    runtime = ROOT / "runtime"
    wrong = {
        name_of(path): extra
        for path in runtime.rglob("*.py")
        if (
            extra := set(imported(parse(path)))
            - allowed
            - THIRD_PARTY.get(path.relative_to(runtime).as_posix(), set())
            - (WEB if runtime / "server" in path.parents else set())
        )
    }
    assert wrong == {}


def too_long(path: Path, kinds: tuple[type[ast.stmt], ...], limit: int) -> Iterator[str]:
    for node in ast.walk(parse(path)):
        if isinstance(node, kinds) and node.end_lineno is not None:
            lines = node.end_lineno - node.lineno + 1
            if lines > limit:
                yield f"{name_of(path)}:{node.lineno} has {lines} lines, limit {limit}"


def test_files_fit_on_few_screens() -> None:
    lengths = {
        name_of(p): len(p.read_text().splitlines()) for p in (*code_files(), *files_of_tests())
    }
    assert {name: lines for name, lines in lengths.items() if lines > FILE_LINES} == {}


def test_classes_are_small() -> None:
    files = (*code_files(), *files_of_tests())
    assert [x for p in files for x in too_long(p, (ast.ClassDef,), CLASS_LINES)] == []


def test_functions_fit_on_a_screen() -> None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    assert [x for p in code_files() for x in too_long(p, kinds, FUNCTION_LINES)] == []


def test_the_size_check_measures() -> None:
    here = Path(__file__)
    assert list(too_long(here, (ast.FunctionDef,), limit=1)) != []
    assert list(too_long(here, (ast.FunctionDef,), limit=len(here.read_text()))) == []


def test_nothing_imports_relatively() -> None:
    relative = [
        f"{name_of(path)}:{node.lineno}"
        for path in (*code_files(), *files_of_tests())
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ImportFrom) and node.level > 0
    ]
    assert relative == []


def test_no_code_from_a_checkpoint_is_trusted() -> None:
    trusting = [
        f"{name_of(path)}:{node.value.lineno}"
        for path in (*code_files(), *files_of_tests())
        for node in ast.walk(parse(path))
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code"
        if not (isinstance(node.value, ast.Constant) and node.value.value is False)
    ]
    assert trusting == []


def test_changelog_starts_with_this_version() -> None:
    versions = re.findall(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == trtllm_lite.__version__


def test_every_public_name_can_be_imported() -> None:
    for name in trtllm_lite.__all__:
        assert getattr(trtllm_lite, name) is not None
