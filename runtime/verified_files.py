"""Which files of a bundle were compared with their sha256 sums, so that it is not done again.

A record in the host cache holds the identity that each file had during the comparison. While all
of them are the same, the files are those that were read in full. `trtllm-lite verify` and whoever
else opens a bundle without a cache read everything every time.
"""

import time
from collections.abc import Iterable
from pathlib import Path

from trtllm_lite.runtime.bundle import Bundle, open_bundle
from trtllm_lite.runtime.bundle_files import HashProgress
from trtllm_lite.runtime.file_identity import FileIdentity
from trtllm_lite.runtime.host_cache import HostCache
from trtllm_lite.runtime.manifest import FileEntry, Manifest

RECORD = "verified"
SETTLED_NS = 20_000_000
"""File times advance in ticks of up to 10 ms: a file that was written to within the last ticks
could be written to again without a change of its times."""


def open_verified(
    folder: Path, cache: HostCache | None, progress: HashProgress | None = None
) -> Bundle:
    """The bundle with its sha256 sums compared, now or at an earlier time at which the files were
    the same. `progress` follows the reading, if there is any. Raises BundleError as `open_bundle`
    does."""
    if cache is None:
        return open_bundle(folder, progress=progress)
    before: dict[str, list[int]] | None = None
    known = False

    def unchanged(manifest: Manifest) -> bool:
        nonlocal before, known
        before = _identities(folder, manifest.files)
        known = before is not None and cache.recall(RECORD) == before
        return known

    bundle = open_bundle(folder, unchanged=unchanged, progress=progress)
    after = _identities(folder, bundle.manifest.files)
    if not known and before is not None and before == after and _settled(before):
        cache.remember(RECORD, before)
    return bundle


def _identities(folder: Path, entries: Iterable[FileEntry]) -> dict[str, list[int]] | None:
    """None when one of the files is missing or no file; opening the bundle says so."""
    try:
        return {e.path: FileIdentity.of(folder / e.path).as_list() for e in entries}
    except OSError:
        return None


def _settled(identities: dict[str, list[int]]) -> bool:
    newest = max((ctime for _, _, ctime, _ in identities.values()), default=0)
    return newest < time.time_ns() - SETTLED_NS
