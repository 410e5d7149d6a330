"""Blocking calls from asyncio code.

A wait that nobody wants any more is left behind on a daemon thread, so that Ctrl-C and a timeout end at once: the executor of
`asyncio.to_thread` would be joined when the loop closes. Called by refs.py and client.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(fun: Callable[[], T]) -> T:
    """Runs `fun` on a thread of its own; returns or raises what it does."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def resolve(value: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value, error = None, None
        try:
            value = fun()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(resolve, value, error)

    threading.Thread(target=run, name="waypath-wait", daemon=True).start()
    return await future
