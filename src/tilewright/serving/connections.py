"""Connections of the server: a time within which a request's head has to come, and a greatest number of them.

uvicorn waits for the end of a head for ever, so that clients which send half of one take all connections.
"""

import asyncio
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from tilewright.core.log import get_logger

_log = get_logger(__name__)


class TimedConnection(H11Protocol):
    """One connection, closed where a request's head is not there after `head_seconds`.

    At the most connections the one that has waited longest for a head gives its place to a new one; where all of them
    have requests, the new one is closed.
    """

    head_seconds: ClassVar[float] = 10.0
    most: ClassVar[int] = 512
    """Connections at the same time; each is an open file, of which a process mostly may have 1,024."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._late: asyncio.TimerHandle | None = None
        self._since = self.loop.time()

    @property
    def waits_for_head(self) -> bool:
        """True where a connection waits for a request's head: none of it is being answered or sends its body."""
        return self.conn.their_state is h11.IDLE and (self.cycle is None or self.cycle.response_complete)

    def connection_made(self, transport: Any) -> None:
        """Count the connection of a client that connects."""
        if len(self.connections) >= self.most:
            waiting = [one for one in self.connections if isinstance(one, TimedConnection) and one.waits_for_head]
            oldest = min(waiting, key=lambda one: one._since, default=None)
            closed = oldest.transport if oldest is not None else transport
            closed.abort()
            self.connections.discard(oldest)  # now, since several clients may connect before its end is noticed
            _log.debug("%d connections: one is closed", len(self.connections))
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Receive bytes of a request on a connection."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Note that the response on a connection is complete: the next request's head may begin to come."""
        super().on_response_complete()
        self._stop_watch()
        if self.conn.trailing_data[0]:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the client of a connection left."""
        self._stop_watch()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if not self.waits_for_head:
            self._stop_watch()
        elif self._late is None:
            self._since = self.loop.time()
            self._late = self.loop.call_later(self.head_seconds, self._close_late)

    def _stop_watch(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _close_late(self) -> None:
        self._late = None
        if self.waits_for_head and not self.transport.is_closing():
            _log.debug("a request's head did not come within %g s", self.head_seconds)
            self.transport.abort()
