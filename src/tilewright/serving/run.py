"""The server's process: a free port, uvicorn, and a clean end."""

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


def bind(host: str, port: int) -> socket.socket:
    """A bound socket at the first free port from `port` on; 0: any.

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
    """Serve until SIGINT or SIGTERM; answers that are being drawn get some seconds to end.

    Args:
        app: the application.
        bound: from `bind`; closed at the end.
        started: called when it listens.
    """
    server = uvicorn.Server(server_config(app, _GRACE_SECONDS))

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


def server_config(app: Starlette, grace_seconds: int) -> uvicorn.Config:
    """uvicorn's settings: connections with limits, no line per request."""
    return uvicorn.Config(
        app, http=TimedConnection, ws="none", log_level="error", access_log=False,
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
