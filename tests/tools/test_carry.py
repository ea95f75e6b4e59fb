"""Files go over in pieces and come out whole, or the piece that is missing or wrong is named."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from trtllm_lite.tools import carry
from trtllm_lite.tools.carry import (
    LIST,
    LIST_BYTES,
    PACKAGES,
    CarryError,
    fetch,
    first_run,
    join,
    pack,
    take,
)

ROOT = Path(__file__).parents[2]
MOST = LIST_BYTES + 1000


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """Five files: of no byte, smaller than a transfer, just as large, and larger."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name, size in (("a", 0), ("b", 300), ("c", 700), ("d", 2500), ("e", 1)):
        (folder / f"{name}.whl").write_bytes(os.urandom(size))
    return folder


def carried(wheels: Path, folder: Path) -> tuple[list[Path], Path]:
    count = pack(wheels, folder / "out", MOST)
    return [folder / "out" / f"{n:02}" for n in range(1, count + 1)], folder / "store"


def test_there_and_back(wheels: Path, tmp_path: Path) -> None:
    folders, store = carried(wheels, tmp_path)
    assert len(folders) == 4
    for folder in folders:
        assert sum(path.stat().st_size for path in folder.iterdir()) <= MOST
    told = [take(folder, store) for folder in reversed(folders)]
    assert told[-1][0] == told[-1][1]
    assert [kept for kept, _ in told] == sorted(kept for kept, _ in told)
    for path in join(store, tmp_path / "new"):
        assert path.read_bytes() == (wheels / path.name).read_bytes()
    names = {path.name for path in wheels.iterdir()}
    assert {path.name for path in (tmp_path / "new").iterdir()} == names


def test_what_is_missing_is_named(wheels: Path, tmp_path: Path) -> None:
    folders, store = carried(wheels, tmp_path)
    for folder in (folders[0], folders[2]):
        take(folder, store)
    with pytest.raises(CarryError, match="not everything is here; take 02, 04"):
        join(store, tmp_path / "new")


def test_a_piece_that_was_changed_on_the_way(wheels: Path, tmp_path: Path) -> None:
    folders, store = carried(wheels, tmp_path)
    (piece, *_) = sorted(folders[1].glob("d.whl.*"))
    data = bytearray(piece.read_bytes())
    data[0] ^= 1
    piece.write_bytes(data)
    with pytest.raises(CarryError, match=r"d\.whl\.001: not what was packed; carry it again"):
        take(folders[1], store)
    assert not (store / piece.name).exists()


def test_a_piece_that_was_changed_in_the_store(wheels: Path, tmp_path: Path) -> None:
    folders, store = carried(wheels, tmp_path)
    for folder in folders:
        take(folder, store)
    (store / "b.whl.001").write_bytes(b"x" * 300)
    with pytest.raises(CarryError, match=r"b\.whl: not what was packed; take its pieces again"):
        join(store, tmp_path / "new")
    assert not (tmp_path / "new" / "b.whl").exists()


def test_two_packs_do_not_mix(wheels: Path, tmp_path: Path) -> None:
    folders, store = carried(wheels, tmp_path)
    take(folders[0], store)
    (wheels / "e.whl").write_bytes(b"other")
    pack(wheels, tmp_path / "second", MOST)
    with pytest.raises(CarryError, match="holds pieces of another pack"):
        take(tmp_path / "second" / "01", store)


@pytest.mark.parametrize("name", ["../x", "/etc/x", LIST])
def test_a_list_names_no_other_folder(wheels: Path, tmp_path: Path, name: str) -> None:
    folders, store = carried(wheels, tmp_path)
    listed = json.loads((folders[0] / LIST).read_text())
    listed[1]["pieces"][0]["name"] = name
    (folders[0] / LIST).write_text(json.dumps(listed))
    with pytest.raises(CarryError, match="is no name of a file"):
        take(folders[0], store)


def test_what_cannot_be_packed(wheels: Path, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    with pytest.raises(CarryError, match="no file in it"):
        pack(tmp_path / "none", tmp_path / "out", MOST)
    with pytest.raises(CarryError, match="--mib: got"):
        pack(wheels, tmp_path / "out", 10)
    with pytest.raises(CarryError, match="has files already"):
        pack(wheels, wheels, MOST)
    with pytest.raises(CarryError, match="No such file"):
        take(tmp_path / "none", tmp_path / "store")


@dataclass
class Told:
    """Stands for running programs."""

    code: int = 0
    calls: list[tuple[list[str], Mapping[str, str]]] = field(default_factory=list)

    def __call__(self, command: Sequence[str], environ: Mapping[str, str]) -> int:
        self.calls.append((list(command), environ))
        return self.code


def test_the_first_run(wheels: Path, tmp_path: Path) -> None:
    folders, store = carried(wheels, tmp_path)
    for folder in folders:
        take(folder, store)
    told = Told()
    assert first_run(store, Path("results"), told) == 0
    (install, _), (doctor, environ) = told.calls
    assert install[-5:] == [str(store / "wheels" / path.name) for path in sorted(wheels.iterdir())]
    assert doctor[1:] == ["-m", "trtllm_lite", "doctor", "--gpu", "--output", "results"]
    assert environ["PYTHONPATH"].split(os.pathsep) == [str(store / "site"), str(ROOT)]
    with pytest.raises(CarryError, match="pip could not install"):
        first_run(store, Path("results"), Told(1))


def test_packages_are_fetched_at_the_versions_of_this_project(tmp_path: Path) -> None:
    told = Told()
    fetch(PACKAGES, "3.12", tmp_path, told)
    (command, _) = told.calls[0]
    assert command[command.index("-c") + 1] == str(ROOT / "constraints.txt")
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert set(PACKAGES) <= pinned
    with pytest.raises(CarryError, match="pip could not fetch"):
        fetch(PACKAGES, "3.12", tmp_path, Told(1))


def test_the_program_needs_only_python(wheels: Path, tmp_path: Path) -> None:
    """Without site-packages, in the project's folder; and a mistake is one line."""

    def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-S", "-m", "trtllm_lite.tools.carry", *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)

    out, store = tmp_path / "out", tmp_path / "store"
    packed = run("pack", out, "--wheels", wheels, "--mib", str(MOST / carry.MIB))
    assert (packed.returncode, packed.stdout) == (0, f"4 transfers: {out}/01 to 04\n")
    assert run("take", out / "01", store).stdout.endswith(f" pieces are in {store}\n")
    ended = run("run", store, tmp_path / "results")
    assert ended.returncode == 1
    assert ended.stderr == f"error: {store}: not everything is here; take 02, 03, 04\n"
