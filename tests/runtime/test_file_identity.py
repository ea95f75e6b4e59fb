"""A file keeps its identity until it is written to, replaced or turned into something else."""

import hashlib
import os
import time
from pathlib import Path

import pytest

from trtllm_lite.runtime.file_identity import FileIdentity, sha256_of, sync


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"abcd")
    return path


def test_reading_changes_nothing(file: Path) -> None:
    before = FileIdentity.of(file)
    assert sha256_of(file) == hashlib.sha256(b"abcd").hexdigest()
    sync(file)
    assert FileIdentity.of(file) == before
    assert before.as_list()[0] == 4


def test_a_write_of_equal_size_shows_even_with_the_old_time_put_back(file: Path) -> None:
    before, info = FileIdentity.of(file), file.stat()
    time.sleep(0.03)  # file times advance in ticks
    file.write_bytes(b"abce")
    os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns))
    after = FileIdentity.of(file)
    assert (after.size, after.mtime_ns, after.inode) == (
        before.size,
        before.mtime_ns,
        before.inode,
    )
    assert after != before


def test_another_file_in_its_place_shows(file: Path) -> None:
    before = FileIdentity.of(file)
    other = file.with_name("other")
    other.write_bytes(b"abcd")
    other.replace(file)
    assert FileIdentity.of(file).inode != before.inode


def test_links_and_folders_have_none(file: Path) -> None:
    link = file.with_name("link")
    link.symlink_to(file)
    for path in (link, file.parent, file.with_name("missing")):
        with pytest.raises(OSError, match=r"."):
            FileIdentity.of(path)


def test_hash_of_more_than_one_piece(tmp_path: Path) -> None:
    data = bytes(range(256)) * 2**16 + b"tail"
    (tmp_path / "big").write_bytes(data)
    assert sha256_of(tmp_path / "big") == hashlib.sha256(data).hexdigest()
