"""Wheels for a machine without a network, in transfers of limited size, and the first run there.

    python -m trtllm_lite.tools.carry pack parts --python 3.12   # where there is a network
    python -m trtllm_lite.tools.carry take parts/01 store        # there, for each transfer
    python -m trtllm_lite.tools.carry run store results          # there, at the end

`pack` fetches packages at the versions of constraints.txt, for Linux on x86-64, and cuts them into
folders, none larger than a transfer may be. `take` looks whether the pieces of a folder are whole
and keeps them. `run` puts the files together, installs them beside what is there and runs
`trtllm-lite doctor --gpu`. Every piece and every file is held against its SHA-256. All of it runs
in this project's own folder and needs Python alone: nothing has to be installed.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = "carry.json"
BLOCK, MIB = 2**20, 2**20
LIST_BYTES = 2**16
"""Left free in a transfer for the list and for what a file system adds."""

PACKAGES = (
    *("onnxruntime-gpu", "cuda-bindings", "cuda-pathfinder", "transformers", "onnx-ir", "gguf"),
)
"""What a machine with torch, CUDA's libraries and the packages around them lacks."""

PLATFORMS = (*(f"manylinux_2_{n}_x86_64" for n in range(39, 4, -1)), "manylinux2014_x86_64")
"""pip takes a platform for exactly what it is called."""

Run = Callable[[Sequence[str], Mapping[str, str]], int]


class CarryError(Exception):
    """One line: what is wrong and what to do."""


@dataclass(frozen=True)
class Piece:
    """A part of a file. `folder`: the transfer that it is in, from 1 on."""

    name: str
    folder: int
    size: int
    sha256: str


@dataclass(frozen=True)
class Carried:
    """A file and its pieces, in order."""

    name: str
    size: int
    sha256: str
    pieces: tuple[Piece, ...]


def run_command(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """The exit code of a program with this environment."""
    return subprocess.run(command, env=environ, check=False).returncode


def fetch(packages: Sequence[str], python: str, folder: Path, run: Run = run_command) -> None:
    """Download the wheels of packages, and of nothing that they ask for."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    kind = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    kind += [word for name in PLATFORMS for word in ("--platform", name)]
    versions = ["-c", str(ROOT / "constraints.txt")]
    if run([*pip, *kind, *versions, "-d", str(folder), *packages], os.environ):
        raise CarryError("pip could not fetch the packages; what it said is above")


def pack(wheels: Path, out: Path, most: int) -> int:
    """Cut the files of a folder into `out/01`, `out/02` and so on, each of at most `most` bytes;
    how many there are."""
    files = sorted(path for path in wheels.iterdir() if path.is_file())
    if not files:
        raise CarryError(f"{wheels}: there is no file in it to carry")
    if most <= LIST_BYTES:
        raise CarryError(f"--mib: got {most / MIB:g}; allowed: numbers over {LIST_BYTES / MIB:g}")
    if out.exists() and any(out.iterdir()):
        raise CarryError(f"{out}: has files already; name a folder that is empty or not there")
    cutter = _Cutter(out, most - LIST_BYTES)
    carried = [cutter.cut(path) for path in files]
    text = json.dumps([asdict(file) for file in carried], indent=1)
    for number in range(1, cutter.folder + 1):
        (_folder(out, number) / LIST).write_text(text)
    return cutter.folder


class _Cutter:
    """Fills one folder after the other."""

    def __init__(self, out: Path, room: int) -> None:
        self._out, self._room = out, room
        self.folder, self._left = 0, 0

    def cut(self, path: Path) -> Carried:
        whole, pieces = hashlib.sha256(), list[Piece]()
        with path.open("rb") as source:
            while source.tell() < path.stat().st_size:
                if not self._left:
                    self.folder, self._left = self.folder + 1, self._room
                    _folder(self._out, self.folder).mkdir(parents=True)
                name = f"{path.name}.{len(pieces) + 1:03}"
                target = _folder(self._out, self.folder) / name
                own, size = hashlib.sha256(), 0
                with target.open("xb") as file:
                    while data := source.read(min(BLOCK, self._left)):
                        file.write(data)
                        own.update(data)
                        whole.update(data)
                        size, self._left = size + len(data), self._left - len(data)
                pieces.append(Piece(name, self.folder, size, own.hexdigest()))
        return Carried(path.name, path.stat().st_size, whole.hexdigest(), tuple(pieces))


def _folder(out: Path, number: int) -> Path:
    return out / f"{number:02}"


def read_list(folder: Path) -> tuple[Carried, ...]:
    """The list of all that is carried, which lies in every folder."""
    try:
        found = json.loads((folder / LIST).read_text())
        files = tuple(
            Carried(**{**file, "pieces": tuple(Piece(**piece) for piece in file["pieces"])})
            for file in found
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CarryError(f"{folder / LIST}: {error}; pack again") from None
    for name in (name for file in files for name in (file.name, *(p.name for p in file.pieces))):
        if Path(name).name != name or name == LIST:
            raise CarryError(f"{folder / LIST}: {name!r} is no name of a file; pack again")
    return files


def take(folder: Path, store: Path) -> tuple[int, int]:
    """Keep the pieces of one transfer; how many are kept now, and how many there are."""
    files = read_list(folder)
    store.mkdir(parents=True, exist_ok=True)
    if not (store / LIST).exists():
        shutil.copyfile(folder / LIST, store / LIST)
    elif read_list(store) != files:
        raise CarryError(f"{store}: holds pieces of another pack; name another folder")
    for piece in _pieces(files):
        if (folder / piece.name).exists():
            partial = store / f".{piece.name}"
            shutil.copyfile(folder / piece.name, partial)
            _check(partial, piece.size, piece.sha256, "carry it again")
            partial.replace(store / piece.name)
    kept = sum((store / piece.name).exists() for piece in _pieces(files))
    return kept, sum(1 for _ in _pieces(files))


def _pieces(files: Sequence[Carried]) -> Iterator[Piece]:
    return (piece for file in files for piece in file.pieces)


def join(store: Path, wheels: Path) -> list[Path]:
    """Put the files together; their paths."""
    files = read_list(store)
    missing = {piece.folder for piece in _pieces(files) if not (store / piece.name).exists()}
    if missing:
        folders = ", ".join(f"{number:02}" for number in sorted(missing))
        raise CarryError(f"{store}: not everything is here; take {folders}")
    wheels.mkdir(parents=True, exist_ok=True)
    for file in files:
        with (wheels / file.name).open("wb") as target:
            for piece in file.pieces:
                with (store / piece.name).open("rb") as source:
                    shutil.copyfileobj(source, target, BLOCK)
        _check(wheels / file.name, file.size, file.sha256, "take its pieces again")
    return [wheels / file.name for file in files]


def _check(path: Path, size: int, sha256: str, what_to_do: str) -> None:
    """Raises CarryError for a file that is another, which is removed."""
    with path.open("rb") as file:
        same = path.stat().st_size == size and hashlib.file_digest(file, "sha256").hexdigest()
    if same != sha256:
        path.unlink()
        raise CarryError(f"{path.name.removeprefix('.')}: not what was packed; {what_to_do}")


def first_run(store: Path, output: Path, run: Run = run_command) -> int:
    """Install what was carried into `store/site`, before all else on the path of a process, and
    run doctor; its exit code."""
    site = store / "site"
    wheels = [str(path) for path in join(store, store / "wheels")]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-index"]
    where = ["--no-deps", "--no-compile", "--no-cache-dir", "--upgrade", "--target", str(site)]
    if run([*pip, *where, *wheels], os.environ):
        raise CarryError("pip could not install the wheels; what it said is above")
    environ = {**os.environ, "PYTHONPATH": f"{site.resolve()}{os.pathsep}{ROOT}"}
    doctor = ("-m", "trtllm_lite", "doctor", "--gpu", "--output", str(output))
    return run([sys.executable, *doctor], environ)


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    words = (__doc__ or "").partition("\n")[0]
    program = argparse.ArgumentParser("python -m trtllm_lite.tools.carry", description=words)
    commands = program.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="fetch and cut")
    packing.add_argument("out", type=Path)
    packing.add_argument("--python", default="3.12", help="that of the other machine")
    packing.add_argument("--mib", type=float, default=50.0, help="the most of one transfer")
    packing.add_argument("--package", action="append", default=[], help="one more; repeatable")
    packing.add_argument("--wheels", type=Path, help="cut the files of this folder, fetch nothing")
    taking = commands.add_parser("take", help="keep the pieces of one transfer")
    taking.add_argument("folder", type=Path)
    taking.add_argument("store", type=Path)
    running = commands.add_parser("run", help="put together, install, run doctor --gpu")
    running.add_argument("store", type=Path)
    running.add_argument("output", type=Path)
    return program


def main(arguments: Sequence[str]) -> int:
    """The exit code. Raises CarryError, OSError."""
    given = parser().parse_args(arguments)
    if given.command == "run":
        return first_run(given.store, given.output)
    if given.command == "take":
        kept, count = take(given.folder, given.store)
        sys.stdout.write(f"{kept} of {count} pieces are in {given.store}\n")
        return 0
    with tempfile.TemporaryDirectory() as fetched:
        if given.wheels is None:
            fetch([*PACKAGES, *given.package], given.python, Path(fetched))
        count = pack(given.wheels or Path(fetched), given.out, int(given.mib * MIB))
    sys.stdout.write(f"{count} transfers: {given.out}/01 to {count:02}\n")
    return 0


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        try:
            sys.exit(main(sys.argv[1:]))
        except (CarryError, OSError) as error:
            sys.exit(f"error: {error}")
