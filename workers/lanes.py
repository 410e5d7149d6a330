"""The lanes that node executions run on, and the one thread that owns JAX.

Owns: `JaxThread`, a first-in-first-out queue of callables run by the process's main thread; `Lanes`, which
runs a service method on the lane it asks for. Must not know gRPC, programs or jax itself. Called by `main`
(runs the queue) and the runtime (submits).

Gang order. Everything that touches devices goes through one queue, so a process enqueues XLA programs in the
order in which they were submitted. The runtime submits jax-lane nodes one by one in program order; members of
a world that get the same executions in the same order therefore enter collectives in the same order. Engines
feed the same queue through `ServiceContext.submit_jax`; they must only submit programs of their own process.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from waypath.workers.service import Call, Lane

__all__ = ["JaxThread", "Lanes", "NoJaxThread"]

T = TypeVar("T")


class JaxThread:
    """A queue of callables, run in order by whichever thread calls `run` (the main thread of a worker)."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._started_at: float | None = None

    @property
    def busy_s(self) -> float:
        """Seconds that the callable running now has run; 0.0 when idle. After a stop it tells stuck from
        idle.
        """
        started = self._started_at
        return 0.0 if started is None else time.monotonic() - started

    @property
    def has_more(self) -> bool:
        """Is anything queued behind what runs now?"""
        return not self._queue.empty()

    def submit(self, fn: Callable[[], T], /) -> concurrent.futures.Future[T]:
        """Queue `fn`; the future gives its result or exception. RuntimeError after `stop`."""
        if self._closed.is_set():
            raise RuntimeError("the JAX thread has stopped")
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn())
            except BaseException as error:  # whoever waits for the future gets it, SystemExit included
                future.set_exception(error)

        self._queue.put(work)
        return future

    def run(self) -> None:
        """Run callables in order until `stop`. What is still queued then is dropped."""
        while (work := self._queue.get()) is not None and not self._closed.is_set():
            self._started_at = time.monotonic()
            work()
            self._started_at = None
            del work  # a finished callable must not keep arrays alive while the thread waits for the next

    def stop(self) -> None:
        """Make `run` return after the callable that runs now."""
        self._closed.set()
        self._queue.put(None)


class NoJaxThread(JaxThread):
    """Stands in for the JAX thread in workers that never load jax: nothing may be submitted."""

    def submit(self, fn: Callable[[], T], /) -> concurrent.futures.Future[T]:
        """RuntimeError: this worker has no JAX thread."""
        raise RuntimeError("this worker has no JAX thread; use the host or async lane")


class Lanes:
    """Runs service methods on their lanes. `run` is called on the network loop and returns what the method
    does.
    """

    def __init__(self, jax_thread: JaxThread, host_threads: int = 4) -> None:
        self._jax = jax_thread
        self._host = concurrent.futures.ThreadPoolExecutor(host_threads, thread_name_prefix="host")
        self._ready = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="ready")

    async def run(self, lane: Lane, method: Callable[[Call], Any], call: Call) -> Any:
        """Run `method(call)` on `lane` and wait for it.

        Cancelling stops an async method; a jax or host method that has begun runs on and its outcome is
        dropped.
        """
        if lane == "async":
            return await method(call)
        if lane == "jax":
            return await asyncio.wrap_future(self.start(method, call))
        return await asyncio.wrap_future(self._host.submit(method, call))

    def start(self, method: Callable[[Call], Any], call: Call) -> concurrent.futures.Future[Any]:
        """Queues `method(call)` on the JAX thread; returns at once."""
        return self._jax.submit(lambda: method(call))

    async def ready(self, wait: Callable[[], None]) -> None:
        """Blocks on a thread until what the JAX thread has enqueued is done; one after the other, in the order of the calls.

        So what failed is told before what was computed from it.
        """
        await asyncio.wrap_future(self._ready.submit(wait))

    def close(self) -> None:
        """Take no more host work; threads that run are left to end."""
        self._host.shutdown(wait=False, cancel_futures=True)
        self._ready.shutdown(wait=False, cancel_futures=True)
