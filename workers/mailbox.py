"""What clients push to this worker until the node that waits for it takes it.

Must not know programs or jax. The data server delivers, the put node takes. Network loop only.
"""

from __future__ import annotations

import asyncio

from waypath.proto.codecs import Bundle
from waypath.proto.errors import CancelledError, ProtocolError

__all__ = ["MAX_MAILBOX_BYTES", "Mailbox"]

MAX_MAILBOX_BYTES = 4 << 30


class Mailbox:
    """Pushed bundles by object id; each is taken once."""

    def __init__(self) -> None:
        self._boxes: dict[str, asyncio.Future[Bundle]] = {}
        self._bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes that nobody has taken yet."""
        return self._bytes

    def deliver(self, name: str, bundle: Bundle) -> None:
        """Keep a pushed object. ProtocolError where one of that name is here already, or too much is."""
        box = self._box(name)
        if box.done():
            raise ProtocolError(f"object {name} was pushed already")
        if self._bytes + bundle.nbytes > MAX_MAILBOX_BYTES:
            raise ProtocolError(f"{self._bytes:,} pushed bytes wait here already; at most {MAX_MAILBOX_BYTES:,} may")
        self._bytes += bundle.nbytes
        box.set_result(bundle)

    async def take(self, name: str) -> Bundle:
        """The pushed object, as soon as it is here."""
        bundle = await asyncio.shield(self._box(name))
        if self._boxes.pop(name, None) is not None:
            self._bytes -= bundle.nbytes
        return bundle

    def drop(self, execution_id: str) -> None:
        """Nobody will take what was pushed for this execution."""
        prefix = f"{execution_id}/"
        for name in [name for name in self._boxes if name.startswith(prefix)]:
            box = self._boxes.pop(name)
            if not box.done():
                box.set_exception(CancelledError(f"{name} is not wanted any more"))
                box.exception()
            elif box.exception() is None:
                self._bytes -= box.result().nbytes

    def _box(self, name: str) -> asyncio.Future[Bundle]:
        if name not in self._boxes:
            self._boxes[name] = asyncio.get_running_loop().create_future()
        return self._boxes[name]
