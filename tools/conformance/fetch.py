"""A suite's files, from its source archive to a folder. Nothing of it is installed."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from trtllm_lite.tools.conformance.judge import ConformanceError
from trtllm_lite.tools.conformance.suites import Archive

Tell = Callable[[str], None]


def fetched(archive: Archive, cache: Path, tell: Tell) -> Path:
    """The folder with the archive's files, below `cache`. Raises ConformanceError."""
    target = cache / f"{archive.package}-{archive.version}"
    if target.is_dir():
        return target
    work = cache / f"{target.name}.work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        tell(f"fetching {archive.package} {archive.version}")
        made = work / "made"
        _keep(archive, _unpacked(archive, work), made)
        made.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _unpacked(archive: Archive, work: Path) -> Path:
    """The archive's tree as pip leaves it. pip checks the hash, unpacks, and then fails to build
    the metadata: what that needs is not installed, and is not wanted."""
    requirements, temporary = work / "requirements.txt", work / "tmp"
    temporary.mkdir()
    requirements.write_text(
        f"{archive.package}=={archive.version} --hash=sha256:{archive.sha256}\n", encoding="utf-8"
    )
    options = ("--no-deps", "--no-build-isolation", "--no-clean", "--require-hashes")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", *options),
            *("--no-binary", archive.package, "--dest", str(work / "archives")),
            *("--requirement", str(requirements)),
        ],
        env=os.environ | {"TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
    )
    found = next(_trees(archive, temporary), None)
    if found is None:
        last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise ConformanceError(f"{archive.package} {archive.version} was not fetched: {last}")
    return found


def _trees(archive: Archive, temporary: Path) -> Iterator[Path]:
    wanted = f"Version: {archive.version}"
    for path in temporary.glob("*/*/PKG-INFO"):
        if wanted in path.read_text(encoding="utf-8", errors="replace").splitlines():
            yield path.parent


def _keep(archive: Archive, tree: Path, made: Path) -> None:
    """Copy what is wanted, at the places that it has in the archive's folder. Folders of single
    files become packages, so that what imports relatively finds its neighbours."""
    source = tree / archive.folder
    if not source.is_dir():
        raise ConformanceError(f"{archive.package} {archive.version} has no {archive.folder}")
    if not archive.files:
        shutil.copytree(source, made)
    for name in archive.files:
        if not (source / name).is_file():
            raise ConformanceError(
                f"{archive.package} {archive.version} has no {archive.folder}/{name}"
            )
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / name, made / name)
        for folder in Path(name).parents[:-1]:
            (made / folder / "__init__.py").touch()
