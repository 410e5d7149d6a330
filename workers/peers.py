"""Where the other workers of the cluster are reached.

Owns the table worker → data address and telling waiters that it changed. Must not know what is asked of a
peer. Called by the runtime (`replace`), the object puller and the transfer (`address`). Network loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from waypath.proto import worker_pb2 as pb
from waypath.proto.errors import UnavailableError

__all__ = ["Peers"]


class Peers:
    """The live workers, as the controller last told them."""

    def __init__(self, on_gone: Callable[[str], None] = lambda worker: None) -> None:
        self.on_gone = on_gone
        self._peers: dict[str, pb.Peer] = {}
        self._changed = asyncio.Event()

    def update(self, peers: Iterable[pb.Peer], gone: Iterable[str] = ()) -> None:
        """Take what has changed: workers that are gone, then those that came."""
        for worker in gone:
            self._peers.pop(worker, None)
            self.on_gone(worker)
        self._peers.update({peer.worker: peer for peer in peers})
        self._changed.set()
        self._changed = asyncio.Event()

    def clear(self) -> None:
        """Another controller, or the same anew: it will tell everything again."""
        self._peers = {}

    def address(self, worker: str) -> str:
        """The data address of `worker` (host:port). UnavailableError if it is not in the table."""
        peer = self._peers.get(worker)
        if peer is None or not peer.data_addresses:
            known = ", ".join(sorted(self._peers)) or "nobody"
            raise UnavailableError(f"worker {worker} is not up; known: {known}")
        return peer.data_addresses[0]

    @property
    def addresses(self) -> set[str]:
        """The data addresses of all workers."""
        return {address for peer in self._peers.values() for address in peer.data_addresses}

    def host(self, worker: str) -> str:
        """The machine of `worker`; "" if it is not in the table."""
        peer = self._peers.get(worker)
        return "" if peer is None else peer.host_id

    async def changed(self, timeout_s: float) -> None:
        """Wait for the next change, at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return
