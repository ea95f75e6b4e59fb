"""How to tell, without reading it, that a file is still the one that was read in full before."""

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

_PIECE_BYTES = 8 * 2**20


@dataclass(frozen=True)
class FileIdentity:
    """What changes when a file is written to or replaced. The change time is the one that a
    program cannot set, so a restored modification time does not hide a write."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> "FileIdentity":
        """Raises OSError when there is no such regular file; a symbolic link is none."""
        info = path.lstat()
        if not stat.S_ISREG(info.st_mode):
            raise OSError(f"{path.name} is not a regular file")
        return cls(info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino)

    def as_list(self) -> list[int]:
        """The JSON form."""
        return [self.size, self.mtime_ns, self.ctime_ns, self.inode]


def sha256_of(path: Path) -> str:
    """Hexadecimal sha256 of the whole file. Raises OSError."""
    digest, piece = hashlib.sha256(), bytearray(_PIECE_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(memoryview(piece)[:count])
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Have the file's content on the disk before anything says that it is there."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
