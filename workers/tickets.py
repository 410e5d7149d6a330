"""TCP connections that a peer opens to this worker with a ticket.

Owns the listening socket, the tickets and the connections that have not shown one yet. Must not know what is sent. Called by the data
server, on its loop.

A ticket is 32 random bytes that this worker made for one call of a peer which has shown the cluster token. It is good for one
connection, and only while the call waits for it. A connection that shows none within `TICKET_S`, or another one, is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

from waypath.proto.errors import TransferError

__all__ = ["TICKET_BYTES", "Connections", "Offer"]

TICKET_BYTES = 32
TICKET_S = 5.0
CONNECT_S = 10.0

log = logging.getLogger("waypath.worker")


@dataclass(frozen=True)
class Offer:
    """A connection that is waited for."""

    ticket: bytes
    port: int
    _opened: asyncio.Future[socket.socket]

    async def connected(self) -> socket.socket:
        """The blocking connection of whoever had the ticket. TransferError where nobody came within `CONNECT_S`."""
        try:
            return await asyncio.wait_for(asyncio.shield(self._opened), CONNECT_S)
        except TimeoutError:
            raise TransferError(f"nobody came with the ticket within {CONNECT_S:g} s") from None


class Connections:
    """Takes connections on one host, on a port of its own that is opened when it is first needed."""

    def __init__(self) -> None:
        self._host = "127.0.0.1"
        self._server: asyncio.Server | None = None
        self._starting = asyncio.Lock()
        self._offers: dict[bytes, asyncio.Future[socket.socket]] = {}

    def listen_on(self, host: str) -> None:
        """The host of the data service."""
        self._host = host

    @contextlib.asynccontextmanager
    async def offer(self) -> AsyncIterator[Offer]:
        """A new ticket; worthless when the block ends, and its connection is closed then."""
        async with self._starting:
            if self._server is None:
                self._server = await asyncio.start_server(self._arrived, self._host, 0, limit=TICKET_BYTES)
        ticket = secrets.token_bytes(TICKET_BYTES)
        opened = asyncio.get_running_loop().create_future()
        self._offers[ticket] = opened
        try:
            yield Offer(ticket, self._server.sockets[0].getsockname()[1], opened)
        finally:
            self._offers.pop(ticket, None)
            if opened.done() and not opened.cancelled():
                opened.result().close()
            opened.cancel()

    async def close(self) -> None:
        """Takes no more connections."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _arrived(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(TICKET_S):
                shown = await reader.readexactly(TICKET_BYTES)
        except (TimeoutError, asyncio.IncompleteReadError, OSError) as error:
            log.warning("a connection without a ticket from %s: %s", _peer(writer), error or "it was silent")
            shown = b""
        opened = None
        for ticket in [known for known in self._offers if hmac.compare_digest(known, shown)]:
            opened = self._offers.pop(ticket)
        if opened is not None and not opened.done():
            connection = socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))
            connection.setblocking(True)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            opened.set_result(connection)
        elif shown:
            log.warning("a connection with a ticket that is not good any more from %s", _peer(writer))
        writer.transport.abort()  # of ours nothing but the descriptor of a connection that was taken is left


def _peer(writer: asyncio.StreamWriter) -> str:
    return ":".join(map(str, (writer.get_extra_info("peername") or ("somebody",))[:2]))
