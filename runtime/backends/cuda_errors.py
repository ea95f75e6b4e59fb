"""Which errors of CUDA break a process's context for good. All others end one call.

Source: the descriptions of `cudaError_t` in the CUDA runtime API. Most of these say that the
process "must be terminated and relaunched". The others say less, but after an error of memory or of
a link that the hardware cannot correct nobody knows what was computed, and a context that is
destroyed does not come back.
"""

import re

LOST = {
    4: "cudaErrorCudartUnloading",
    214: "cudaErrorECCUncorrectable",
    220: "cudaErrorNvlinkUncorrectable",
    226: "cudaErrorContained",
    700: "cudaErrorIllegalAddress",
    702: "cudaErrorLaunchTimeout",
    709: "cudaErrorContextIsDestroyed",
    710: "cudaErrorAssert",
    714: "cudaErrorHardwareStackError",
    715: "cudaErrorIllegalInstruction",
    716: "cudaErrorMisalignedAddress",
    717: "cudaErrorInvalidAddressSpace",
    718: "cudaErrorInvalidPc",
    719: "cudaErrorLaunchFailure",
    721: "cudaErrorTensorMemoryLeak",
    810: "cudaErrorMpsClientTerminated",
    911: "cudaErrorExternalDevice",
}
"""Names by code."""

_FAILURE = re.compile(r"\bCUDA failure (\d+)\b")


def says_lost(text: str) -> bool:
    """Whether an error of ONNX Runtime names one of these: its provider writes "CUDA failure 700:
    an illegal memory access was encountered"."""
    return any(int(code) in LOST for code in _FAILURE.findall(text))
