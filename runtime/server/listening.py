"""The server's socket, bound before anything is loaded."""

import errno
import socket

from trtllm_lite.runtime.errors import TrtllmLiteError
from trtllm_lite.runtime.server.port_holder import holder_of

BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises TrtllmLiteError, one line, when the port is in use or not ours to
    take, or the host is none of this machine's."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise TrtllmLiteError(f"host {host!r} is unknown: {error.strerror}") from None
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise TrtllmLiteError(_problem(host, port, error)) from None
    sock.setblocking(False)
    return sock


def url_of(sock: socket.socket) -> str:
    """`http://127.0.0.1:8000`, with the port that was really given."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _problem(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        holder = holder_of(port) or "another process"
        return f"port {port} of {host} is in use by {holder}; stop it, or choose another --port"
    if error.errno == errno.EACCES:
        return f"port {port} of {host} is not allowed for this user; choose --port 1024 or higher"
    return f"cannot listen on {host} port {port}: {error.strerror}"
