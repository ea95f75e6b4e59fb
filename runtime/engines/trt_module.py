"""Which TensorRT is here, and in what its versions differ. The one place that imports it.

Three Python APIs are known: TensorRT 10.16, TensorRT 11, and TensorRT-RTX, whose API is that of 11
with compute capabilities to build for by name. Plans of the one are of no use to the others.

* Networks are strongly typed always in 11 and on request in 10; the flag's bit was renumbered, so
  it is computed from the enum.
* The number of valid keys of each row (`IAttention.key_value_lengths`) and `CausalMaskKind` came
  with 11: in 10 attention over a part of the cache can be said with a mask only.
* TensorRT builds for the GPU that it runs on; TensorRT-RTX for any list of those it knows, without
  a GPU too.
Source: NVIDIA TensorRT, release notes and Python API of 10.16 and 11.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from trtllm_lite.runtime.engines.record import Flavour
from trtllm_lite.runtime.engines.trt_api import Attention, Layer
from trtllm_lite.runtime.errors import TrtllmLiteError, UsageError

OLDEST = {"tensorrt": (10, 16), "tensorrt_rtx": (1, 7)}
NAMES: dict[Flavour, str] = {"tensorrt": "TensorRT", "tensorrt_rtx": "TensorRT-RTX"}
MODULES: tuple[Flavour, ...] = ("tensorrt", "tensorrt_rtx")
INSTALL = "pip install 'trtllm-lite[rtx]' or pip install 'trtllm-lite[tensorrt]'"

Importer = Callable[[str], Any]


class NoTensorRTError(TrtllmLiteError):
    """No TensorRT that can be used is installed."""


@dataclass(frozen=True)
class TensorRT:
    """An imported TensorRT."""

    module: Any
    flavour: Flavour
    version: str

    @property
    def words(self) -> str:
        """ "TensorRT-RTX 1.7.1.116"."""
        return f"{NAMES[self.flavour]} {self.version}"

    @property
    def has_row_lengths(self) -> bool:
        """Whether an attention layer takes the number of valid keys of each row."""
        return hasattr(self.module, "CausalMaskKind")

    @property
    def has_user_allocation(self) -> bool:
        """Whether a plan can be built that allocates nothing by itself while it runs. Runs of such
        a plan alone can be recorded (TensorRT-RTX, release notes of 1.2)."""
        return hasattr(getattr(self.module, "BuilderFlag", None), "REQUIRE_USER_ALLOCATION")

    @property
    def nameable_gpus(self) -> tuple[str, ...]:
        """The GPUs, as "sm89", that plans can be built for without having one; none for TensorRT,
        which builds for the GPU of the machine."""
        kinds = getattr(self.module, "ComputeCapability", None)
        names = () if kinds is None else kinds.__members__
        return tuple(sorted((n.lower() for n in names if n.startswith("SM")), key=_sm_number))

    @property
    def network_flags(self) -> int:
        """For `create_network`: strongly typed."""
        return 1 << int(self.module.NetworkDefinitionCreationFlag.STRONGLY_TYPED)

    def capability(self, gpu: str) -> Any:
        """The enum value of a GPU among `nameable_gpus`."""
        return getattr(self.module.ComputeCapability, gpu.upper())

    def attention_of(self, layer: Layer) -> Attention | None:
        """The attention that a layer is the input of; None for any other layer.

        `get_layer` gives the base class; assigning the class is the library's own way down.
        """
        if layer.type != self.module.LayerType.ATTENTION_INPUT:
            return None
        layer.__class__ = self.module.IAttentionInputLayer
        attention: Attention = layer.attention  # type: ignore[attr-defined]  # of the new class
        return attention


def installed_tensorrt(importer: Importer = import_module) -> tuple[TensorRT, ...]:
    """Every TensorRT that can be used here, TensorRT before TensorRT-RTX; `require_tensorrt` says
    why there is none."""
    return tuple(found for found in map(_probe(importer), MODULES) if isinstance(found, TensorRT))


def require_tensorrt(
    gpus: tuple[str, ...], here: str | None, importer: Importer = import_module
) -> TensorRT:
    """The TensorRT that builds for these GPUs; `here` is the one of this machine, if any.

    Raises NoTensorRTError where none is installed, UsageError for GPUs that the installed one
    cannot build for.
    """
    probed = list(map(_probe(importer), MODULES))
    found = [trt for trt in probed if isinstance(trt, TensorRT)]
    if not found:
        why = "; ".join(reason for reason in probed if isinstance(reason, str))
        raise NoTensorRTError(f"no TensorRT to build with: {why}; {INSTALL}")
    for trt in found:
        if set(gpus) <= set(trt.nameable_gpus) or (not trt.nameable_gpus and gpus == (here,)):
            return trt
    raise UsageError(_cannot_name(gpus, here, found))


def _cannot_name(gpus: tuple[str, ...], here: str | None, found: list[TensorRT]) -> str:
    asked = f"--gpu {','.join(gpus)}"
    for trt in found:
        if trt.nameable_gpus:
            return f"{asked}: {trt.words} builds for {', '.join(trt.nameable_gpus)} only"
    only = f"{found[0].words} builds for the GPU of this machine only, {here or 'which has none'}"
    return f"{asked}: {only}; build there, or install trtllm-lite[rtx] for plans of TensorRT-RTX"


def _probe(importer: Importer) -> Callable[[Flavour], TensorRT | str]:
    def probe(flavour: Flavour) -> TensorRT | str:
        """The module, or in words why there is none."""
        try:
            module = importer(flavour)
        except ModuleNotFoundError:
            return f"{NAMES[flavour]} is not installed"
        except (ImportError, OSError) as error:
            return f"{NAMES[flavour]} does not load ({error})"
        version = str(getattr(module, "__version__", ""))
        if _numbers(version) < OLDEST[flavour]:
            oldest = ".".join(map(str, OLDEST[flavour]))
            return f"{NAMES[flavour]} {version or '?'} is older than {oldest}"
        return TensorRT(module, flavour, version)

    return probe


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _sm_number(gpu: str) -> int:
    return int(gpu.removeprefix("sm"))
