"""A file of kernel timings, which make a second build on the same kind of GPU quick."""

import os
from dataclasses import dataclass
from pathlib import Path

from trtllm_lite.runtime.engines.trt_api import Config
from trtllm_lite.runtime.errors import UsageError

MAX_BYTES = 2**30


@dataclass(frozen=True)
class TimingCacheFile:
    """The file at `path`; it need not be there yet. It is as trusted as the one who names it."""

    path: Path

    def load(self, config: Config) -> None:
        """Use what the file holds. Raises UsageError for a file that another TensorRT, or one on
        another GPU, has made."""
        data = b""
        if self.path.exists():
            if not self.path.is_file() or self.path.stat().st_size > MAX_BYTES:
                raise UsageError(f"--timing-cache: {self.path} is not a file of timings")
            data = self.path.read_bytes()
        if not config.set_timing_cache(config.create_timing_cache(data), False):
            raise UsageError(
                f"--timing-cache: {self.path} was made by another TensorRT or on another GPU; "
                "name another file"
            )

    def keep(self, config: Config) -> None:
        """Put the timings of a build into the file, all at once. Raises OSError."""
        cache = config.get_timing_cache()
        if cache is None:
            return
        new = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            new.write_bytes(bytes(cache.serialize()))
            new.replace(self.path)
        finally:
            new.unlink(missing_ok=True)
