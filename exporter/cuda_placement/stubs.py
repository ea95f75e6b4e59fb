"""Libraries that stand in for CUDA's, so that ONNX Runtime's CUDA provider can be loaded, and a
session on it created, on a machine without a GPU.

They have the names and symbols that the provider asks for; nearly all functions return 0. None of
them computes: a session over them can say where nodes land, and cannot run. A C compiler and
binutils are needed; the provider itself says which symbols.
"""

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

PROVIDER = "libonnxruntime_providers_cuda.so"
TOOLS = ("cc", "nm", "readelf")
_NEEDED = re.compile(r"\(NEEDED\).*\[(lib(?:cu|nv)[^\]]+)\]")
_UNDEFINED = re.compile(r"^\s*U (\w+)(?:@+(lib(?:cu|nv)\S+))?$", re.MULTILINE)
# Provided by ONNX Runtime itself.
HOST = "Provider_GetHost"

# One device of compute capability 9.0 with 8 GiB; sizes and places of the fields are those of
# cudaDeviceProp in CUDA 13.
SPECIAL = {
    "cudaGetDeviceCount": "int cudaGetDeviceCount(int *n) { *n = 1; return 0; }",
    "cudaGetDevice": "int cudaGetDevice(int *n) { *n = 0; return 0; }",
    "cudaGetDeviceProperties": (
        "int cudaGetDeviceProperties(char *p, int d) { memset(p, 0, 1008);"
        " ((int *)(p + 360))[0] = 9; ((int *)(p + 360))[1] = 0; return 0; }"
    ),
    "cudaMemGetInfo": (
        "int cudaMemGetInfo(size_t *f, size_t *t) { *f = *t = (size_t)1 << 33; return 0; }"
    ),
    "cudaStreamCreateWithFlags": (
        "int cudaStreamCreateWithFlags(void **s, int f) { *s = (void *)16; return 0; }"
    ),
    "cudaStreamCreate": "int cudaStreamCreate(void **s) { *s = (void *)16; return 0; }",
    "cudaRuntimeGetVersion": "int cudaRuntimeGetVersion(int *v) { *v = 13000; return 0; }",
    "cudaDriverGetVersion": "int cudaDriverGetVersion(int *v) { *v = 13000; return 0; }",
    "cudaGetErrorString": 'const char *cudaGetErrorString(int e) { return "stub"; }',
    "cudaGetErrorName": 'const char *cudaGetErrorName(int e) { return "stub"; }',
    "__cudaRegisterFatBinary": (
        "void **__cudaRegisterFatBinary(void *p) { static void *x[4]; return x; }"
    ),
    "cudaMalloc": "int cudaMalloc(void **p, size_t n) { *p = malloc(n); return 0; }",
    "cudaMallocHost": "int cudaMallocHost(void **p, size_t n) { *p = malloc(n); return 0; }",
    "cudaHostAlloc": (
        "int cudaHostAlloc(void **p, size_t n, unsigned f) { *p = malloc(n); return 0; }"
    ),
}
HEADER = "#include <stdlib.h>\n#include <string.h>\n"


def missing_tools() -> list[str]:
    """The programs that are needed and not on this machine."""
    return [name for name in TOOLS if shutil.which(name) is None]


def make_stubs(providers: Iterable[Path], folder: Path) -> None:
    """Compile what the providers' own libraries need of CUDA into `folder`. Raises
    subprocess.CalledProcessError."""
    symbols: dict[str, set[str]] = {}
    for provider in providers:
        libraries = _needed(provider)
        for name, library in _undefined(provider):
            # Whichever library that is loaded has a symbol without a version will do.
            for each in [library] if library else libraries:
                symbols.setdefault(each, set()).add(name)
        symbols |= {name: symbols.get(name, set()) for name in libraries}
    for library, names in symbols.items():
        _compile(library, sorted(names), folder)


def _needed(provider: Path) -> list[str]:
    return _NEEDED.findall(_output("readelf", "-d", str(provider)))


def _undefined(provider: Path) -> list[tuple[str, str]]:
    found = _UNDEFINED.findall(_output("nm", "-D", "--undefined-only", str(provider)))
    return [(name, library) for name, library in found if name != HOST]


def _compile(library: str, names: Iterable[str], folder: Path) -> None:
    source, versions = folder / f"{library}.c", folder / f"{library}.map"
    functions = [SPECIAL.get(name, f"int {name}(void) {{ return 0; }}") for name in names]
    source.write_text(HEADER + "\n".join([*functions, f"int {_word(library)}_is_a_stub;\n"]))
    versions.write_text(f"{library} {{ global: *; }};\n")
    flags = ["-w", "-shared", "-fPIC", "-O1", f"-Wl,-soname,{library}"]
    flags.append(f"-Wl,--version-script={versions}")
    _output("cc", *flags, "-o", str(folder / library), str(source))


def _word(library: str) -> str:
    return re.sub(r"\W", "_", library)


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
