"""A bundle on disk: the folder, its checked manifest, and the paths of its files."""

from dataclasses import dataclass
from pathlib import Path

from trtllm_lite.runtime.manifest import Manifest, Phase


@dataclass(frozen=True)
class Bundle:
    """An opened bundle. Every path given out lies inside `folder` and was checked by `open_bundle`."""

    folder: Path
    manifest: Manifest

    def graph_path(self, phase: Phase) -> Path:
        return self.folder / self.manifest.graph(phase).file

    def path(self, name: str) -> Path:
        return self.folder / name


def open_bundle(folder: Path, *, check_hashes: bool = True) -> Bundle:
    """Read and check a bundle. Raises BundleError naming the field that is wrong."""
    raise NotImplementedError
