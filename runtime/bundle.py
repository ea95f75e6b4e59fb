"""A bundle on disk: the folder, its checked manifest, and the paths of its files."""

import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from trtllm_lite.runtime.bundle_files import (
    HashProgress,
    bare_name_problem,
    check_hashes,
    check_sizes,
    open_folder,
    open_inside,
)
from trtllm_lite.runtime.errors import BundleError
from trtllm_lite.runtime.manifest import Manifest, Phase
from trtllm_lite.runtime.manifest_io import read_manifest
from trtllm_lite.runtime.onnx_wire import ExternalData, external_data
from trtllm_lite.runtime.protobuf import WireError
from trtllm_lite.runtime.strict_json import shown

MAX_GRAPH_BYTES = 2**31 - 1
_ORT_FORMAT = b"ORTM"


@dataclass(frozen=True)
class Bundle:
    """An opened bundle. Every path given out lies inside `folder` and is checked when it opens."""

    folder: Path
    manifest: Manifest

    def graph_path(self, phase: Phase) -> Path:
        return self.folder / self.manifest.graph(phase).file

    def has(self, name: str) -> bool:
        """Whether the manifest lists the file, so that `path` gives it out."""
        return any(entry.path == name for entry in self.manifest.files)

    def path(self, name: str) -> Path:
        """The path of a listed file. Raises BundleError for a name that the manifest lacks."""
        if not self.has(name):
            raise BundleError("files", f"{shown(name)} is not a file of the bundle")
        return self.folder / name


def open_bundle(
    folder: Path,
    *,
    check_hashes: bool = True,
    unchanged: Callable[[Manifest], bool] | None = None,
    progress: HashProgress | None = None,
) -> Bundle:
    """Read and check a bundle. Raises BundleError naming the field that is wrong.

    Checked in this order, so that the cheap refusals come first: the manifest, presence, kind and
    size of every listed file, sha256 (a full read; `progress` follows it; `check_hashes=False`
    leaves it out), and what the graphs name as external data. Files that are not listed are not
    looked at. A symbolic link to the folder itself is followed once, here. `unchanged` is
    asked whether all files are those of an earlier check; their contents are then not read again.
    """
    manifest = read_manifest(folder)
    folder = folder.resolve()
    read = unchanged is None or not unchanged(manifest)
    with open_folder(folder) as root:
        _check_files(root, manifest, progress, hashes=check_hashes and read)
        if read:
            _check_graphs(root, manifest)
    return Bundle(folder, manifest)


def _check_files(
    root: int, manifest: Manifest, progress: HashProgress | None, *, hashes: bool
) -> None:
    check_sizes(root, manifest.files)
    if hashes:
        check_hashes(root, manifest.files, progress)


def _check_graphs(root: int, manifest: Manifest) -> None:
    sizes = {entry.path: entry.size for entry in manifest.files}
    for i, graph in enumerate(manifest.graphs):
        field = f"graphs[{i}].file"
        with open_inside(root, graph.file, field) as fd:
            try:
                check_graph(fd, sizes)
            except WireError as error:
                raise BundleError(field, f"{shown(graph.file)}: {error}") from None


def check_graph(fd: int, sizes: Mapping[str, int]) -> None:
    """Check that an ONNX file keeps its weights within files of these names and sizes, all in its
    own folder. Raises WireError."""
    size = os.fstat(fd).st_size
    if not 0 < size <= MAX_GRAPH_BYTES:
        raise WireError(f"has {size} bytes; allowed: 1 to {MAX_GRAPH_BYTES}")
    with mmap.mmap(fd, size, access=mmap.ACCESS_READ) as data:
        if data[4:8] == _ORT_FORMAT:
            raise WireError("is in ONNX Runtime's own format, not ONNX")
        for item in external_data(data):
            _check_external(item, sizes)


def _check_external(item: ExternalData, sizes: Mapping[str, int]) -> None:
    if problem := bare_name_problem(item.location):
        raise WireError(f"tensor {item.tensor} has external data location that {problem}")
    if item.location not in sizes:
        said = shown(item.location)
        raise WireError(f"tensor {item.tensor} has external data in {said}, which is not in files")
    if item.offset + item.length > sizes[item.location]:
        raise WireError(
            f"tensor {item.tensor} ends at byte {item.offset + item.length} of "
            f"{shown(item.location)}, which has {sizes[item.location]}"
        )
