"""How many connections the process has descriptors for."""

from trtllm_lite.runtime.errors import UsageError

WANTED = 2**16
"""Open files to ask for: far more than connections are allowed."""
RESERVED = 96
"""Open files for all but connections: the bundles, logs, and connections that are turned away."""
FEWEST = 16
"""Connections below which a server makes no sense."""


def raise_limit() -> int:
    """Raise this process's soft limit of open files as far as its hard limit allows, WANTED at
    most, and return it. A shell's usual 1,024 would be fewer than the connections allowed."""
    try:
        import resource
    except ImportError:
        # Windows has no such limit.
        return WANTED
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return most
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def connections_within(open_files: int, wanted: int) -> int:
    """Connections out of `wanted` that so many open files leave room for. Raises UsageError when
    those are too few to serve anybody."""
    room = min(wanted, open_files - RESERVED)
    if room < FEWEST:
        least = RESERVED + FEWEST
        raise UsageError(
            f"this process may open {open_files} files; at least {least} are needed: ulimit -n 1024"
        )
    return room
