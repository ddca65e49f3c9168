"""The server's process: a free port, uvicorn, and a clean end."""

import resource
import signal
import socket
from collections.abc import Callable
from contextlib import closing
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from tilewright.core.errors import ConfigError
from tilewright.serving.connections import TimedConnection

_PORTS_TRIED = 50
_GRACE_SECONDS = 5
_MOST_FILES = 16384
"""Open files of the process: enough for its connections, and few enough that each may wait."""
_OTHER_FILES = 128
"""Of them: those that are no connections."""


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket for the server's process at the first free port from `port` on; 0: any.

    Raises:
        ConfigError: no such address, or no port is free.
    """
    try:
        family, _, _, _, _ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise _no_address(host, port, str(error)) from error
    reason = ""
    for number in range(port, min(65535, port + _PORTS_TRIED) + 1):
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host, number))
            found.listen()
            return found
        except OSError as error:
            found.close()
            reason = str(error)
            if port == 0:
                break
    raise _no_address(host, port, reason)


def serve(app: Starlette, bound: socket.socket, started: Callable[[], None]) -> None:
    """Serve in the server's process until SIGINT or SIGTERM; answers that are being drawn get some seconds to end.

    Args:
        app: the application.
        bound: from `bind`; closed at the end.
        started: called when it listens.
    """
    server = uvicorn.Server(server_config(app, _GRACE_SECONDS, connections=open_files() - _OTHER_FILES))

    def stop(number: int, frame: FrameType | None) -> None:
        server.handle_exit(number, frame)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with closing(bound):
            started()
            server.run(sockets=[bound])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def open_files() -> int:
    """Open files of the server's process: how many it may have, raised as far as the system lets it; each connection is
    one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(wanted, _MOST_FILES if soft == resource.RLIM_INFINITY else min(soft, _MOST_FILES))


def server_config(app: Starlette, grace_seconds: int, connections: int | None = None) -> uvicorn.Config:
    """Configure uvicorn for the server's process: connections with limits, no line per request.

    Args:
        app: the application.
        grace_seconds: that answers get when the server ends.
        connections: at most as many at the same time; None: as `TimedConnection` has it.
    """
    limited = TimedConnection
    if connections is not None:
        limited = type("LimitedConnection", (TimedConnection,), {"most": max(1, connections)})
    return uvicorn.Config(
        app, http=limited, ws="none", log_level="error", access_log=False,
        timeout_graceful_shutdown=grace_seconds,
    )  # fmt: skip


def _no_address(host: str, port: int, reason: str) -> ConfigError:
    return ConfigError(
        "Server cannot listen at this address",
        got=f"{host}, port {port}: {reason}",
        need="an address of this machine and a free port",
        try_="--host 127.0.0.1 --port 8000",
        where="--host",
    )
