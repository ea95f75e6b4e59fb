"""The process that holds one runtime. Runs in the peer's environment: standard library and numpy.

Its standard output is the protocol's alone; what the runtime prints goes to standard error.
"""

import ctypes
import os
import signal
import sys

from trtllm_lite.tools.compare_peers.adapters.base import make_adapter
from trtllm_lite.tools.compare_peers.protocol import Service, serve

PR_SET_PDEATHSIG = 1  # prctl(2)


def main(peer: str) -> None:
    """Serve one peer on standard input and output until the input ends, then leave at once: the
    runtimes' own teardown is not measured, and not all of them survive it."""
    # A paused worker cannot see that its input has ended.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(Service(make_adapter(peer)), sys.stdin, replies)
    os._exit(0)
