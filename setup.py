"""The native kernels. All else is in pyproject.toml."""

import platform
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("runtime/kernels")
SOURCES = [str(FOLDER / name) for name in ("library.cc", "linear.cc", "attention.cc")]
# GCC 12 takes its own intrinsics for uses of uninitialized values.
QUIET = ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
HERE = sys.platform == "linux" and platform.machine() == "x86_64"


class BuildKernels(build_ext):
    """Builds a library that ONNX Runtime loads, not a module of Python."""

    def get_ext_filename(self, fullname: str) -> str:
        """A name that no finder of modules takes for one."""
        return str(Path(*fullname.split("."))) + ".native.so"


# optional: without a compiler the package is installed all the same, and runs on ONNX Runtime's own
# operators.
KERNELS = Extension(
    "trtllm_lite.runtime.kernels.trtllm_lite_kernels",
    SOURCES,
    depends=[str(path) for path in sorted(FOLDER.glob("*.h"))],
    extra_compile_args=["-O3", "-std=c++17", "-fvisibility=hidden", *QUIET],
    language="c++",
    optional=True,
)
setup(ext_modules=[KERNELS] if HERE else [], cmdclass={"build_ext": BuildKernels})
