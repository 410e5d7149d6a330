"""Boxes on a TCP connection: every shape, dtype and stride, damage, tickets, and ends that do not come."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import threading
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from waypath.proto.errors import TransferError
from waypath.workers import streams, tickets
from waypath.workers.streams import Receiver, Sender, pieces
from waypath.workers.tickets import Connections

SHAPES = [(), (0,), (1,), (7,), (300_001,), (3, 0, 2), (5, 7, 3), (2, 400_000), (1000, 333), (2, 3, 100_000)]
DTYPES = [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.int8), np.dtype(np.float64), np.dtype(bool)]


@contextlib.contextmanager
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other = server.accept()[0]
    with one, other:
        yield one, other


def sent(connection: socket.socket, *boxes: np.ndarray[Any, Any]) -> threading.Thread:
    def work() -> None:
        with contextlib.suppress(OSError):
            sender = Sender(connection)
            for box in boxes:
                sender.send(box, contextlib.nullcontext)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("limit", [8, 1000, streams.PIECE_BYTES])
def test_pieces_cover_a_box_once_in_order_within_the_limit(shape: tuple[int, ...], limit: int) -> None:
    if math.prod(shape) > 10_000 and limit == 8:
        pytest.skip("too many")
    box = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    found = [box[(*index, ...)] for index in pieces(shape, 8, limit)]
    assert all(0 < part.nbytes <= limit for part in found)
    assert np.concatenate([p.ravel() for p in found] or [box.ravel()]).tolist() == list(range(box.size))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_boxes_of_every_shape_arrive_bit_for_bit_whatever_the_strides(dtype: np.dtype[Any]) -> None:
    random = np.random.default_rng(0)

    def bits(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        count = math.prod(shape) * dtype.itemsize
        return random.integers(0, 2 if dtype.kind == "b" else 256, count, np.uint8).view(dtype).reshape(shape)

    boxes = [bits(shape) for shape in SHAPES]
    boxes += [bits((50, 3000))[:, 100:2100], bits((9, 8, 7)).transpose(2, 0, 1), bits((40, 600))[::2, ::3]]
    targets = [np.zeros(box.shape, dtype) for box in boxes]
    wide = np.zeros((60, 5000), dtype)
    targets[-3] = wide[:50, 1:2001]
    with connection() as (one, other):
        thread = sent(one, *boxes)
        receiver = Receiver(other, lambda: None)
        for target in targets:
            receiver.fill(target)
        thread.join(10)
    for box, target in zip(boxes, targets, strict=True):
        assert box.tobytes() == target.tobytes()
    assert not wide[50:].any() and not wide[:, 0].any() and not wide[:, 2001:].any()


def test_a_flipped_bit_and_another_size_are_found() -> None:
    box = np.arange(1000, dtype=np.float32)
    with connection() as (one, middle), connection() as (relay, other):
        thread = sent(one, box)
        message = bytearray()
        while len(message) < 4008:
            message += middle.recv(4008)
        thread.join(10)
        message[2000] ^= 4
        relay.sendall(message)
        with pytest.raises(TransferError, match="damaged on the way: CRC32C"):
            Receiver(other, lambda: None).fill(np.zeros(1000, np.float32))
    with connection() as (one, other):
        thread = sent(one, box)
        with pytest.raises(TransferError, match="a piece of 3600 bytes was expected, one of 4000 came"):
            Receiver(other, lambda: None).fill(np.zeros(900, np.float32))
        thread.join(10)


def test_a_sender_that_nobody_reads_gives_the_memory_back() -> None:
    inside = threading.Semaphore(0)

    @contextlib.contextmanager
    def using() -> Iterator[None]:
        yield
        inside.release()
        if cut.is_set():
            raise TransferError("cut off")

    cut = threading.Event()
    raised: list[BaseException] = []
    with connection() as (one, other):

        def work() -> None:
            try:
                Sender(one).send(np.zeros(64 << 20, np.uint8), using)
            except TransferError as error:
                raised.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        other.recv(1)
        cut.set()
        assert inside.acquire(timeout=10)
        thread.join(10)
        assert not thread.is_alive()
    assert [str(error) for error in raised] == ["cut off"]


def test_a_connection_that_ends_is_said() -> None:
    with connection() as (one, other):
        one.sendall(b"half a header"[:5])
        one.close()
        with pytest.raises(EOFError, match="has ended"):
            Receiver(other, lambda: None).fill(np.zeros(10, np.int8))


def run(main: Any) -> None:
    asyncio.run(asyncio.wait_for(main, 30))


async def show(port: int, ticket: bytes) -> bytes:
    """What comes back on a connection that shows `ticket` (b"" when it is closed)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(ticket)
    try:
        return await reader.read(1)
    except ConnectionError:
        return b""
    finally:
        writer.close()


def test_a_ticket_is_good_for_one_connection_while_it_is_waited_for() -> None:
    async def main() -> None:
        connections = Connections()
        async with connections.offer() as offer:
            assert await show(offer.port, b"x" * 32) == b""  # wrong
            assert await show(offer.port, offer.ticket[:31] + b"x") == b""
            shown = asyncio.create_task(show(offer.port, offer.ticket))
            taken = await offer.connected()
            assert await show(offer.port, offer.ticket) == b""  # used
            taken.sendall(b"!")
            assert await shown == b"!"
            port, ticket = offer.port, offer.ticket
        assert taken.fileno() == -1
        async with connections.offer() as other:
            assert other.port == port and other.ticket != ticket
            late = other.ticket
        assert await show(port, late) == b""  # expired
        await connections.close()

    run(main())


def test_a_connection_without_a_ticket_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets, "TICKET_S", 0.1)
    monkeypatch.setattr(tickets, "CONNECT_S", 0.5)

    async def main() -> None:
        connections = Connections()
        async with connections.offer() as offer:
            assert await show(offer.port, offer.ticket[:20]) == b""  # and silent from then on
            with pytest.raises(TransferError, match=r"nobody came with the ticket within 0\.5 s"):
                await offer.connected()
        await connections.close()

    run(main())
